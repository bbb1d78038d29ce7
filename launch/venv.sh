# Makes or reuses .venv with this package and the extras in $AL_EXTRAS; sourced by quickstart.sh and tests/run.sh.
#   AL_TORCH   pip's requirement for torch (default torch>=2.6). torch==2.13.0 fetches a CPU build where one is at hand.
#   AL_PYTHON  the interpreter that makes the venv (default python3).
# A second run installs nothing: the stamp holds what the venv was made from.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
stamp="$venv/.al-deepspeed"
wanted="${AL_TORCH:-torch>=2.6} $AL_EXTRAS $(cksum <"$root/setup.py")"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "Making $venv (${AL_TORCH:-torch>=2.6}; $AL_EXTRAS)"
    [ -x "$venv/bin/python" ] || "${AL_PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --quiet "${AL_TORCH:-torch>=2.6}"
    "$venv/bin/pip" install --quiet --editable "$root[$AL_EXTRAS]"
    echo "$wanted" >"$stamp"
fi
export PATH="$venv/bin:$PATH"
