# run_deepspeed ARGUMENTS...: the `deepspeed` runner, with SIGTERM and SIGINT passed on; sourced by our scripts.
# On one node the runner forwards nothing and leaves its launcher behind, so the signal goes to the launcher, its
# child, which hands it to the ranks; they agree on a step, save and leave. Over pdsh the launchers are on other
# machines: set AL_STOP_HOSTS (a,b,c) and AL_STOP_PORT, and each is found there by its master port.
run_deepspeed() {
    deepspeed "$@" &
    runner=$!
    trap 'signalled=yes; stop_ranks' TERM INT
    signalled=yes
    while [ -n "$signalled" ]; do  # a trapped signal ends `wait` early; the next one tells how the runner ended
        signalled=
        status=0
        wait "$runner" || status=$?
    done
    trap - TERM INT
    return "$status"
}

stop_ranks() {
    echo "Stopping at the next step." >&2
    if [ -n "${AL_STOP_HOSTS:-}" ]; then
        pdsh -w "$AL_STOP_HOSTS" "pkill -TERM -f 'deepspeed[.]launcher[.]launch .*--master_port=$AL_STOP_PORT '" >&2 || true
        return
    fi
    python - "$runner" <<'PYTHON' || true
import sys
from contextlib import suppress

import psutil

with suppress(psutil.NoSuchProcess):  # gone by itself, or by a signal to the whole process group
    for child in psutil.Process(int(sys.argv[1])).children():
        child.terminate()
PYTHON
}
