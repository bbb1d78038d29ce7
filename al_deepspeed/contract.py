"""The first step under the contract check: all ranks stop together, or none.

A rank that finds a rewritten site wrong must not leave alone, so differences are compared where every rank
comes by: as it enters `engine.step` for the first time, before anything is updated (a pipeline engine: as its
first `train_batch` ends). Then the checker is taken away, and rewritten code runs without the originals.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
from deepspeed.utils import logger

from al_deepspeed.agreement import together
from al_deepspeed.errors import PatchError
from al_deepspeed.patching import in_memory, runtime
from al_deepspeed.patching.verification import Checker


class FirstStep:
    """Checks the sites of a report from now on until the engine's first step."""

    def __init__(self, engine: Any, report: in_memory.Report) -> None:
        self._report = report
        self._checker: Checker | None = Checker()
        runtime.set_checker(self._checker)
        if hasattr(engine, "train_batch"):
            engine.train_batch = self._end_after(engine.train_batch)
        else:
            engine.step = self._end_before(engine.step)

    def _end_before(self, step: Callable) -> Callable:
        @wraps(step)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            self._end()
            return step(*arguments, **options)

        return wrapper

    def _end_after(self, train_batch: Callable) -> Callable:
        @wraps(train_batch)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            loss = train_batch(*arguments, **options)
            self._end()
            return loss

        return wrapper

    def _end(self) -> None:
        if self._checker is None:
            return
        checker, self._checker = self._checker, None
        runtime.set_checker(None)
        in_memory.stop_observing()
        with together():
            if checker.differences:
                raise PatchError(
                    "the fused op differs from the code that it replaced:\n"
                    + "\n".join(map(str, checker.differences))
                    + '\nReport this, or set fused_adaln.patch to "off".'
                )
        if dist.get_rank() == 0:
            self._say(checker.checked)

    def _say(self, checked: set[str]) -> None:
        sites = {f"{site.file}:{site.line}" for sites in self._report.sites.values() for site in sites}
        if sites & checked:
            print(f"fused AdaLN equals the original code at {len(sites & checked)} sites", file=sys.stderr)
        if unseen := sorted(sites - checked):
            logger.warning(
                f"fused AdaLN not compared, the first step did not run it with gradients: {', '.join(unseen)}"
            )
