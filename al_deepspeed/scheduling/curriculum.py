"""Which samples a step may use: all whose difficulty the schedules admit at that step.

Difficulty is a pure function of the global step, so an epoch's plan is made ahead of time, in stretches over
which the same samples are admitted. A schedule that moves every few steps would leave no room to balance: a
stretch has at least the look-ahead's steps, and the lowest difficulties that occur in it hold for all of it.
Nothing above its step's difficulty is ever used. When admitted samples run out the epoch ends, and what waits
is in the next one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from al_deepspeed.errors import PlanError
from al_deepspeed.scheduling.shapes import Corpus, FloatArray, IntArray

SEQUENCE_LENGTH = "seqlen"
STRETCHES = 64  # of an epoch at most, or the planning of a large corpus would take too long


@dataclass(frozen=True)
class Schedule:
    """One metric's difficulty over time.

    difficulty: of a global step, counted from 1 as DeepSpeed does.
    percentiles: None, where the metric's values are compared; else the number of equal parts, in ascending
        order of the metric, that the corpus falls into and the difficulty counts.
    """

    difficulty: Callable[[int], float]
    percentiles: int | None = None


def difficulties(corpus: Corpus, schedules: Mapping[str, Schedule]) -> list[FloatArray]:
    """Each schedule's difficulty of each sample."""
    columns = []
    for name, schedule in schedules.items():
        if name == SEQUENCE_LENGTH:
            values = corpus.tokens[corpus.bucket]
        elif name in corpus.metrics:
            values = np.asarray(corpus.metrics[name])
        else:
            known = ", ".join([SEQUENCE_LENGTH, *corpus.metrics])
            raise PlanError(f"curriculum metric {name!r} is no numeric column; the manifest has {known}.")
        unknown = np.flatnonzero(np.isnan(values))
        if len(unknown):
            raise PlanError(
                f"curriculum metric {name!r} is absent or NaN for {len(unknown)} samples, the first of them "
                f"{corpus.sample_name(int(unknown[0]))}. Give each a number, or leave them out."
            )
        if schedule.percentiles is not None:
            part = max(1, len(values) // schedule.percentiles)
            rank = np.empty(len(values), dtype=np.int64)
            rank[np.argsort(values, kind="stable")] = np.arange(len(values))
            values = np.minimum(rank // part + 1, schedule.percentiles)
        columns.append(values)
    return columns


def admitted(columns: list[FloatArray], ids: IntArray, limits: FloatArray) -> np.ndarray:
    """Which of the samples no schedule holds back."""
    allowed = np.ones(len(ids), dtype=bool)
    for values, limit in zip(columns, limits, strict=True):
        allowed &= values[ids] <= limit
    return allowed


class Stretches:
    """Runs of steps over which the same samples are admitted.

    Args:
        corpus: its samples' difficulties tell which changes of a schedule matter.
        schedules: by metric.
        least: steps that a stretch has at least.
    """

    def __init__(self, corpus: Corpus, schedules: Mapping[str, Schedule], least: int) -> None:
        self.columns = difficulties(corpus, schedules)
        self._levels = [np.unique(values) for values in self.columns]
        self._schedules = list(schedules.values())
        self._least = least

    def limits(self, step: int) -> FloatArray:
        """Difficulty by schedule at a step counted from 0."""
        return np.array([schedule.difficulty(step + 1) for schedule in self._schedules], dtype=np.float64)

    def next(self, step: int, longest: int) -> tuple[int, FloatArray]:
        """Length of the stretch that begins at `step`, at most `longest` steps, and its difficulties."""
        limits = self.limits(step)
        length = 1
        while length < longest:
            later = self.limits(step + length)
            if length >= self._least and self._admits(later) != self._admits(limits):
                break
            limits = np.minimum(limits, later)
            length += 1
        return length, limits

    def _admits(self, limits: FloatArray) -> list[int]:
        pairs = zip(self._levels, limits, strict=True)
        return [int(np.searchsorted(levels, limit, side="right")) for levels, limit in pairs]
