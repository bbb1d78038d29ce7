#!/usr/bin/env bash
# The trainer on many nodes. The repository, its environment and the run's folder have one path on all of them.
#
#   over pdsh, from any node:    bash launch/multinode.sh HOSTFILE TRAIN_WAN_ARGUMENTS...
#   without ssh, on every node:  NODE_RANK=0 MASTER_ADDR=node0 bash launch/multinode.sh HOSTFILE TRAIN_WAN_ARGUMENTS...
#
# HOSTFILE has a line `name slots=N` a node, N ranks each; NODE_RANK counts its lines from 0. MASTER_PORT is 29500
# unless set. The environment that is active is used, else .venv. Over pdsh, variables that the ranks need (NCCL's
# are sent already) go into a file .deepspeed_env.
# SIGTERM to this script stops all ranks at the next step, saved; without ssh, one node's script is enough.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/launcher.sh
if [ $# -lt 1 ] || [ ! -f "$1" ]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
hostfile=$1
shift
command -v deepspeed >/dev/null || export PATH="$PWD/.venv/bin:$PATH"
port=${MASTER_PORT:-29500}
where=(--hostfile "$hostfile" --master_port "$port")
[ -z "${MASTER_ADDR:-}" ] || where+=(--master_addr "$MASTER_ADDR")
if [ -n "${NODE_RANK:-}" ]; then
    where+=(--no_ssh --node_rank "$NODE_RANK")
else
    where+=(--launcher pdsh --force_multi)
    AL_STOP_HOSTS=$(awk '/^[^#]/ && NF {print $1}' "$hostfile" | paste -sd, -)
    AL_STOP_PORT=$port
fi
run_deepspeed "${where[@]}" launch/train_wan.py "$@"
