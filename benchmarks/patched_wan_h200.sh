#!/usr/bin/env bash
# diffusers' Wan 2.1 1.3B patched in memory against unpatched, on one GPU:
#   bash benchmarks/patched_wan_h200.sh OUT [MINUTES] [tiny]
# Writes OUT/patched_wan.{json,png,txt,log}, and OUT/build.log of the kernels, which compile beside the first curves.
# After MINUTES (default 7; an H200 took 4 min 15 s) nothing new begins and what runs is cut off; the report covers what
# there is. Exit code 1 when the curves differ by more than noise or a figure is missing. `tiny`: the same path on a
# CPU.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "$1" && cd "$1" && pwd)
seconds=$(python3 -c "import sys; print(round(60 * float(sys.argv[1])))" "${2:-7}")
size=${3:-1.3b}
trap 'rm -f /dev/shm/deepspeed_allreduce_buffer_*_29810_*' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
rm -f "$out"/patched_wan.{json,png,txt}
if [ "$size" = tiny ]; then
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
else
    timeout "$seconds" python3 -c "from al_deepspeed.ops.backend import load_kernels; load_kernels()" \
        >"$out/build.log" 2>&1 &
fi
# The launcher and the imports come before --seconds counts, the picture after it.
timeout --kill-after 5 "$((seconds - 8 - SECONDS))" python3 -m deepspeed.launcher.runner \
    --num_accelerators 1 --master_port 29810 \
    --log_level warning benchmarks/patched_wan.py "$out" --size "$size" --seconds "$((seconds - 40))" \
    >"$out/patched_wan.log" 2>&1 || echo "the run ended with $?: $(tail -n 5 "$out/patched_wan.log")"
python3 benchmarks/patched_wan_report.py "$out" | tee "$out/patched_wan.txt"
