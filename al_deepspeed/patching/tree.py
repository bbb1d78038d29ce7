"""Python files under a path as text that goes back to the same bytes, and where their imports lie.

Nothing is imported and no symbolic link is followed. A file whose text does not encode to its own bytes again
counts as unreadable, so whatever is written back differs only where it was meant to.
"""

import io
import os
import stat
import sys
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from al_deepspeed.errors import PatchError

RECORD_FOLDER = ".al_deepspeed_patch"
SKIPPED_FOLDERS = {"__pycache__", "node_modules"}


@dataclass(frozen=True)
class Note:
    """A file that was not looked into, and why."""

    file: str
    reason: str


@dataclass(frozen=True)
class Source:
    """One file. `name` is relative to the folder that was given, with forward slashes."""

    path: Path
    name: str
    data: bytes
    text: str
    encoding: str


@dataclass(frozen=True)
class Tree:
    """The Python files under a path; `folder` is the path itself, or the folder of a single file."""

    folder: Path
    names: tuple[str, ...]
    skipped: tuple[Note, ...]


def find(path: Path) -> Tree:
    """The Python files at a path, sorted by name. Hidden folders, caches and links are not entered."""
    if not path.exists():
        raise PatchError(f"{path} does not exist. Give a Python file or a folder.")
    path = path.resolve()
    if path.is_file():
        if path.suffix != ".py":
            raise PatchError(f"{path} is no Python file; allowed: a .py file, or a folder that holds some.")
        return Tree(path.parent, (path.name,), ())
    if not path.is_dir():
        raise PatchError(f"{path} is neither a file nor a folder. Give a Python file or a folder.")
    names, skipped = [], []

    def note(error: OSError) -> None:
        skipped.append(Note(_name(Path(error.filename), path), error.strerror))

    for parent, folders, files in os.walk(path, onerror=note):
        links = [one for one in folders if Path(parent, one).is_symlink()]
        links += [one for one in files if one.endswith(".py") and Path(parent, one).is_symlink()]
        for one in links:
            reason = f"a symbolic link to {Path(parent, one).readlink()}; links are not followed"
            skipped.append(Note(_name(Path(parent, one), path), reason))
        folders[:] = [one for one in folders if one not in links and not _is_skipped(one)]
        for one in files:
            if one.endswith(".py") and one not in links:
                names.append(_name(Path(parent, one), path))
    return Tree(path, tuple(sorted(names)), tuple(sorted(skipped, key=lambda note: note.file)))


def read(folder: Path, name: str) -> Source | Note:
    """The file, or why it cannot be read."""
    path = folder / name
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return Note(name, "not a plain file")
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except OSError as error:
        return Note(name, error.strerror or str(error))
    except (SyntaxError, ValueError, LookupError) as error:  # the last of a codec that is none of text
        return Note(name, f"not text in its declared encoding: {error}")
    if text.encode(encoding) != data:
        return Note(name, f"its text does not encode to the same bytes in {encoding}")
    return Source(path, name, data, text, encoding)


def resolver(path: Path, folder: Path, texts: dict[Path, str | None]) -> Callable[[str], str | None]:
    """A function from the name of a module that the file imports to that module's source, or None.

    Names that begin with dots are relative to the file's package. Others are looked up in the folders around
    the file that are no packages, where they must stand for one text, then along sys.path; no module is
    imported. What was read is kept in `texts`.
    """
    package = path.parent
    tops = []
    for parent in path.parents:
        if parent == folder or folder in parent.parents or (parent / "__init__.py").exists():
            tops.append(parent)
            continue
        tops.append(parent)
        break
    tops = [parent for parent in tops if not (parent / "__init__.py").exists()]

    def text(start: Path, parts: list[str]) -> str | None:
        inside = start.joinpath(*parts)
        for candidate in (inside / "__init__.py", *([inside.with_name(f"{parts[-1]}.py")] if parts else [])):
            if candidate not in texts:
                texts[candidate] = _text(candidate)
            if texts[candidate] is not None:
                return texts[candidate]
        return None

    def resolve(name: str) -> str | None:
        dots = len(name) - len(name.lstrip("."))
        parts = [part for part in name.split(".") if part]
        if dots:
            folders = [package, *package.parents][dots - 1 : dots]
            return text(folders[0], parts) if folders else None
        around = {found for top in tops if (found := text(top, parts)) is not None}
        if around:
            return around.pop() if len(around) == 1 else None
        along = (text(Path(entry or "."), parts) for entry in sys.path)
        return next((found for found in along if found is not None), None)

    return resolve


def _text(path: Path) -> str | None:
    try:
        if not path.is_file():
            return None
    except OSError:
        return None
    found = read(path.parent, path.name)
    return found.text if isinstance(found, Source) else None


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _is_skipped(folder: str) -> bool:
    return folder.startswith(".") or folder in SKIPPED_FOLDERS
