#!/usr/bin/env bash
# Wan 2.1 on one GPU at ZeRO-3: scanned by `al-deepspeed calibrate`, and twelve points that the scan did not have
# (benchmarks/calibration_points.csv: other batch sizes, four of other shapes) measured against the prediction.
#   bash benchmarks/calibration_h200.sh OUT        the 1.3B model whole, then 8 layers of the 14B model
#   bash benchmarks/calibration_h200.sh OUT tiny   the same path on a CPU, with small models and small latents
# Writes OUT/{1.3b,14b-8layers}.{json,png,log,check.json}. Ends within 9.5 minutes: a scan keeps its budget, its
# calibration is on disk before the points are checked, and a check that is cut off leaves the points it had.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "$1" && cd "$1" && pwd)
size=${2:-full}
work=$(mktemp -d)
trap 'rm -rf "$work" /dev/shm/deepspeed_allreduce_buffer_*_2919[01]_*' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
started=$SECONDS

# calibrate NAME SECONDS BUDGET PORT FACTORY_OPTIONS...
calibrate() {
    local name=$1 limit=$2 budget=$3 port=$4
    shift 4
    echo "== $name, scan of $budget"
    timeout --kill-after 5 "$limit" python3 -c "from al_deepspeed.cli import main; main()" calibrate \
        --deepspeed-config launch/configs/zero3.json --manifest "$work/corpus/manifest.parquet" \
        --factory launch.train_wan:calibration --budget "$budget" "${limits[@]}" \
        --launcher "--num_accelerators 1 --master_port $port --log_level warning" \
        --check "$points" --check-out "$out/$name.check.json" --out "$out/$name.json" \
        -- --gradient-checkpointing "$@" >"$out/$name.log" 2>&1 || echo "$name ended with $?" | tee -a "$out/$name.log"
    grep -A 40 "^check: " "$out/$name.log" || tail -n 40 "$out/$name.log"
    echo "== $((SECONDS - started)) s since the start"
}

if [ "$size" = tiny ]; then
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
    python3 benchmarks/synthetic_corpus.py "$work/corpus" tiny
    points=$work/points.csv
    printf 'B,shape\n3,1x6x6\n2,5x8x16\n' >"$points"
    limits=(--largest-batch 4 --most-repeats 2)
    calibrate 1.3b 240 20s 29190 --preset tiny --precision fp32
    calibrate 14b-8layers 240 20s 29191 --preset tiny --layers 2 --precision fp32
else
    python3 benchmarks/synthetic_corpus.py "$work/corpus"
    points=benchmarks/calibration_points.csv
    limits=(--largest-batch 512 --most-repeats 6)
    calibrate 1.3b 280 130s 29190 --preset 1.3b
    calibrate 14b-8layers 260 110s 29191 --preset 14b --layers 8
fi
