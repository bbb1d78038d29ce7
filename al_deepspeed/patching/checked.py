"""What `check` and `diff` showed last, so that `apply` refuses a file that has changed since.

Kept in the user's state folder ($XDG_STATE_HOME, else ~/.local/state), since looking at a tree must not
change it: one file for each path and target that was checked. It holds for the files themselves, so also when
another path with the same file is applied. Where nothing can be written there, nothing is remembered, and
`apply` goes by its own look alone.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

Known = dict[str, str | None]  # file -> sha256 as it was checked; None once it was patched


def remember(path: Path, target: str | None, folder: Path, files: dict[str, str]) -> None:
    """files: name in the folder -> sha256 of each file with sites."""
    place = _home() / f"{_key(path, target)}.json"
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        _write(place, {str(folder / name): sha256 for name, sha256 in files.items()})


def recall(path: Path | None = None, target: str | None = None) -> Known | None:
    """What was remembered of a path, or None; without a path, of each file what was checked last."""
    if path is not None:
        return _read(_home() / f"{_key(path, target)}.json")
    known: Known = {}
    for place in _places():
        known |= _read(place) or {}
    return known


def forget(files: Iterable[Path]) -> None:
    """These files were patched, and may be again."""
    patched = set(map(str, files))
    for place in _places():
        known = _read(place) or {}
        if patched & known.keys():
            with suppress(OSError):
                checked_at = place.stat().st_mtime_ns
                _write(place, {file: None if file in patched else sha256 for file, sha256 in known.items()})
                os.utime(place, ns=(checked_at, checked_at))


def _places() -> list[Path]:
    """The oldest first."""
    places = []
    with suppress(OSError):
        places = sorted((place.stat().st_mtime_ns, place) for place in _home().glob("*.json"))
    return [place for _, place in places]


def _read(place: Path) -> Known | None:
    try:
        return dict(json.loads(place.read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(place: Path, files: Known) -> None:
    place.write_text(json.dumps({"files": files}))


def _key(path: Path, target: str | None) -> str:
    return hashlib.sha256(f"{path.resolve()}\n{target or ''}".encode()).hexdigest()[:32]


def _home() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    home = Path(state) if state else Path("~/.local/state").expanduser()
    return home / "al_deepspeed" / "checked"
