#!/usr/bin/env bash
# The test command: makes or reuses .venv, then lints and tests. Needs no GPU. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
AL_EXTRAS="train,quickstart,test"
source launch/venv.sh
ruff check .
ruff format --check .
exec python -m pytest "$@"
