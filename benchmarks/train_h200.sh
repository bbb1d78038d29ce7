#!/usr/bin/env bash
# Wan 2.1's 1.3B transformer at ZeRO-3 on this machine's GPUs, S from 256 to 32,760, and what it measured.
#   bash benchmarks/train_h200.sh OUT      writes OUT/{report.json,report.txt,report.png,train.log,telemetry.jsonl}
#   bash benchmarks/train_h200.sh OUT tiny the same path on CPUs, with a small model and small latents
# Fits a call of five minutes: training that has not ended by then is cut off, and the report covers what ran.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1
size=${2:-1.3b}
work=$(mktemp -d)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
batching=data_efficiency.data_sampling.dual_constraint_batching
arguments=(--config launch/configs/zero3.json --run "$work/run" --preset "$size" --epochs 100
    --gradient-checkpointing --set "$batching.manifest=$work/corpus/manifest.parquet")
if [ "$size" = tiny ]; then
    ranks=2
    python benchmarks/synthetic_corpus.py "$work/corpus" tiny
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
    arguments+=(--max-steps 6 --precision fp32 --set "$batching.max_tokens=2800" --set "$batching.max_cost=2e6")
else
    ranks=$(python -c "import torch; print(torch.cuda.device_count())")
    python benchmarks/synthetic_corpus.py "$work/corpus"
    arguments+=(--max-steps 12)
fi
timeout --kill-after 5 "${AL_SECONDS:-220}" deepspeed --num_accelerators "$ranks" --master_port 29790 --log_level warning \
    launch/train_wan.py "${arguments[@]}" >"$out/train.log" 2>&1 || echo "training ended with $?" | tee -a "$out/train.log"
tail -n 5 "$out/train.log"
cp "$work/run/telemetry.jsonl" "$out/"
[ ! -d "$work/run/model" ] || du -sh "$work/run/model" "$work/run/checkpoints"
al-deepspeed report "$work/run" --json >"$out/report.json"
al-deepspeed report "$work/run" --plot "$out/report.png" | tee "$out/report.txt"
rm -rf "$work"
