"""Files that appear whole or not at all and that one process at a time writes; files read by offset.

A file is written beside its final name and renamed when complete, so a killed run leaves at most one hidden
`.NAME.tmp`, which the next run of the same work overwrites.
"""

import errno
import fcntl
import io
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from al_deepspeed.errors import CorpusError

OPEN_FILES = 64  # a pool's files at a time; far below any limit on descriptors, even with many workers


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a name to write to; rename it to `path` when the block ends without an error."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    descriptor = _open_locked(temporary, path)
    try:
        os.ftruncate(descriptor, 0)
        try:
            yield temporary
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        os.fsync(descriptor)
        temporary.rename(path)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """The file holds either what it held or all of `text`, also after a crash."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def create_whole(path: Path, text: str) -> None:
    """Create the file with this text unless it exists; of many processes that try, one does."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        with suppress(FileExistsError):
            path.hardlink_to(temporary)
    finally:
        temporary.unlink(missing_ok=True)


def _open_locked(temporary: Path, path: Path) -> int:
    while True:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise CorpusError(
                f"{path}: another process is writing it. Wait, or give each process its own --shard I/N."
            ) from None
        except OSError:
            pass  # a file system without locks: two processes with one share would write the same bytes
        try:
            if os.fstat(descriptor).st_ino == temporary.stat().st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)  # renamed by the process that held it, between our open and our lock


class FilePool:
    """Reads byte ranges with `pread` from files that are kept open, the least recently used one closed first.

    A process that inherits or unpickles a pool starts with none open, so no two processes share a handle.
    """

    def __init__(self):
        self._process, self._open = os.getpid(), {}

    def __getstate__(self) -> dict:
        return {}

    def __setstate__(self, state: dict) -> None:
        self.__init__()

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """Exactly `size` bytes at `offset`; a shorter file is a ValueError."""
        if self._process != os.getpid():
            self.__init__()
        opened = self._open.pop(path, None) or _OpenFile(path)
        self._open[path] = opened
        while len(self._open) > OPEN_FILES:
            self._open.pop(next(iter(self._open)), None)
        contents = os.pread(opened.descriptor, size, offset)
        while 0 < len(contents) < size:  # a single read returns at most 2 GiB
            more = os.pread(opened.descriptor, size - len(contents), offset + len(contents))
            if not more:
                break
            contents += more
        if len(contents) != size:
            raise ValueError(f"the file ends {size - len(contents)} bytes short")
        return contents


class FileWindow(io.RawIOBase):
    """A byte range of a file, as a file of its own."""

    def __init__(self, path: Path, offset: int, size: int):
        self._file, self._offset, self._size, self._at = _OpenFile(path), offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Whence as for any file."""
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: bytearray) -> int:
        """Fills the buffer as far as one read does; 0 at the end."""
        wanted = max(0, min(len(buffer), self._size - self._at))
        contents = os.pread(self._file.descriptor, wanted, self._offset + self._at)
        buffer[: len(contents)] = contents
        self._at += len(contents)
        return len(contents)


class _OpenFile:
    """Closes itself with its last reference, so that a thread may still read what another one evicted."""

    def __init__(self, path: Path):
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self):
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)
