"""One process compiles, the others on the same build folder wait for it and share the outcome.

The lock is the kernel's (flock): it falls when its holder dies, so a killed builder leaves nothing to wait
for. A failed build is recorded beside it; processes that were waiting meanwhile fail with the same message
instead of compiling the same error again.
"""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Built = TypeVar("Built")
WAIT_S = 1800.0
POLL_S = 0.2


def build_once(folder: Path, build: Callable[[], Built], wait_s: float = WAIT_S) -> Built:
    """Run `build` while holding the folder's lock.

    Raises:
        TimeoutError: another process held the lock for all of `wait_s`.
        RuntimeError: the build of the process that this one waited for has failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failure = folder / "al_deepspeed.failed"
    with (folder / "al_deepspeed.lock").open("a+") as lock:
        waited = _acquire(lock, folder, wait_s)
        try:
            if waited and failure.exists():
                raise RuntimeError(failure.read_text(encoding="utf-8"))
            failure.unlink(missing_ok=True)
            # PyTorch's own lock file: nobody holds it now, a killed builder can only have left it behind.
            (folder / "lock").unlink(missing_ok=True)
            try:
                return build()
            except Exception as error:
                failure.write_text(str(error), encoding="utf-8")
                raise
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def _acquire(lock, folder: Path, wait_s: float) -> bool:
    """Take the lock; True if another process had it first."""
    deadline = time.monotonic() + wait_s
    waited = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            if time.monotonic() > deadline:
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
                raise TimeoutError(
                    f"process {holder} has been building in {folder} for over {wait_s:.0f} s; "
                    "wait for it, or end it and start again"
                ) from None
            time.sleep(POLL_S)
        else:
            lock.seek(0)
            lock.truncate()
            lock.write(f"{os.getpid()} on {os.uname().nodename}")
            lock.flush()
            return waited
