"""Patched files of one folder: written all or none, and restored to the byte.

In FOLDER/.al_deepspeed_patch:
    record.json    file -> sha256 before and after, for every file that is patched
    originals/     the bytes before, named by their sha256
    new/           complete files about to be renamed into place
    journal.json   the record as it will be; exists while files are being renamed
An apply stages everything, writes the journal, renames file after file, and at last renames the journal to be
the record. Where a journal is found, a process died in between: `recover` gives every file of it its original
bytes again. So an interrupted apply is undone, and an interrupted revert is completed.
"""

import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from al_deepspeed.errors import PatchError
from al_deepspeed.patching.tree import RECORD_FOLDER

MARK = b"al_deepspeed"  # patched code imports the package
VERSION = 1


@dataclass(frozen=True)
class Entry:
    """sha256 of a file as it was and as it is patched."""

    before: str
    after: str


@dataclass(frozen=True)
class Change:
    """New contents of a file, made from the old ones. `name` is relative to the record's folder."""

    name: str
    before: bytes
    after: bytes


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def folders_with_records(path: Path) -> list[Path]:
    """Folders whose records may hold files at or under a path: those around it, and those inside."""
    path = path.resolve()
    around = [one for one in (path, *path.parents) if (one / RECORD_FOLDER).is_dir()]
    inside = [Path(parent) for parent, folders, _ in os.walk(path) if RECORD_FOLDER in folders]
    return list(dict.fromkeys([*around, *inside]))


