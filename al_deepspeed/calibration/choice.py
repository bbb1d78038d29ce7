"""Which (B, S) to measure next: the corners first, then where the fit is least certain.

Three limits hold at every choice. Time: a point must fit into what is left of the budget, and take no more
than a share of the whole. Memory: the predicted peak stays below the limit, extrapolated from the steepest
growth seen, with a margin. Growth: B*S rises at most eightfold over the largest yet, so that no extrapolation
reaches far.

How doubtful the fit is at a candidate: its jackknife error, which is how far the prediction moves as one
measured point after another is left out, and a little for each doubling of B or S away from the nearest
measured point, since no form is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from al_deepspeed.calibration.fit import Variant, fit_once, refits_without_each
from al_deepspeed.calibration.points import OUT_OF_MEMORY, Point, columns, measured
from al_deepspeed.calibration.robust import FloatArray

GROWTH = 8.0
SLOPE_MARGIN = 1.25
LEAST_GROWING_SHARE = 0.1  # of the largest point's time, as long as nothing is seen to grow
SHARE_OF_BUDGET = 0.1
SHARE_OF_LONGEST = 0.4  # the longest sample alone: a calibration should hardly ever lack it
RUNS_A_POINT = 3.5  # a warm-up, at least two repeats, and what lies between
POINTS_BEFORE_FIT = 6
POINTS_ENOUGH = 10  # before these, a point may take more than its share of the budget
PROVISIONAL = Variant("roofline", "hard")
DOUBT_A_DOUBLING = 0.01
CERTAIN = 0.008  # so that a budget that lasts is spent on every pair


@dataclass(frozen=True)
class Candidates:
    """Pairs that may be measured, int arrays of one length. shape: place in the scan's list of shapes."""

    batch_size: np.ndarray
    tokens: np.ndarray
    shape: np.ndarray

    @property
    def load(self) -> np.ndarray:
        return self.batch_size * self.tokens


@dataclass(frozen=True)
class Allowance:
    """What a choice keeps to. limit_gb: what may be reserved; None where the capacity is unknown."""

    budget_s: float
    left_s: float
    limit_gb: float | None = None


def candidates(tokens: Sequence[int], largest_batch: int) -> Candidates:
    """Batch sizes 1, 2, 4, ... for each shape's sequence length."""
    sizes = 2 ** np.arange(int(largest_batch).bit_length())
    shape = np.repeat(np.arange(len(tokens)), len(sizes))
    return Candidates(np.tile(sizes, len(tokens)), np.asarray(tokens)[shape], shape)


def next_candidate(choices: Candidates, points: Sequence[Point], allowance: Allowance) -> int | None:
    """The candidate's place; None when no further point is allowed, or none is in doubt."""
    if not measured(points):
        return None if points else int(np.argmin(choices.load))
    seconds = RUNS_A_POINT * expected_ms(choices, points) / 1e3
    fits = _free(choices, points) & _within_memory(choices, points, allowance.limit_gb)
    safe = fits & (seconds <= allowance.left_s)
    short = safe & (seconds <= SHARE_OF_BUDGET * allowance.budget_s)
    longest, shortest = choices.tokens.max(), choices.tokens.min()
    alone = choices.batch_size == 1
    corners = (
        (alone, safe & (seconds <= SHARE_OF_LONGEST * allowance.budget_s)),
        (choices.tokens == shortest, short),
        (choices.tokens == longest, short),
    )
    for edge, allowed in corners:
        reached = choices.load[edge & ~_free(choices, points)].max(initial=0)
        beyond = edge & allowed & (choices.load > reached)
        if beyond.any():
            return int(np.argmax(np.where(beyond, choices.load, -1)))
    if not short.any():
        late = fits & (allowance.left_s > 0) & (len(measured(points)) <= POINTS_BEFORE_FIT)
        return _cheapest(safe if safe.any() else late, seconds, len(measured(points)))
    doubts = np.where(short, doubt(choices, points), -1.0)
    best = int(np.argmax(doubts))
    return best if doubts[best] > CERTAIN else None


