"""Patching files where they lie: look, show, write, take back.

    examine   what would become of each file; writes nothing
    diff      that as a unified diff, byte for byte
    apply     writes all files or none, and keeps a record
    revert    restores the bytes of the record

`apply` looks again by itself, and refuses a file that differs from what `check` or `diff` showed of it last.
"""

import difflib
import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

from libcst import ParserSyntaxError

from al_deepspeed.errors import PatchError
from al_deepspeed.patching import checked
from al_deepspeed.patching.names import outlined
from al_deepspeed.patching.record import Change, Record, digest, folders_with_records
from al_deepspeed.patching.rewriter import rewrite
from al_deepspeed.patching.sites import Left, Site
from al_deepspeed.patching.tree import Note, Source, find, read, resolver

Select = Callable[[str], bool]
PATCHED = b"al_deepspeed.patching"  # what every patched file imports
HINT = re.compile("norm|gate|modulat", re.IGNORECASE)  # no model with AdaLN is without these words
MANY, SHARES = 64, 64  # from so many files on, processes share them
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")


def everything(name: str) -> bool:
    return True


@dataclass(frozen=True)
class FileReport:
    """One file with something to say. `name` is relative to the folder."""

    name: str
    before: bytes
    after: bytes
    sites: tuple[Site, ...]
    left: tuple[Left, ...]
    patched: bool

    @property
    def sha256(self) -> str:
        return digest(self.before)


@dataclass(frozen=True)
class Examined:
    """files: those with sites, with something left, or patched already. looked_at: how many were read."""

    folder: Path
    files: tuple[FileReport, ...]
    unreadable: tuple[Note, ...]
    skipped: tuple[Note, ...]
    looked_at: int

    @property
    def to_patch(self) -> list[FileReport]:
        return [file for file in self.files if file.sites]

    def fingerprints(self) -> dict[str, str]:
        return {file.name: file.sha256 for file in self.to_patch}


@dataclass(frozen=True)
class Applied:
    """examined: what was found, and written. recovered: files an interrupted command had left patched."""

    examined: Examined
    recovered: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Reverted:
    """restored: files whose original bytes are back. idle: file -> why there was nothing to restore."""

    restored: list[str] = field(default_factory=list)
    idle: dict[str, str] = field(default_factory=dict)


def examine(path: Path, select: Select = everything) -> Examined:
    """What a patch would do to the files under a path.

    Args:
        path: a Python file or a folder.
        select: which files to look at, by name relative to the folder.
    """
    tree = find(path)
    names = [name for name in tree.names if select(name)]
    if len(names) < MANY:
        found = _look_into(tree.folder, names)
    else:
        shares = [names[first::SHARES] for first in range(SHARES)]
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            found = [one for share in pool.map(_look_into, repeat(tree.folder), shares) for one in share]
    found.sort(key=lambda one: one.file if isinstance(one, Note) else one.name)
    files = tuple(one for one in found if isinstance(one, FileReport))
    unreadable = tuple(one for one in found if isinstance(one, Note))
    return Examined(tree.folder, files, unreadable, tree.skipped, len(names))


def _look_into(folder: Path, names: list[str]) -> list["FileReport | Note"]:
    """What there is to say about some files of a folder."""
    texts: dict[Path, str | None] = {}
    said = []
    for name in names:
        source = read(folder, name)
        one = source if isinstance(source, Note) else _look(source, resolver(source.path, folder, texts))
        if isinstance(one, Note) or one.sites or one.left or one.patched:
            said.append(one)
    return said


def interrupted(path: Path) -> Path | None:
    """The folder whose last apply or revert died midway, if there is one around or under the path."""
    return next((one for one in folders_with_records(path) if Record(one).interrupted), None)