class Record:
    """The record of one folder. Everything that writes runs inside `locked()`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._home = folder / RECORD_FOLDER
        if self._home.is_symlink():
            raise PatchError(
                f"{self._home} is a symbolic link; links are not followed. Nothing was changed. Put the "
                "folder that it leads to in its place, or remove it."
            )

    @property
    def interrupted(self) -> bool:
        return (self._home / "journal.json").exists()

    def entries(self) -> dict[str, Entry]:
        return self._read("record.json")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time. Makes the folder, and takes it away if nothing is on record after all."""
        with _said(self._home):
            self._home.mkdir(exist_ok=True)
            descriptor = os.open(self._home / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PatchError(
                    f"{self.folder}: another patch command is at work. Wait for its end."
                ) from None
            except OSError:
                pass  # a file system without locks
            with _said(self._home):
                (self._home / ".gitignore").write_text("*\n")
                try:
                    yield
                finally:
                    if not self.interrupted and not self.entries():
                        shutil.rmtree(self._home)
        finally:
            os.close(descriptor)

    def recover(self) -> list[str]:
        """Gives the files of an interrupted command their original bytes; returns which needed it."""
        if not self.interrupted:
            return []
        entries = self.entries()
        restored = []
        for name, entry in self._read("journal.json", "touched").items():
            live = self._live(name)
            if live is None or digest(live) != entry.after:
                if live is None or MARK not in live:
                    entries.pop(name, None)
                else:
                    entries[name] = entry  # patched and then edited: stays on record, for revert to name
                continue
            self._check_place(name)
            self._rename(name, self._stage(0, name, self._original(entry)))
            entries.pop(name, None)
            restored.append(name)
        self._write("record.json", {"files": _plain(entries)})
        (self._home / "journal.json").unlink()
        self._tidy(entries)
        return restored

    def apply(self, changes: Iterable[Change]) -> None:
        """Writes all files or none."""
        changes = list(changes)
        for change in changes:
            self._check_place(change.name)
            if self._live(change.name) != change.before:  # as after another apply, ahead of this one's lock
                raise PatchError(
                    f"{self.folder / change.name} changed since it was looked at; nothing was changed. Check "
                    "again, then apply."
                )
        (self._home / "originals").mkdir(exist_ok=True)
        touched, entries = {}, self.entries()
        for change in changes:
            found, earlier = digest(change.before), entries.get(change.name)
            if earlier is not None and earlier.after == found:  # patched once more: the original stays
                touched[change.name] = Entry(earlier.before, digest(change.after))
                continue
            if earlier is not None and MARK in change.before:
                raise PatchError(
                    f"{self.folder / change.name} is patched and was edited since; a second patch would lose "
                    "its original. Nothing was changed. Undo the edit and revert, then apply anew."
                )
            touched[change.name] = Entry(found, digest(change.after))
            _write_whole(self._home / "originals" / found, change.before)
        _sync_folder(self._home / "originals")
        staged = [self._stage(i, change.name, change.after) for i, change in enumerate(changes)]
        moves = [
            (change.name, digest(change.before), new) for change, new in zip(changes, staged, strict=True)
        ]
        self._move(moves, touched, {**entries, **touched}, "The other files hold what they held before")

    def revert(self, wanted: Callable[[str], bool]) -> tuple[list[str], dict[str, str]]:
        """Restores files; refuses as a whole when one was edited since.

        Returns:
            The files restored, and those that needed no restoring with the reason.
        """
        entries, restore, idle, edited = self.entries(), {}, {}, []
        for name, entry in entries.items():
            if not wanted(name):
                continue
            live = self._live(name)
            if live is None:
                idle[name] = "is gone"
            elif digest(live) == entry.after:
                restore[name] = entry
            elif digest(live) == entry.before:
                idle[name] = "holds its original bytes already"
            elif MARK not in live:
                idle[name] = "was replaced by another version that is not patched"
            else:
                edited.append(name)
        if edited:
            raise PatchError(
                f"{', '.join(str(self.folder / name) for name in edited)}: edited since it was patched, and "
                "its original bytes lack the edit; nothing was changed. Undo the edit, or merge it into the "
                f"original, {self._home / 'originals' / entries[edited[0]].before}."
            )
        for name in restore:
            self._check_place(name)
        staged = {
            name: self._stage(i, name, self._original(entry))
            for i, (name, entry) in enumerate(restore.items())
        }
        left = {name: entry for name, entry in entries.items() if name not in restore and name not in idle}
        moves = [(name, restore[name].after, staged[name]) for name in restore]
        self._move(moves, restore, left, "The other files hold their original bytes")
        self._tidy(left)
        return list(restore), idle

    # how

    def _move(self, moves: list[tuple[str, str, Path]], touched: dict, record: dict, others: str) -> None:
        """Renames staged files into place between the writing of the journal and that of the record."""
        self._write("journal.json", {"touched": _plain(touched), "files": _plain(record)})
        try:
            for name, expected, staged in moves:
                live = self._live(name)
                if live is None or digest(live) != expected:
                    raise PatchError(
                        f"{self.folder / name} changed in this moment and was left. {others}. Check again."
                    )
                self._rename(name, staged)
        except BaseException:
            self.recover()
            raise
        (self._home / "journal.json").replace(self._home / "record.json")
        _sync_folder(self._home)
        shutil.rmtree(self._home / "new", ignore_errors=True)

    def _check_place(self, name: str) -> None:
        """A plain file inside the folder, on its file system, that its owner allows to be written."""
        path = self.folder / name
        if path.is_symlink() or not path.parent.resolve().is_relative_to(self.folder.resolve()):
            raise PatchError(
                f"{path} is or lies behind a symbolic link; links are not followed. Nothing was changed."
            )
        for place in (path, path.parent):
            state = place.stat()
            if not state.st_mode & stat.S_IWUSR or not os.access(place, os.W_OK):
                raise PatchError(
                    f"{place} is read-only; nothing was changed. Make it writable, then try again."
                )
        if path.stat().st_dev != self._home.stat().st_dev:
            raise PatchError(
                f"{path} lies on another file system than {self.folder}; nothing was changed. Give its own "
                "folder."
            )

    def _stage(self, number: int, name: str, data: bytes) -> Path:
        """The complete file, ready to be renamed, with the mode and owner of the one in place."""
        staged, state = self._home / "new" / str(number), (self.folder / name).stat()
        staged.parent.mkdir(exist_ok=True)
        staged.unlink(missing_ok=True)
        _write_whole(staged, data)
        with suppress(PermissionError):
            os.chown(staged, state.st_uid, state.st_gid)
        staged.chmod(stat.S_IMODE(state.st_mode))
        return staged

    def _rename(self, name: str, staged: Path) -> None:
        staged.replace(self.folder / name)
        _sync_folder((self.folder / name).parent)

    def _live(self, name: str) -> bytes | None:
        path = self.folder / name
        if path.is_symlink() or not path.is_file():
            return None
        return path.read_bytes()

    def _original(self, entry: Entry) -> bytes:
        path = self._home / "originals" / entry.before
        data = path.read_bytes() if path.is_file() else b""
        if digest(data) != entry.before:
            raise PatchError(f"{path} is missing or damaged, so the original cannot be restored from it.")
        return data

    def _tidy(self, entries: dict[str, Entry]) -> None:
        kept = {entry.before for entry in entries.values()}
        for original in (self._home / "originals").glob("*"):
            if original.name not in kept:
                original.unlink()
        shutil.rmtree(self._home / "new", ignore_errors=True)

    def _read(self, file: str, key: str = "files") -> dict[str, Entry]:
        path = self._home / file
        if not path.exists():
            return {}
        try:
            read = json.loads(path.read_bytes())
            if read["version"] != VERSION:
                raise PatchError(f"{path} has version {read['version']}; this release reads {VERSION}.")
            return {name: Entry(**entry) for name, entry in read[key].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PatchError(
                f"{path} is damaged ({error}). The original bytes lie in {self._home / 'originals'}."
            ) from None

    def _write(self, file: str, content: dict) -> None:
        data = json.dumps({"version": VERSION, **content}, indent=1).encode()
        _write_whole(self._home / f".{file}.tmp", data)
        (self._home / f".{file}.tmp").replace(self._home / file)
        _sync_folder(self._home)


def _plain(entries: dict[str, Entry]) -> dict[str, dict]:
    return {name: asdict(entry) for name, entry in entries.items()}


def _write_whole(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # a file system that cannot
    finally:
        os.close(descriptor)


@contextmanager
def _said(home: Path) -> Iterator[None]:
    """What the system refuses, as a sentence."""
    try:
        yield
    except OSError as error:
        raise PatchError(
            f"{error.filename or home}: {error.strerror or error}. {home.parent} must be writable for a "
            "record of what is patched. What was interrupted midway is undone by the next apply or revert."
        ) from None
