"""Progress bars on standard error, so that standard output stays the command's own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


@contextmanager
def byte_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over bytes; yields a function to call with the bytes done."""
    with _bar(label, total, DownloadColumn()) as advance:
        yield advance


@contextmanager
def count_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over things; yields a function to call with the number done."""
    with _bar(label, total, MofNCompleteColumn()) as advance:
        yield advance


@contextmanager
def _bar(label: str, total: int, amount) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.advance(task, done)
        progress.update(task, completed=total)
