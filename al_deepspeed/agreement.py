"""What all ranks must decide together: to fail, to stop.

An error on one rank alone hangs the others: they wait at the next collective for a rank that has left. So
whatever can fail before training runs inside `together()`, which gathers every rank's outcome and then raises
on all of them or on none. A signal reaches the ranks at different times, too: the launcher signals one rank
after another, and waits up to 30 s for each. `StopOnSignal` turns it into a flag that ranks compare at a step
boundary, so that all of them leave the loop after the same step.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from al_deepspeed import errors
from al_deepspeed.errors import AdaptiveLoadError


@contextmanager
def together() -> Iterator[None]:
    """Runs the body on every rank, then raises on all ranks if it failed on any. A collective call."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    status = None if failure is None else (type(failure).__name__, str(failure))
    statuses: list[tuple[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(statuses, status)
    failed = [(rank, *status) for rank, status in enumerate(statuses) if status is not None]
    if not failed:
        return
    if failure is not None and not isinstance(failure, AdaptiveLoadError):
        raise failure  # a fault of code, ours or the user's: its own traceback says most
    rank, kind, message = failed[0]
    same = all(message == other for _, _, other in failed) and len(failed) == len(statuses)
    text = message if same else "\n".join(f"rank {rank}: {message}" for rank, _, message in failed)
    known = getattr(errors, kind, None)
    if known is None:
        raise AdaptiveLoadError(f"rank {rank} failed with {kind}: {message}") from None
    raise known(text) from None


def first_difference(value: str) -> tuple[int, str] | None:
    """The first rank whose value differs from rank 0's, and that value; None when all agree. Collective."""
    values: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return next(((rank, other) for rank, other in enumerate(values) if other != values[0]), None)


def differing_names(values: dict[str, str]) -> tuple[int, list[str]] | None:
    """The first rank some of whose values differ from rank 0's, and their names. Collective."""
    everyone: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, values)
    for rank, others in enumerate(everyone):
        if others != everyone[0]:
            return rank, [name for name, value in others.items() if value != everyone[0].get(name)]
    return None


class StopOnSignal:
    """Ends a training loop cleanly on SIGTERM or SIGINT, after the same step on every rank.

        with StopOnSignal() as stop:
            for batch in loader:
                ...
                engine.step()
                if last_micro_step_of_the_step and stop.agreed():
                    engine.save_checkpoint(folder)
                    break

    One stop often signals a rank twice: Slurm or a terminal reaches it directly and through the launcher. So
    repeated signals change nothing, but for a second SIGINT, which interrupts at once.
    """

    signals = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received: int | None = None
        self._interrupts = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopOnSignal":
        for number in self.signals:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def agreed(self) -> bool:
        """Whether any rank was signalled. A collective call of one number: at a step's end, on all ranks."""
        flag = torch.tensor(
            [float(self.received is not None)], device=get_accelerator().current_device_name()
        )
        if dist.is_initialized():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
