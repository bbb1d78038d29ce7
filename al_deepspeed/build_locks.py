"""Says what a silent start waits for: a build lock that a killed process left behind.

DeepSpeed compiles ops at first use, and at each later start has ninja look whether they still hold. Torch
guards that by a file named `lock`, which only the process that made it removes. If that process is killed,
every later one waits for the file, for ever and without a word, inside `init_distributed`.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root


@contextmanager
def told_of_build_locks(after_s: float = 60.0) -> Iterator[None]:
    """Around what may build an op: when it takes longer than this, names the locks there are, once."""
    timer = threading.Timer(after_s, _tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def build_locks() -> list[Path]:
    """Lock files below torch's folder of extensions."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])


def _tell() -> None:
    for lock in build_locks():
        age_s = time.time() - lock.stat().st_mtime
        print(
            f"still starting: an op's build is locked by {lock}, made {age_s:.0f} s ago. If no process is "
            "compiling, an earlier run was killed while it did: remove that file and this start goes on.",
            file=sys.stderr,
            flush=True,
        )
