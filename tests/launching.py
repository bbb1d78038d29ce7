"""Real `deepspeed` launches, for tests: own port, time limit, own clean-up, captured logs.

Ranks run on the CPU; with AL_TEST_ACCELERATOR=cuda, one a GPU.

    with launch(script, "--flag", ranks=2, folder=tmp_path) as run:
        run.wait()                      # raises with every rank's log unless it exits with 0
        print(run.rank_log(1))

A launch is three layers of processes: the `deepspeed` runner, its launcher, and the ranks. The runner
forwards no signal on one node, so a launch gets its own process group, which leaving the `with` block kills.

What made launches hang now and then, and what is done about it here:
- DeepSpeed compiles its CPU op at the first launch, and at each later one ninja looks whether it still
  holds. Torch guards that by a lock file, which stays when the process that made it is killed: a rank killed
  while it starts makes every later launch wait, for ever and without a word. Two virtual environments that
  share torch's default folder also build the op anew, in turns. So the launches of one virtual environment
  have a folder of their own, and a lock there that no process holds is removed.
- A rank that fails within a collective makes gloo abort the others ("terminate called"): look for its error.
- A DataLoader worker that ignores SIGTERM keeps its rank from exiting: Python ends it by SIGTERM and waits.
At the time limit each rank gets SIGABRT and, by `PYTHONFAULTHANDLER`, prints where its threads stand; then
the process group is killed.
"""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

LAUNCHED = Path(__file__).parent / "launched"
SHARED_MEMORY = Path("/dev/shm")
EXTENSIONS = Path(sys.prefix) / "torch_extensions"
ACCELERATOR = os.environ.get("AL_TEST_ACCELERATOR", "cpu")


def free_port() -> int:
    """A master port that nobody listens on and that no left-over DeepSpeed segment is named after.

    Below the range from which the kernel serves outgoing connections, so that none of those takes it
    between this check and the launch.
    """
    for _ in range(200):
        port = random.SystemRandom().randint(20000, 29499)
        if any(SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{port}_*")):
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise RuntimeError("no free port between 20000 and 29499")


def remove_stale_locks() -> None:
    """Removes the build locks below EXTENSIONS that no live process has open, as their makers do."""
    locks = {str(path) for path in EXTENSIONS.glob("*/lock")}
    if not locks:
        return
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            locks -= {file.path for file in process.open_files()}
    for lock in locks:
        Path(lock).unlink(missing_ok=True)


class Launch:
    """One running launch. Use `launch`; the attributes are for tests that send signals."""

    def __init__(self, command: list[str], folder: Path, port: int, time_limit_s: float, environment: dict):
        self.folder = folder
        self.port = port
        self.deadline = time.monotonic() + time_limit_s
        self.time_limit_s = time_limit_s
        self.log_path = folder / "launcher.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def rank_processes(self) -> dict[int, psutil.Process]:
        """The live rank processes, by rank. Empty until the launcher has started them."""
        found = {}
        for process in self._descendants():
            try:
                environment = process.environ()
                parent_is_launcher = "deepspeed.launcher.launch" in " ".join(process.parent().cmdline())
            except (psutil.Error, AttributeError):
                continue
            if parent_is_launcher and "RANK" in environment:
                found[int(environment["RANK"])] = process
        return found

    def launcher_pid(self) -> int:
        """The process whose SIGTERM reaches the ranks, one after another."""
        for process in self._descendants():
            if "deepspeed.launcher.launch" in " ".join(process.cmdline()):
                return process.pid
        raise AssertionError(f"no launcher process below the runner\n{self.logs()}")

    def rank_log(self, rank: int) -> str:
        """What one rank wrote to standard output and error."""
        files = sorted((self.folder / "ranks").glob(f"*_rank{rank}.log"))
        return "".join(path.read_text(errors="replace") for path in files)

    def logs(self) -> str:
        """The ends of the launcher's and every rank's output, for a failure's message."""
        parts = [f"--- launcher, port {self.port}\n{self.log_path.read_text(errors='replace')[-3000:]}"]
        for path in sorted((self.folder / "ranks").glob("*_rank*.log")):
            parts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}")
        return "\n".join(parts)

    def wait_for_line(self, pattern: str, rank: int = 0) -> re.Match:
        """Waits until a rank's output matches; fails when the launch ends or the time limit passes first."""
        while True:
            ended = self.process.poll() is not None
            match = re.search(pattern, self.rank_log(rank))
            if match:
                return match
            assert not ended, f"ended without printing {pattern!r}\n{self.logs()}"
            if time.monotonic() > self.deadline:
                self._give_up(f"waiting for {pattern!r}")
            time.sleep(0.1)

    def wait(self, expect: int | None = 0) -> int:
        """Waits for the end and returns the exit code; `expect=None` accepts any."""
        try:
            code = self.process.wait(max(0.1, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._give_up("waiting for the end")
        if expect is not None:
            assert code == expect, f"exit code {code}, expected {expect}\n{self.logs()}"
        return code

    def close(self) -> None:
        """Kills what is left of the process group, and removes its lock files and its shared memory."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for segment in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{self.port}_*"):
            segment.unlink(missing_ok=True)
        remove_stale_locks()

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _give_up(self, what: str) -> None:
        for process in self.rank_processes().values():
            process.send_signal(signal.SIGABRT)
        time.sleep(2)
        logs = self.logs()
        self.close()
        raise AssertionError(f"time limit of {self.time_limit_s:.0f} s passed {what}\n{logs}")


def launch(
    script: Path,
    *arguments: str,
    folder: Path,
    ranks: int = 2,
    port: int | None = None,
    time_limit_s: float = 120,
    environment: dict[str, str] | None = None,
    launcher_arguments: tuple[str, ...] = (),
) -> Launch:
    """Starts `deepspeed` on this machine with one process a rank.

    Args:
        script: the training script.
        arguments: the script's own.
        folder: where the launch runs and its logs go; made if missing.
        ranks: processes; each gets one thread.
        port: the rendezvous port; a free one by default.
        time_limit_s: seconds until the launch is given up.
        environment: variables on top of this process's.
        launcher_arguments: more options of `deepspeed` itself, before the script.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale_locks()
    port = port or free_port()
    scripts = Path(sys.executable).parent
    variables = {
        **os.environ,
        "DS_ACCELERATOR": ACCELERATOR,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONFAULTHANDLER": "1",
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]),
        **(environment or {}),
    }
    command = [
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        *("--num_accelerators", str(ranks), "--master_port", str(port)),
        *("--enable_each_rank_log", str(folder / "ranks")),
        *launcher_arguments,
        str(script),
        *arguments,
    ]
    return Launch(command, folder, port, time_limit_s, variables)
