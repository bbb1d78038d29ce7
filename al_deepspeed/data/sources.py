"""What there is to encode: the pictures and videos of a folder, and of raw WebDataset tars.

The list is the same on every machine: by name inside a folder, by position inside a tar. A source's key names
its sample. WebDataset ends a key at the first dot of the file's name, so keys hold none.
"""

import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from al_deepspeed.data.files import FileWindow
from al_deepspeed.data.tars import Entry, entries
from al_deepspeed.errors import CorpusError

PICTURES = frozenset({"png", "jpg", "jpeg", "webp", "bmp", "tif", "tiff"})
VIDEOS = frozenset({"mp4", "m4v", "mov", "mkv", "webm", "avi", "mpg", "mpeg", "gif"})
SIDECARS = ("txt", "json")
SKIPPED = re.compile(r"__[^/]*__(/|$)")  # members that WebDataset's readers skip too
LETTERS = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True)
class Place:
    """Bytes of a file: a whole file or a member of a tar."""

    path: Path
    offset: int
    size: int

    def open(self) -> BinaryIO:
        """The bytes as a file."""
        return io.BufferedReader(FileWindow(self.path, self.offset, self.size), buffer_size=1 << 20)


@dataclass(frozen=True)
class Source:
    """One picture or video.

    key: names the sample; unique, without a dot in its last part.
    name: for people: the path below SRC, or TAR:MEMBER.
    suffix: "png", in lower case.
    contents: where its bytes are; None with a problem.
    caption: where its caption is, by sidecar suffix.
    problem: why it cannot be used, known from the listing alone.
    """

    key: str
    name: str
    suffix: str
    contents: Place | None
    caption: tuple[str, Place] | None = None
    problem: str | None = None

    def read_caption(self) -> str:
        """From the sidecar (.txt, or "caption" of .json), else the words of the file's name."""
        if self.caption is None:
            return " ".join(LETTERS.findall(self.key.rpartition("/")[2].replace("_", " ")))
        suffix, place = self.caption
        try:
            text = place.open().read().decode("utf-8-sig")
            value = text if suffix == "txt" else json.loads(text)["caption"]
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"its caption (.{suffix}) cannot be read: {error!r}") from error
        if not isinstance(value, str):
            raise CorpusError(f'its caption ("caption" of .{suffix}) is {type(value).__name__}, not text')
        return value.strip()


def list_sources(src: str | Path) -> list[Source]:
    """Everything to encode below a folder, or in one tar.

    Raises:
        CorpusError: no such place, nothing to encode, or two files whose names give one key.
    """
    src = Path(src)
    if src.is_file() and src.suffix == ".tar":
        sources = list(_of_tar(src, src.name, ""))
    elif src.is_dir():
        sources = list(_of_folder(src))
    else:
        raise CorpusError(f"{src}: SRC is a folder of pictures, videos or raw .tar files, or one .tar.")
    if not sources:
        known = ", ".join(sorted(PICTURES | VIDEOS))
        raise CorpusError(f"{src}: holds nothing to encode. Known are: {known}, and .tar files of these.")
    return _distinct(sources)


def listing_digest(sources: list[Source]) -> str:
    """SHA-256 over names and sizes: tells whether two runs list the same sources."""
    digest = hashlib.sha256()
    for source in sources:
        places = (source.contents, source.caption[1] if source.caption else None)
        sizes = [place.size if place else None for place in places]
        digest.update(json.dumps([source.key, source.name, *sizes]).encode())
    return digest.hexdigest()


def _of_folder(root: Path) -> Iterator[Source]:
    names = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith("."):
                path = Path(folder, name)
                names[path.relative_to(root).as_posix()] = path
    for name in sorted(names):
        stem, _, suffix = name.rpartition(".")
        suffix = suffix.lower()
        if suffix == "tar":
            yield from _of_tar(names[name], name, _undotted(stem) + "/")
        elif suffix in PICTURES | VIDEOS and not SKIPPED.match(name):
            problem = None if _is_text(name) else "its name is not UTF-8"
            sidecar = next((kind for kind in SIDECARS if f"{stem}.{kind}" in names), None)
            caption = (sidecar, _whole(names[f"{stem}.{sidecar}"])) if sidecar else None
            shown = name.encode("utf-8", "backslashreplace").decode()
            key = _undotted(stem).encode("utf-8", "backslashreplace").decode()
            yield Source(key, shown, suffix, _whole(names[name]), caption, problem)


def _of_tar(path: Path, name: str, prefix: str) -> Iterator[Source]:
    try:
        for entry in entries(path):
            if not SKIPPED.match(entry.key):
                yield from _of_entry(path, name, prefix, entry)
    except CorpusError as error:
        yield Source(f"{prefix}{name}", name, "tar", None, problem=str(error).removeprefix(f"{path}: "))


def _of_entry(path: Path, name: str, prefix: str, entry: Entry) -> Iterator[Source]:
    """The one picture or video of a raw sample, if it has any."""
    media = [member for member in entry.members if _last(member) in PICTURES | VIDEOS]
    shown = f"{name}:{entry.key}"
    if entry.problem or len(media) > 1:
        problem = entry.problem or f"one sample with several pictures or videos ({', '.join(media)})"
        yield Source(prefix + entry.key, shown, "", None, problem=problem)
    elif media:
        kind = next((kind for kind in SIDECARS if kind in entry.members), None)
        caption = (kind, Place(path, *entry.members[kind])) if kind else None
        contents = Place(path, *entry.members[media[0]])
        yield Source(prefix + entry.key, f"{shown}.{media[0]}", _last(media[0]), contents, caption)


def _distinct(sources: list[Source]) -> list[Source]:
    """Sources whose names differ in the suffix alone get it into their keys."""
    seen = Counter(source.key for source in sources)
    sources = [
        replace(source, key=f"{source.key}_{source.suffix}") if seen[source.key] > 1 else source
        for source in sources
    ]
    first: dict[str, Source] = {}
    for source in sources:
        other = first.setdefault(source.key, source)
        if other is not source:
            raise CorpusError(
                f"{other.name} and {source.name} both give the key {source.key!r}. Rename one of them."
            )
    return sources


def _undotted(stem: str) -> str:
    folder, slash, last = stem.rpartition("/")
    return folder + slash + last.replace(".", "_")


def _last(suffix: str) -> str:
    return suffix.rpartition(".")[2].lower()


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _whole(path: Path) -> Place:
    return Place(path, 0, path.stat().st_size)
