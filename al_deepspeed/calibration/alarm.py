"""A failed allocation on one rank ends the scan on all of them, in order.

The rank that failed cannot tell the others by a collective: under ZeRO-3 they wait in an all-gather that it
will never join, and a main thread stuck there cannot be interrupted. So the news travels through the
rendezvous store, which a thread of every rank watches over a connection of its own. Once it comes, rank 0
saves what was measured, each process answers, and all leave by `os._exit` with one code.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from al_deepspeed.calibration.points import OUT_OF_MEMORY, Point
from al_deepspeed.calibration.workload import Shape

FAILED, SAVED, LEFT = "al_calibration/failed", "al_calibration/saved", "al_calibration/left"
POLL_S = 0.2
SAVING_S = 600.0  # rank 0 fits and draws before it answers
LEAVING_S = 10.0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or on the host."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )


def failed_point(failure: dict) -> Point:
    """What `sound` told, as a point without measurements; says so on standard error."""
    point = Point(
        failure["batch_size"],
        failure["tokens"],
        None,
        shape=tuple(failure["shape"]),
        status=OUT_OF_MEMORY,
    )
    print(
        f"rank {failure['rank']} could not allocate memory at B = {point.batch_size}, S = {point.tokens}: "
        "the point is marked and the scan ends with what it has.",
        file=sys.stderr,
    )
    return point


class Alarm:
    """Listens for a failure on any rank while the scan runs.

    Args:
        finish: called on rank 0 in the listening thread with the failure; saves, and returns the exit code.
    """

    def __init__(self, finish: Callable[[dict], int]) -> None:
        self._finish = finish
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=SAVING_S),
        )
        self._over, self._heard = threading.Event(), threading.Event()
        self._listener = threading.Thread(
            target=self._listen, name="al_deepspeed calibration alarm", daemon=True
        )
        self._listener.start()

    def sound(self, failure: dict) -> None:
        """Makes a failure known to every rank; does not return."""
        self._store.set(FAILED, json.dumps(failure))
        time.sleep(2 * SAVING_S)
        os._exit(1)

    @contextmanager
    def guards(self, batch_size: int, shape: Shape, tokens: int) -> Iterator[None]:
        """Turns a failed allocation inside, while this point is measured, into the end on every rank."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                # Others that left after a failure break this one's collective: the listener ends it, with
                # their code.
                if self._heard.wait(2 * POLL_S):
                    self._listener.join()
                raise
            self.sound({"rank": self._rank, "batch_size": batch_size, "shape": shape, "tokens": tokens})

    def close(self) -> None:
        """The scan is over without a failed allocation.

        A thread that still asks the store when Python shuts down would abort the process: it ends first.
        """
        self._over.set()
        self._listener.join()

    def _listen(self) -> None:
        while not self._over.wait(POLL_S):
            try:
                failed = self._store.check([FAILED])
            except (
                dist.DistError
            ):  # the rank that serves the store has gone, and the launcher ends the others
                return
            if failed:
                self._leave(json.loads(self._store.get(FAILED)))

    def _leave(self, failure: dict) -> None:
        self._heard.set()
        code = 1
        try:
            code = self._saved(failure)
        except dist.DistError:  # rank 0 left first and took the store along
            pass
        except Exception:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _saved(self, failure: dict) -> int:
        """Waits until rank 0 has saved; rank 0, which serves the store, until the others have heard of it."""
        if self._rank == 0:
            self._store.set(SAVED, str(self._finish(failure)))
        code = int(self._store.get(SAVED))
        with suppress(dist.DistError):  # all others have answered, and rank 0 may have left
            self._store.add(LEFT, 1)
        deadline = time.monotonic() + LEAVING_S
        while self._rank == 0 and self._store.add(LEFT, 0) < self._ranks and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return code