def _cheapest(allowed: np.ndarray, seconds: FloatArray, points: int) -> int | None:
    """While points are too few: the one that takes least, though more than its share, or until too late."""
    if points >= POINTS_ENOUGH or not allowed.any():
        return None
    return int(np.argmin(np.where(allowed, seconds, np.inf)))


def expected_ms(choices: Candidates, points: Sequence[Point]) -> FloatArray:
    """Predicted time of each candidate: by the provisional fit, or before it by what growth there can be.

    At worst time grows with B*S^2. That is far too much where a floor hides the batch's own time, so the
    growth seen between the points counts too, from the second on.
    """
    data = columns(points)
    if len(data) > POINTS_BEFORE_FIT:
        model = fit_once(PROVISIONAL, data.batch_size, data.tokens, data.ms)
        return model.cost(choices.batch_size, choices.tokens)
    load = data.batch_size * data.tokens
    more = np.maximum(1, choices.load[:, None] / load)
    longer = np.maximum(1, choices.tokens[:, None] / data.tokens)
    at_worst = (data.ms * more * longer).min(axis=1)
    loads, place = np.unique(load, return_inverse=True)
    if len(loads) == 1:
        return at_worst
    slowest = np.zeros(len(loads))
    np.maximum.at(slowest, place, data.ms)
    seen = SLOPE_MARGIN * (np.diff(slowest) / np.diff(loads)).max()
    slope = max(seen, LEAST_GROWING_SHARE * slowest[-1] / loads[-1])
    beyond = np.maximum(0, choices.load * longer.min(axis=1) - loads[-1])
    return np.minimum(at_worst, slowest.max() + slope * beyond)


def expected_gb(load: np.ndarray, points: Sequence[Point]) -> FloatArray:
    """Predicted reservation; beyond the largest measured load at the steepest slope seen, with a margin."""
    data = columns(points)
    measured, place = np.unique(data.batch_size * data.tokens, return_inverse=True)
    passes = np.zeros(len(measured))
    np.maximum.at(passes, place, data.pass_gb)
    passes = np.maximum.accumulate(passes)
    slope = SLOPE_MARGIN * (np.diff(passes) / np.diff(measured)).max(initial=0.0)
    beyond = np.maximum(0, load - measured[-1])
    held = (data.reserved_gb / data.peak_gb).max()  # the allocator holds more than it hands out
    return np.maximum(data.peak_gb.min(), np.interp(load, measured, passes) + slope * beyond) * held


def doubt(choices: Candidates, points: Sequence[Point]) -> FloatArray:
    """Relative uncertainty of the prediction at each candidate."""
    data = columns(points)
    steps = np.abs(np.log2(choices.batch_size[:, None] / data.batch_size))
    steps += np.abs(np.log2(choices.tokens[:, None] / data.tokens))
    distance = DOUBT_A_DOUBLING * steps.min(axis=1)
    if len(data) <= POINTS_BEFORE_FIT:
        return CERTAIN + distance
    models = refits_without_each(PROVISIONAL, data.batch_size, data.tokens, data.ms)
    predicted = np.stack([model.cost(choices.batch_size, choices.tokens) for model in models])
    jackknife = np.sqrt((len(data) - 1) * predicted.var(axis=0)) / predicted.mean(axis=0)
    return jackknife + distance


def _free(choices: Candidates, points: Sequence[Point]) -> np.ndarray:
    taken = {(point.batch_size, point.tokens) for point in points}
    pairs = zip(choices.batch_size.tolist(), choices.tokens.tolist(), strict=True)
    return np.array([pair not in taken for pair in pairs])


def _within_memory(choices: Candidates, points: Sequence[Point], limit_gb: float | None) -> np.ndarray:
    """Growth in B*S, and the predicted reservation where a limit is known."""
    loads = {point.batch_size * point.tokens for point in measured(points)}
    failed = min((p.batch_size * p.tokens for p in points if p.status == OUT_OF_MEMORY), default=np.inf)
    within = (choices.load <= GROWTH * max(loads)) & (choices.load < failed)
    if limit_gb is None:
        return within
    if len(loads) == 1:  # no slope yet: the smallest step up
        larger = choices.load[choices.load > max(loads)]
        return within & (choices.load <= larger.min(initial=choices.load.max()))
    return within & (expected_gb(choices.load, points) <= limit_gb)
