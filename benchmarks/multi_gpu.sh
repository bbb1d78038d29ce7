#!/usr/bin/env bash
# Strategies and AdaLN side by side on all GPUs of this machine: bash benchmarks/multi_gpu.sh OUT [MINUTES] [tiny]
#
# Wan 1.3B's width, AL_LAYERS of its 30 layers, at ZeRO-3, on the mix of workload_mix.csv (S up to 75,600):
#   speed    calibrates on all ranks, once with the eager and once with the fused AdaLN, then trains an epoch of the
#            same samples by equal_token, dual_constraint and balanced with each -> OUT/multi_gpu.{json,png,txt} and,
#            with logs, OUT/records.tar.gz
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

model=(--preset 1.3b --layers "${AL_LAYERS:-2}" --gradient-checkpointing)
samples=${AL_SAMPLES:-1150} longest=75600 scan=30s tiny=
ranks=$(python -c "import torch; print(torch.cuda.device_count())")
if [ "$size" = tiny ]; then
    ranks=2
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
    model=(--preset tiny --precision fp32)
    samples=${AL_SAMPLES:-150} longest=2970 scan=20s tiny=--tiny
fi
launcher=(--num_accelerators "$ranks" --master_port 29790 --log_level warning)

fused_adaln() { # OP: the ds_config's key
    echo "fused_adaln={\"enabled\": $([ "$1" = fused ] && echo true || echo false)}"
}

within_time() { # COMMAND...: says how it ended when that was not well
    local left=$((deadline - SECONDS))
    [ "$left" -gt 10 ] || { echo "no time left for: $*"; return; }
    timeout --kill-after 5 "$left" "$@" || echo "ended with $?: $*"
}

speed() {
    local max_tokens=$((longest * 22 / 10)) op corpus
    # The corpus takes a minute to write and the kernels one to build. A scan needs neither, but for one sample of
    # each shape; which budget suits the whole corpus is asked afterwards.
    python benchmarks/workload_corpus.py "$work/corpus" "$samples" $tiny &
    corpus=$!
    [ -n "$tiny" ] || python -c "from al_deepspeed.ops.backend import load_kernels; load_kernels()" &
    python benchmarks/workload_corpus.py "$work/scanned" 1 $tiny
    for op in eager fused; do
        within_time al-deepspeed calibrate --deepspeed-config launch/configs/zero3.json \
            --factory launch.train_wan:calibration --launcher "${launcher[*]}" --budget "$scan" \
            --manifest "$work/scanned/manifest.parquet" --max-tokens "$max_tokens" \
            --out "$work/calibration_$op.json" -- "${model[@]}" --set "$(fused_adaln "$op")" \
            >"$work/calibrate_$op.log" 2>&1
        tail -n 3 "$work/calibrate_$op.log"
    done
    wait "$corpus"
    al-deepspeed calibrate --calibration "$work/calibration_eager.json" --out "$work/calibration_eager.json" \
        --manifest "$work/corpus/manifest.parquet" --world-size "$ranks"
    # Both ops run the plans of the eager calibration: the same micro-batches.
    within_time deepspeed "${launcher[@]}" benchmarks/multi_gpu.py "$work" \
        --config launch/configs/zero3.json "${model[@]}" --set "$batching.manifest=$work/corpus/manifest.parquet" \
        --set "$batching.calibration=$work/calibration_eager.json" --set "$batching.max_tokens=$max_tokens" \
        --set "$batching.max_cost=null" --set "$batching.exponent=null" >"$work/train.log" 2>&1
    tail -n 3 "$work/train.log"
    tar -czf "$out/records.tar.gz" -C "$work" --exclude corpus --exclude scanned --exclude warm_up .
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
