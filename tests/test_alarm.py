"""After a failed allocation every rank ends with rank 0's code, whatever breaks meanwhile."""

import os
import subprocess
import sys

from launching import free_port

# Another rank has failed and left: this one's collective breaks while its listener is still saving.
RANK = """
import json, time
import torch.distributed as dist
from al_deepspeed.calibration import alarm
dist.init_process_group("gloo")
def save(failure):
    time.sleep(1.0)
    print("saved", failure["rank"], flush=True)
    return 0
ours = alarm.Alarm(save)
ours._store.set(alarm.FAILED, json.dumps({"rank": 1}))
with ours.guards(1, (1, 4, 4), 4):
    raise RuntimeError("Connection closed by peer")
"""


def test_a_collective_broken_by_ranks_that_left_does_not_end_this_one_first():
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **world, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", RANK], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["saved 1"]), done.stderr
