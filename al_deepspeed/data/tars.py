"""Tar files by offset: which samples a tar holds, and where their bytes lie.

A sample is a run of neighbouring members that share a key, as WebDataset has it: the key is the member's path
up to the first dot of its last part, the rest names the member. Only headers are read; contents are reached
with `pread`, by whoever needs them. Names are never used as paths on disk, and those that could not be
(absolute, or through `..`) are refused all the same, since other tools do unpack them.
"""

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from al_deepspeed.errors import CorpusError

BLOCK = tarfile.BLOCKSIZE
META = "__meta__/corpus"  # a shard's own description; WebDataset's readers skip what begins with __NAME__/
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstandard"}


@dataclass
class Entry:
    """One sample's members inside a tar.

    offset, size: the whole run with its tar headers; reading it alone gives a tar of this one sample.
    members: suffix ("latent.npy") -> (offset, size) of the contents.
    problem: why the entry cannot be used, if so.
    """

    key: str
    offset: int
    size: int
    members: dict[str, tuple[int, int]] = field(default_factory=dict)
    problem: str | None = None


def split_name(name: str) -> tuple[str, str]:
    """`a/clip.v2.mp4` -> (`a/clip`, `v2.mp4`). The key is empty where the last part starts with a dot."""
    folder, slash, last = name.rpartition("/")
    stem, _, suffix = last.partition(".")
    return (folder + slash + stem if stem else ""), suffix


def entries(path: Path) -> Iterator[Entry]:
    """The samples of a plain tar, in order; the run of a sample that is cut off is not among them.

    Raises:
        CorpusError: at the place where the file stops being a well-formed tar.
    """
    current = None
    for member in _members(path):
        name = member.name.removeprefix("./")
        key, suffix = split_name(name)
        if member.isdir() or not key:
            continue
        if current is None or key != current.key:
            if current is not None:
                yield current
            current = Entry(key, member.offset, 0)
        current.size = member.offset_data + -(-member.size // BLOCK) * BLOCK - current.offset
        current.problem = current.problem or _problem(member, suffix, current)
        current.members[suffix] = (member.offset_data, member.size)
    if current is not None:
        yield current


def _problem(member: tarfile.TarInfo, suffix: str, entry: Entry) -> str | None:
    if member.name.startswith("/") or ".." in member.name.split("/"):
        return f"member {member.name!r} has an absolute or parent path"
    if not member.isreg() or member.sparse is not None:
        return f"member {member.name!r} is a link, a device or a sparse file, not plain contents"
    if suffix in entry.members:
        return f"member {member.name!r} occurs twice"
    return None


def _members(path: Path) -> Iterator[tarfile.TarInfo]:
    """Headers in order. `tarfile` stops silently at a broken header, so the end is checked here."""
    with path.open("rb") as stream:
        total = os.fstat(stream.fileno()).st_size
        method = COMPRESSED.get(stream.read(2))
        stream.seek(0)
        if method:
            raise CorpusError(
                f"{path}: compressed with {method}; random access needs a plain tar, so unpack it."
            )
        end = 0
        try:
            archive = tarfile.open(fileobj=stream, mode="r:")  # noqa: SIM115 (holds no handle of its own)
            while (member := archive.next()) is not None:
                if member.size < 0 or archive.offset <= end:
                    raise tarfile.ReadError(f"member {member.name!r} has an impossible size")
                end = archive.offset
                if end > total:
                    raise tarfile.ReadError(f"member {member.name!r} is cut off")
                archive.members.clear()
                yield member
        except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
            raise CorpusError(f"{path}: corrupt tar after byte {end} of {total}: {error}") from error
        stream.seek(end)
        tail = stream.read(BLOCK)
        if len(tail) < BLOCK or any(tail):
            reason = "the end marker is missing (truncated?)" if len(tail) < BLOCK else "broken member header"
            raise CorpusError(f"{path}: corrupt tar at byte {end} of {total}: {reason}.")
        while tail := stream.read(1 << 20):
            if tail.count(0) != len(tail):
                raise CorpusError(
                    f"{path}: corrupt tar: data after the end marker at byte {end} (two tars joined?)."
                )
