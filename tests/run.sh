#!/usr/bin/env bash
# The test command: makes or reuses .venv, then lints and tests. Needs no GPU. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
AL_EXTRAS="train,quickstart,test"
source launch/venv.sh
ruff check .
ruff format --check .
# Launches have time limits; compiling DeepSpeed's CPU op, once a venv, does not count against the first one's.
DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$venv/torch_extensions" python -c \
    "from deepspeed.accelerator import get_accelerator as get; get().create_op_builder('ShareMemCommBuilder').load()"
# Two files at a time: for half of a launch one process imports and the other core waits. Fixtures stay in a file.
OMP_NUM_THREADS=1 exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
