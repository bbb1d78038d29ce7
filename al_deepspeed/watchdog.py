"""Turns a silent hang into an error that names rank, micro-step and shape.

Under ZeRO-3 every module's forward is a collective call. A model that skips a module for some batches (the
temporal layers for images, say) hangs as soon as an image and a video run side by side: one rank waits in an
all-gather that the other never joins. Nothing raises; NCCL or gloo gives up after 10 to 30 minutes with a
message about a sequence number. The plan knows what every rank was given, so this thread can say it.

The training loop only stores one reference a micro-step. The thread looks at it a few times a time limit, and
a main thread stuck inside a collective cannot be interrupted from Python, so the process ends by `os._exit`
after the message and the stacks of all threads; the launcher then ends the other ranks.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

from al_deepspeed.config import BATCHING_KEY

EXIT_CODE = 70
CHECKS_A_LIMIT = 10
GRACE_S = 5.0  # the other ranks' limits pass within this time: all of them get to report


class Watchdog:
    """Watches the time from `begin` to `end` of each micro-step.

    Args:
        limit_s: seconds a micro-step may take; 0 switches the watchdog off.
        describe: the message for a micro-step, called only when its time is up.
    """

    def __init__(self, limit_s: float, describe: Callable[[int], str]) -> None:
        self._limit_s = limit_s
        self._describe = describe
        self._running: tuple[float, int] | None = None
        self._thread: threading.Thread | None = None

    def begin(self, micro_step: int) -> None:
        """The training loop gets this micro-step's batch."""
        if self._limit_s <= 0:
            return
        self._running = (time.monotonic(), micro_step)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="al_deepspeed watchdog", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """The micro-step is over. Until the next `begin` nothing is watched: validation takes its time."""
        self._running = None

    def _watch(self) -> None:
        while True:
            time.sleep(self._limit_s / CHECKS_A_LIMIT)
            running = self._running
            if running is not None and time.monotonic() - running[0] > self._limit_s:
                self._give_up(running[1])

    def _give_up(self, micro_step: int) -> None:
        message = (
            f"HangError: no progress for {self._limit_s:.0f} s. {self._describe(micro_step)}\n"
            "If a module runs for some shapes only, run it on all ranks (with a dummy input, times 0), or "
            f"set {BATCHING_KEY}.group_by_shape to true, so that the ranks of a micro-step run one shape. If "
            f"a micro-step may take this long, raise {BATCHING_KEY}.hang_timeout_s; 0 switches this off."
        )
        print(message, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        time.sleep(min(GRACE_S, self._limit_s))
        os._exit(EXIT_CODE)
