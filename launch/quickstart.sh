#!/usr/bin/env bash
# From nothing to a measured comparison: installs into .venv, makes a corpus of real pictures and clips, calibrates
# (what a micro-batch of each size costs here) and trains a small Wan on it twice (batches of equal tokens, then
# dual-constraint batches; the same samples) through `deepspeed` at ZeRO-3, and prints what was measured. One rank
# a GPU; without GPUs, 2 ranks on the CPU.
# What is there is reused: remove runs/quickstart to train again. Arguments go to train_wan.py (--max-steps 4).
# AL_TORCH and AL_PYTHON choose torch and the interpreter: see launch/venv.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
AL_EXTRAS="train,quickstart"
source launch/venv.sh
source launch/launcher.sh

python launch/quickstart_corpus.py corpus/quickstart

ranks=$(python -c "import torch; print(torch.cuda.device_count())")
precision=config
if [ "$ranks" = 0 ]; then
    ranks=2
    precision=fp32  # bfloat16 is slower than fp32 on most CPUs
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=$((($(nproc) + 1) / 2))
    export TORCHDYNAMO_DISABLE=1  # nothing is compiled here, yet DeepSpeed would load Inductor: seconds a launch
fi
export TORCH_EXTENSIONS_DIR="$venv/torch_extensions"  # builds shared between environments wait for each other
port=$(python -c "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])")
trap 'rm -f /dev/shm/deepspeed_allreduce_buffer_*_"$port"_*' EXIT  # CPU ranks leave their shared memory behind
launcher="--num_accelerators $ranks --master_port $port --log_level warning"
if [ ! -f runs/quickstart/calibration.json ]; then
    al-deepspeed calibrate --deepspeed-config launch/configs/quickstart.json --factory launch.train_wan:calibration \
        --launcher "$launcher" --budget 30s --largest-batch 16 --most-repeats 3 \
        --out runs/quickstart/calibration.json -- --precision "$precision"
fi
for strategy in equal_token dual_constraint; do
    run=runs/quickstart/$strategy
    if [ -f "$run/model/config.json" ]; then
        echo "Reusing $run"
        continue
    fi
    run_deepspeed $launcher launch/train_wan.py \
        --config launch/configs/quickstart.json --precision "$precision" --run "$run" --resume \
        --set "data_efficiency.data_sampling.dual_constraint_batching.strategy=$strategy" \
        --epochs 5 --validate-every 10 "$@"
done
al-deepspeed report runs/quickstart/equal_token runs/quickstart/dual_constraint --plot runs/quickstart/report.png
