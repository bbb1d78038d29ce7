"""`al-deepspeed patch`: the fused op put into existing code, and taken out again to the byte."""

import contextlib
import json
import sys
from collections.abc import Sized
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from al_deepspeed.errors import PatchError

if TYPE_CHECKING:
    from al_deepspeed.patching.on_disk import Examined
    from al_deepspeed.patching.targets import Target


class Action(str, Enum):
    """What to do."""

    list = "list"
    check = "check"
    diff = "diff"
    apply = "apply"
    revert = "revert"
    verify = "verify"


@dataclass(frozen=True)
class Answer:
    """result: for --json. text: for people, bytes where they are a file. code: the exit code."""

    result: dict
    text: str | bytes
    code: int = 0


def run(
    action: Annotated[Action, typer.Argument(help="What to do; see above.", show_default=False)],
    path: Annotated[
        Path | None, typer.Argument(help="A Python file or a folder; none for list.", show_default=False)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Take the files of one recipe alone; see `patch list`.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Put the fused AdaLN into existing model code.

    list: the recipes. check: what would be rewritten, and what is left with the reason. diff: that as a patch
    file. apply: write it, all files or none. revert: restore every byte. verify: rewritten against original,
    on random operands.
    """
    if action is Action.list and path is not None:
        raise PatchError(f"patch list takes no path; given {path}.")
    if action is not Action.list and path is None:
        raise PatchError(f"patch {action.value} needs a PATH: a Python file, or a folder.")
    with contextlib.redirect_stdout(sys.stderr):
        from al_deepspeed.patching.targets import find_target

        answer = _list() if path is None else _ACTIONS[action](path, find_target(target, path))
    if as_json:
        print(json.dumps(answer.result))
    elif isinstance(answer.text, bytes):
        sys.stdout.buffer.write(answer.text)
        sys.stdout.buffer.flush()
    else:
        print(answer.text.encode(errors="backslashreplace").decode())  # a file's name may be no text
    if answer.code:
        raise typer.Exit(answer.code)


def _list() -> Answer:
    from al_deepspeed.patching.recipes import load_recipes

    recipes = load_recipes()
    lines = []
    for recipe in recipes:
        where = f"PyPI: {recipe.package}" if recipe.package else recipe.repository
        lines.append(f"{recipe.name}  ({where}, {recipe.licence})\n  {recipe.covers}")
        for release in recipe.releases:
            sites = ", ".join(f"{count} {kind}" for kind, count in release.sites.items())
            lines.append(f"  {release.version}: {sites}; verified {release.verified}")
    return Answer({"targets": [recipe.model_dump(mode="json") for recipe in recipes]}, "\n".join(lines))


def _check(path: Path, target: "Target") -> Answer:
    from al_deepspeed.patching import checked, on_disk

    _warn_of_an_interruption(path)
    examined = on_disk.examine(path, target.select)
    checked.remember(path, target.name, examined.folder, examined.fingerprints())
    compared = target.compare(examined)
    result = _described(examined) | ({"target": asdict(compared)} if compared else {})
    lines = [*_lines(examined), *([compared.said] if compared else []), _summary(examined)]
    return Answer(result, "\n".join(lines), int(compared is not None and compared.as_expected is False))


def _diff(path: Path, target: "Target") -> Answer:
    from al_deepspeed.patching import checked, on_disk

    _warn_of_an_interruption(path)
    examined = on_disk.examine(path, target.select)
    checked.remember(path, target.name, examined.folder, examined.fingerprints())
    text = on_disk.diff(examined)
    if not text:
        print(_summary(examined), file=sys.stderr)
    return Answer({"diff": text.decode(errors="replace"), **_described(examined)}, text)


def _apply(path: Path, target: "Target") -> Answer:
    from al_deepspeed.patching import on_disk

    done = on_disk.apply(path, target.name, target.select)
    written = done.examined.to_patch
    lines = [f"{file}: original bytes restored after an interrupted command" for file in done.recovered]
    lines += [f"{done.examined.folder / file.name}: {_count(file.sites, 'site')} patched" for file in written]
    lines += [f"{note.file}: left, {note.reason}" for note in done.examined.unreadable]
    lines.append(f"{_count(written, 'file')} patched" if written else _summary(done.examined))
    result = _described(done.examined) | {
        "patched": [file.name for file in written],
        "recovered": done.recovered,
    }
    return Answer(result, "\n".join(lines))


def _revert(path: Path, target: "Target") -> Answer:
    from al_deepspeed.patching import on_disk

    done = on_disk.revert(path, target.select)
    lines = [f"{file}: original bytes restored" for file in done.restored]
    lines += [f"{file}: {reason}" for file, reason in done.idle.items()]
    lines.append(
        f"{_count(done.restored, 'file')} restored" if lines else f"nothing under {path} is on record"
    )
    return Answer({"restored": done.restored, "idle": done.idle}, "\n".join(lines))


def _verify(path: Path, target: "Target") -> Answer:
    from al_deepspeed.patching.probing import verify

    probed = verify(path, target.select)
    lines = [f"{note.file}: {note.reason}" for note in probed.failed]
    lines += [f"{file}: patched already; revert it to compare its sites" for file in probed.patched]
    for probe in probed.probes:
        norm = f" ({probe.norm})" if probe.norm else ""
        lines.append(
            f"{probe.file}:{probe.line} {probe.kind}{norm}: {'; '.join(probe.differences) or 'equal'}"
        )
    wrong = [probe for probe in probed.probes if probe.differences]
    lines.append(
        f"{_count(probed.probes, 'site')} compared, {len(wrong)} differ, "
        f"{_count(probed.failed, 'module')} not imported"
    )
    result = {
        "sites": [asdict(probe) for probe in probed.probes],
        "not_imported": [asdict(note) for note in probed.failed],
        "patched": list(probed.patched),
        "differ": len(wrong),
    }
    return Answer(result, "\n".join(lines), int(bool(wrong)))


_ACTIONS = {
    Action.check: _check,
    Action.diff: _diff,
    Action.apply: _apply,
    Action.revert: _revert,
    Action.verify: _verify,
}


def _described(examined: "Examined") -> dict:
    files = [
        {
            "file": file.name,
            "sha256": file.sha256,
            "patched": file.patched,
            "sites": [_without_file(site) for site in file.sites],
            "left": [_without_file(left) for left in file.left],
        }
        for file in examined.files
    ]
    return {
        "folder": str(examined.folder),
        "looked_at": examined.looked_at,
        "sites": sum(len(file.sites) for file in examined.files),
        "left": sum(len(file.left) for file in examined.files),
        "files": files,
        "unreadable": [asdict(note) for note in examined.unreadable],
        "skipped": [asdict(note) for note in examined.skipped],
    }


def _without_file(row: Any) -> dict:
    return {name: value for name, value in asdict(row).items() if name != "file"}


def _lines(examined: "Examined") -> list[str]:
    """A block a file: what is rewritten, then what is left."""
    lines = []
    for file in examined.files:
        rows = [(one.line, one.function, f"{one.kind}: {one.text}") for one in file.sites]
        rows += [(one.line, one.function, f"left: {one.reason}") for one in file.left]
        lines.append(file.name + (" (patched)" if file.patched else ""))
        lines += [f"  {line:>5}  {function}  {what}" for line, function, what in sorted(rows)]
    lines += [f"{note.file}\n  not read: {note.reason}" for note in (*examined.unreadable, *examined.skipped)]
    return lines


def _summary(examined: "Examined") -> str:
    sites = sum(len(file.sites) for file in examined.files)
    left = sum(len(file.left) for file in examined.files)
    patched = sum(file.patched for file in examined.files)
    text = f"{sites} sites in {_count(examined.to_patch, 'file')} to patch, {left} left"
    text += f", {patched} patched already" if patched else ""
    text += f", {len(examined.unreadable)} unreadable" if examined.unreadable else ""
    return f"{text}; {_count(range(examined.looked_at), 'file')} looked at"


def _count(things: Sized, word: str) -> str:
    return f"{len(things)} {word}{'' if len(things) == 1 else 's'}"


def _warn_of_an_interruption(path: Path) -> None:
    from al_deepspeed.patching.on_disk import interrupted

    folder = interrupted(path)
    if folder is not None:
        print(
            f"{folder}: an apply or revert was interrupted here; the next restores the original bytes first",
            file=sys.stderr,
        )