def diff(examined: Examined) -> bytes:
    """A unified diff of all files, in their own bytes; `patch -p1` in the folder takes it."""
    lines: list[bytes] = []
    for file in examined.to_patch:
        name = os.fsencode(file.name) + (b"\t" if " " in file.name else b"")  # which ends a name with blanks
        for line in difflib.diff_bytes(
            difflib.unified_diff,
            _LINE.findall(file.before),
            _LINE.findall(file.after),
            b"a/" + name,
            b"b/" + name,
        ):
            lines.append(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n")
    return b"".join(lines)


def apply(path: Path, target: str | None = None, select: Select = everything) -> Applied:
    """Patches all files with sites, or none.

    Raises:
        PatchError: something differs from what was checked, cannot be written, or changed meanwhile.
    """
    recovered = [name for folder in folders_with_records(path) for name in _recover(folder)]
    examined = examine(path, select)
    if target is not None and examined.unreadable:
        note = examined.unreadable[0]
        raise PatchError(f"{examined.folder / note.file}: {note.reason}. Nothing was changed.")
    _same_as_checked(path, target, examined)
    if examined.to_patch:
        around = [one for one in folders_with_records(path) if examined.folder.is_relative_to(one)]
        record = Record(around[0] if around else examined.folder)
        prefix = examined.folder.relative_to(record.folder)
        with record.locked():
            record.apply(
                Change((prefix / file.name).as_posix(), file.before, file.after) for file in examined.to_patch
            )
    checked.forget([examined.folder / file.name for file in examined.to_patch])
    return Applied(examined, recovered)


def revert(path: Path, select: Select = everything) -> Reverted:
    """Restores the original bytes of every patched file at or under a path.

    Raises:
        PatchError: a file was edited since it was patched, or cannot be written; then nothing has changed.
    """
    if not path.exists():
        raise PatchError(f"{path} does not exist. Give the file or folder that was patched.")
    path = path.resolve()
    folder = path if path.is_dir() else path.parent
    restored, idle = [], {}
    for one in folders_with_records(path):
        record = Record(one)

        def wanted(name: str, one: Path = one) -> bool:
            file = one / name
            return file.is_relative_to(path) and select(file.relative_to(folder).as_posix())

        restored += _recover(one)
        with record.locked():  # which also removes what a process left that died before it wrote anything
            names, reasons = record.revert(wanted) if record.entries() else ([], {})
        restored += [str(one / name) for name in names]
        idle |= {str(one / name): reason for name, reason in reasons.items()}
    return Reverted(restored, idle)


def _recover(folder: Path) -> list[str]:
    record = Record(folder)
    if not record.interrupted:
        return []
    with record.locked():
        return [str(folder / name) for name in record.recover()]


def _same_as_checked(path: Path, target: str | None, examined: Examined) -> None:
    found = {str(examined.folder / name): sha256 for name, sha256 in examined.fingerprints().items()}
    known = checked.recall()
    changed = {file for file in found if known.get(file) not in (None, found[file])}
    own = checked.recall(path, target)
    if own is not None:  # these very files were checked: none may come or go
        changed |= own.keys() ^ found.keys()
        changed -= {file for file in own if own[file] is None}
    if changed:
        raise PatchError(
            f"{', '.join(sorted(changed))}: not as when it was checked; nothing was changed. Check again, "
            "then apply."
        )


def _look(source: Source, resolve: Callable[[str], str | None]) -> FileReport | Note:
    patched = PATCHED in source.data
    try:
        outlined(source.text)
        if not HINT.search(source.text):
            return FileReport(source.name, source.data, source.data, (), (), patched)
        rewritten = rewrite(source.text, file=source.name, resolve=resolve)
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        return Note(source.name, f"{where}{error.msg}")
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nested beyond reason
        return Note(source.name, f"not parsed: {str(error) or type(error).__name__}")
    except ParserSyntaxError as error:  # what Python takes, and LibCST does not
        return Note(source.name, f"not parsed: line {error.raw_line}: {error.message}")
    if not rewritten.sites:
        return FileReport(source.name, source.data, source.data, (), rewritten.left, patched)
    try:
        compile(rewritten.source, source.name, "exec", dont_inherit=True)
    except SyntaxError as error:
        return Note(source.name, f"its rewritten code would not compile: {error.msg}")
    after = rewritten.source.encode(source.encoding)
    return FileReport(source.name, source.data, after, rewritten.sites, rewritten.left, patched)
