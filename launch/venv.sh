# Makes or reuses .venv with this package and the extras in $AL_EXTRAS; sourced by quickstart.sh and tests/run.sh.
#   AL_TORCH   pip's requirement for torch (default torch>=2.6), so that a CPU machine need not fetch a CUDA build.
#   AL_PYTHON  the interpreter that makes the venv (default python3).
# A second run installs nothing: the stamp has a line for each set of requirements that was installed.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
stamp="$venv/.al-deepspeed"
wanted="${AL_TORCH:-torch>=2.6} $AL_EXTRAS $(cksum <"$root/setup.py")"
if ! grep -qsxF "$wanted" "$stamp"; then
    echo "Installing into $venv: ${AL_TORCH:-torch>=2.6}, al-deepspeed[$AL_EXTRAS]"
    [ -x "$venv/bin/python" ] || "${AL_PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --quiet "${AL_TORCH:-torch>=2.6}"
    "$venv/bin/pip" install --quiet --editable "$root[$AL_EXTRAS]"
    echo "$wanted" >>"$stamp"
fi
export PATH="$venv/bin:$PATH"
