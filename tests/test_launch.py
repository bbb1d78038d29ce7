"""launch/multinode.sh: two emulated nodes of this machine, stopped by a signal and resumed over pdsh."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import EXTENSIONS, Launch, free_port
from training_runs import REPOSITORY, largest_difference, trainer_arguments, unbroken_run, what_was_trained

from al_deepspeed.telemetry import FILE_NAME, read_telemetry
from al_deepspeed.training.checkpoints import latest

PDSH = """#!/bin/sh
# Stands in for pdsh: runs the command on this machine once for each host, with %n replaced by its number.
while [ "$1" != -w ]; do shift; done
hosts=$2; shift 2
number=0; jobs=
for host in $(echo "$hosts" | tr , ' '); do
    sh -c "$(echo "$*" | sed "s/%n/$number/g")" & jobs="$jobs $!"
    number=$((number + 1))
done
status=0
for job in $jobs; do wait "$job" || status=$?; done
exit $status
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.getbasetemp()


def start(folder: Path, port: int, hostfile: Path, arguments: list[str], **variables: str) -> Launch:
    """One multinode.sh with its log in `folder`."""
    folder.mkdir(parents=True)
    environment = {
        **os.environ,
        "PATH": f"{folder.parent / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **variables,
    }
    command = ["bash", str(REPOSITORY / "launch" / "multinode.sh"), str(hostfile), *arguments]
    return Launch(command, folder, port, 270, environment)


def test_two_nodes_stopped_and_resumed_train_what_one_node_trains(base, tmp_path):
    run = tmp_path / "run"
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    arguments = trainer_arguments(run, base)
    port = free_port()

    # One launcher a node, without ssh; one node's script is told to stop after some steps.
    with (
        start(tmp_path / "node0", port, hostfile, arguments, NODE_RANK="0") as first,
        start(tmp_path / "node1", port, hostfile, arguments, NODE_RANK="1") as second,
    ):
        while not (run / FILE_NAME).exists() or len(read_telemetry(run)) < 2:
            assert first.process.poll() is None and second.process.poll() is None, (
                first.logs() + second.logs()
            )
            assert time.monotonic() < first.deadline, first.logs() + second.logs()
            time.sleep(0.1)
        second.process.send_signal(signal.SIGTERM)
        first.wait(expect=0)  # its rank left the loop as agreed
        second.wait(expect=None)  # the launcher that was signalled exits with 1
    stopped_at = len(read_telemetry(run))
    assert 2 <= stopped_at < 12
    assert latest(run / "checkpoints") == f"step_{stopped_at}"
    assert not (run / "model").exists()

    # Resumed over pdsh: one script starts both nodes.
    (tmp_path / "bin").mkdir()
    for name, text in (("pdsh", PDSH), ("ssh", "#!/bin/sh\n")):
        program = tmp_path / "bin" / name
        program.write_text(text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with start(tmp_path / "pdsh", free_port(), hostfile, [*arguments, "--resume"]) as both:
        both.wait()
    assert what_was_trained(run) == what_was_trained(unbroken_run(base))
    assert largest_difference(run, unbroken_run(base)) < 1e-7


def test_wrong_use_prints_the_usage():
    result = subprocess.run(
        ["bash", REPOSITORY / "launch" / "multinode.sh", "nowhere"], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "HOSTFILE TRAIN_WAN_ARGUMENTS" in result.stderr


@pytest.mark.parametrize(
    "script", ["launcher.sh", "multinode.sh", "quickstart.sh", "slurm.sbatch", "venv.sh"]
)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", REPOSITORY / "launch" / script], check=True)
