"""What `check` and `diff` showed last, so that `apply` refuses a file that has changed since.

Kept in the user's state folder ($XDG_STATE_HOME, else ~/.local/state), since looking at a tree must not
change it. Where nothing can be written there, nothing is remembered, and `apply` goes by its own look alone.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path


def remember(path: Path, target: str | None, files: dict[str, str]) -> None:
    """files: name -> sha256 of each file with sites."""
    place = _place(path, target)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps({"path": str(path.resolve()), "target": target, "files": files}))


def recall(path: Path, target: str | None) -> dict[str, str] | None:
    """What was remembered, or None."""
    try:
        return dict(json.loads(_place(path, target).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget(path: Path, target: str | None) -> None:
    with suppress(OSError):
        _place(path, target).unlink()


def _place(path: Path, target: str | None) -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    home = Path(state) if state else Path("~/.local/state").expanduser()
    key = hashlib.sha256(f"{path.resolve()}\n{target or ''}".encode()).hexdigest()[:32]
    return home / "al_deepspeed" / "checked" / f"{key}.json"
