"""launch/multinode.sh on emulated nodes of this machine: its start, and a stand-in for pdsh."""

import os
import stat
import sys
from pathlib import Path

from launching import EXTENSIONS, Launch
from training_runs import REPOSITORY

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


def stand_in_for_pdsh(folder: Path) -> None:
    """Makes `pdsh` there; and `ssh`, which DeepSpeed's runner tries on every node."""
    folder.mkdir()
    for name, text in (("pdsh", PDSH), ("ssh", "#!/bin/sh\n")):
        program = folder / name
        program.write_text(text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
