"""launch/launcher.sh, the part of the quickstart that passes signals on."""

import signal
import subprocess
from pathlib import Path

LAUNCHER = Path(__file__).parent.parent / "launch" / "launcher.sh"


def test_a_stop_after_the_runner_has_gone_is_quiet():
    script = f"source {LAUNCHER}; true & runner=$!; wait $runner; stop_ranks"
    result = subprocess.run(["bash", "-euc", script], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr == "Stopping at the next step.\n"


RUNNER = """#!/usr/bin/env python3
import subprocess, sys
child = '''
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("up", flush=True)
time.sleep(60)
'''
sys.exit(subprocess.run([sys.executable, "-c", child]).returncode)
"""


def test_a_stop_reaches_the_child_of_the_runner_whose_code_is_returned(tmp_path):
    """The stand-in for `deepspeed` forwards no signal, as on one node, and leaves with its child's code."""
    (tmp_path / "deepspeed").write_text(RUNNER)
    (tmp_path / "deepspeed").chmod(0o755)
    script = f"PATH={tmp_path}:$PATH; source {LAUNCHER}; run_deepspeed train.py"
    with subprocess.Popen(["bash", "-uc", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 7
        assert process.stderr.read() == b"Stopping at the next step.\n"
