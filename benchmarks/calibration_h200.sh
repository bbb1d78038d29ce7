#!/usr/bin/env bash
# Wan 2.1 on one GPU at ZeRO-3: scanned by `al-deepspeed calibrate`, then measured against the prediction at points
# that the scan did not have.
#   bash benchmarks/calibration_h200.sh OUT        the 1.3B model whole, then 8 layers of the 14B model
#   bash benchmarks/calibration_h200.sh OUT 1.3b   the first alone; about 6 minutes, 150 s of them the scan
#   bash benchmarks/calibration_h200.sh OUT 14b    the second alone; about 4 minutes, 80 s of them the scan
#   bash benchmarks/calibration_h200.sh OUT tiny   the same path on a CPU, with small models and small latents
# Writes OUT/{1.3b,14b}.{json,png,log,check.json}. A model ends within 8 minutes: a scan keeps its budget, its
# calibration is on disk before the points are checked, and a check that is cut off leaves the points it had.
#
# The points, benchmarks/calibration_points_{1.3b,14b}.csv: twelve of shapes that were not scanned. They are
# micro-batches of the size that a plan runs, which fills them up to one cost: from an eighth of M_mem (235,000 tokens
# for the 1.3B model, 52,000 for the 14B layers) to three quarters. Two are small all the same: the first lies
# below the floor that the host sets (1.2 s, or 0.36 s, drifting by a tenth within minutes), the second a third to a
# half above it.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "$1" && cd "$1" && pwd)
what=${2:-both}
work=$(mktemp -d)
trap 'rm -rf "$work" /dev/shm/deepspeed_allreduce_buffer_*_2910[01]_*' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
started=$SECONDS

# calibrate NAME SECONDS BUDGET PORT POINTS FACTORY_OPTIONS...
calibrate() {
    local name=$1 limit=$2 budget=$3 port=$4 points=$5
    shift 5
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

if [ "$what" = tiny ]; then
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
    python3 benchmarks/synthetic_corpus.py "$work/corpus" tiny
    printf 'B,shape\n3,1x6x6\n2,5x8x16\n' >"$work/points.csv"
    limits=(--largest-batch 4 --most-repeats 2)
    calibrate 1.3b 240 20s 29100 "$work/points.csv" --preset tiny --precision fp32
    calibrate 14b 240 20s 29101 "$work/points.csv" --preset tiny --layers 2 --precision fp32
    exit
fi
case $what in
both | 1.3b | 14b) ;;
*) echo "$what is no choice; allowed: both, 1.3b, 14b, tiny" >&2 && exit 2 ;;
esac
python3 benchmarks/synthetic_corpus.py "$work/corpus"
limits=(--largest-batch 512 --most-repeats 6)
if [ "$what" != 14b ]; then
    calibrate 1.3b 460 150s 29100 benchmarks/calibration_points_1.3b.csv --preset 1.3b
fi
if [ "$what" != 1.3b ]; then
    calibrate 14b 300 80s 29101 benchmarks/calibration_points_14b.csv --preset 14b --layers 8
fi
