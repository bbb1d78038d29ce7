"""The scripts below launch/: they parse, and say how they are used."""

import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parent.parent / "launch"


def test_wrong_use_prints_the_usage():
    result = subprocess.run(["bash", LAUNCH / "multinode.sh", "nowhere"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "HOSTFILE TRAIN_WAN_ARGUMENTS" in result.stderr


@pytest.mark.parametrize(
    "script", ["launcher.sh", "multinode.sh", "quickstart.sh", "slurm.sbatch", "venv.sh"]
)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", LAUNCH / script], check=True)
