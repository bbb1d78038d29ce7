#!/usr/bin/env bash
# Strategies and AdaLN side by side on all GPUs of this machine: bash benchmarks/multi_gpu.sh OUT [MINUTES] [tiny]
#
# Wan 1.3B's width, AL_LAYERS of its 30 layers, at ZeRO-3, on the mix of workload_mix.csv (S up to 75,600):
#   speed    calibrates on all ranks, then trains an epoch of the same samples by equal_token, dual_constraint and
#            balanced, with the eager and with the fused AdaLN -> OUT/multi_gpu.{json,png}, OUT/records.tar.gz
#   checks   parameters after five steps on two ranks against one process (fp32, SGD); a rank killed, the run
#            resumed -> OUT/checks.txt
# AL_PARTS chooses (default "speed checks"). What has not ended after MINUTES (default 10) is cut off, and the report
# covers what ran. `tiny`: the same path on 2 CPU ranks.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1
deadline=$((SECONDS + $(python -c "import sys; print(round(60 * float(sys.argv[1])))" "${2:-10}") - 20))
size=${3:-}
work=$(mktemp -d)
trap 'rm -rf "$work"; rm -f /dev/shm/deepspeed_allreduce_buffer_*_29790_*' EXIT
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
batching=data_efficiency.data_sampling.dual_constraint_batching

model=(--preset 1.3b --layers "${AL_LAYERS:-3}" --gradient-checkpointing)
samples=${AL_SAMPLES:-1150} longest=75600 scan=45s
ranks=$(python -c "import torch; print(torch.cuda.device_count())")
if [ "$size" = tiny ]; then
    ranks=2
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
    model=(--preset tiny --precision fp32)
    samples=${AL_SAMPLES:-150} longest=2970 scan=20s
    python benchmarks/workload_corpus.py "$work/corpus" "$samples" --tiny
fi
launcher=(--num_accelerators "$ranks" --master_port 29790 --log_level warning)

within_time() { # COMMAND...: says how it ended when that was not well
    local left=$((deadline - SECONDS))
    [ "$left" -gt 10 ] || { echo "no time left for: $*"; return; }
    timeout --kill-after 5 "$left" "$@" || echo "ended with $?: $*"
}

speed() {
    [ -d "$work/corpus" ] || python benchmarks/workload_corpus.py "$work/corpus" "$samples"
    local max_tokens=$((longest * 22 / 10))
    model+=(--set "$batching.manifest=$work/corpus/manifest.parquet")
    for op in eager fused; do
        local enabled=false
        [ "$op" = eager ] || enabled=true
        local own=("${model[@]}" --set "fused_adaln={\"enabled\": $enabled}")
        within_time al-deepspeed calibrate --deepspeed-config launch/configs/zero3.json \
            --factory launch.train_wan:calibration --launcher "${launcher[*]}" --budget "$scan" \
            --manifest "$work/corpus/manifest.parquet" --max-tokens "$max_tokens" \
            --out "$work/calibration_$op.json" -- "${own[@]}" >"$out/calibrate_$op.log" 2>&1
        tail -n 3 "$out/calibrate_$op.log"
        # Both ops run the plans of the eager calibration: the same micro-batches.
        within_time deepspeed "${launcher[@]}" benchmarks/multi_gpu.py "$work/$op" \
            --config launch/configs/zero3.json "${own[@]}" \
            --set "$batching.calibration=$work/calibration_eager.json" --set "$batching.max_tokens=$max_tokens" \
            --set "$batching.max_cost=null" --set "$batching.exponent=null" >"$out/train_$op.log" 2>&1
        tail -n 3 "$out/train_$op.log"
    done
    tar -czf "$out/records.tar.gz" -C "$work" --exclude corpus --exclude warm_up .
    python benchmarks/multi_gpu_report.py "$work" "$out" | tee "$out/multi_gpu.txt"
}

checks() {
    export AL_TEST_ACCELERATOR=${DS_ACCELERATOR:-cuda}
    within_time python -m pytest tests/test_engine.py -k "five or killed" -v -p no:cacheprovider -o addopts="" \
        >"$out/checks.txt" 2>&1
    tail -n 3 "$out/checks.txt"
}

for part in ${AL_PARTS:-speed checks}; do
    "$part"
done
