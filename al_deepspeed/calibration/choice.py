"""Which (B, S) to measure next: the corners first, then where the fit is least certain.

Three limits hold at every choice. Time: a warm-up and a repeat must fit into what is left of the budget, and
take no more than a share of the whole. Memory: the predicted peak stays below the limit, extrapolated at the
steepest growth seen, with a margin. Growth: B and B*S rise at most eightfold over the largest yet, so that no
extrapolation reaches far.

The corners are the longest sample alone, the shortest ones and the longest ones, each with as large a batch
as the limits allow: a plan fills micro-batches up to one cost, so there it works, and there time and memory
would otherwise be extrapolated.

How doubtful the fit is at a candidate: its jackknife error, which is how far the prediction moves as one
measured point after another is left out, and a little for each doubling of B or S away from the nearest
measured point, since no form is exact. Small batches that hide below a floor, where the host sets the pace,
are left out of that: there is one time to be known for all of them. But a host's pace drifts within minutes,
so every fourth point is one of them, and the floor is known from all over the scan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from al_deepspeed.calibration.fit import Variant, fit_once, refits_without_each
from al_deepspeed.calibration.points import OUT_OF_MEMORY, Columns, Point, columns, measured
from al_deepspeed.calibration.robust import FloatArray

GROWTH = 8
SLOPE_MARGIN = 1.25
APART = 0.25  # of the largest B*S, or B: points nearer to each other than that tell no slope
LEAST_GROWING_SHARE = 0.1  # of the largest point's time, as long as nothing is seen to grow
SHARE_OF_BUDGET = 0.12
SHARE_OF_LONGEST = 0.4  # the longest sample alone: a calibration should hardly ever lack it
RUNS_A_POINT = 2.5  # a warm-up, a repeat, and what lies between
POINTS_BEFORE_FIT = 6
POINTS_ENOUGH = 10  # before these, a point may take more than its share of the budget
SMALL_EVERY = 4
ABOVE_FLOOR = 1.1
PROVISIONAL = Variant("roofline", "hard")
DOUBT_A_DOUBLING = 0.01


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
    """The candidate's place; None when no further point is allowed."""
    if not measured(points):
        return None if points else int(np.argmin(choices.load))
    ms = expected_ms(choices, points)
    seconds = RUNS_A_POINT * ms / 1e3
    free = _free(choices, points)
    fits = free & _within_memory(choices, points, allowance.limit_gb)
    safe = fits & (seconds <= allowance.left_s)
    short = safe & (seconds <= SHARE_OF_BUDGET * allowance.budget_s)
    alone = choices.batch_size == 1
    corners = (
        (alone, safe & (seconds <= SHARE_OF_LONGEST * allowance.budget_s)),
        (choices.tokens == choices.tokens.min(), short),
        (choices.tokens == choices.tokens.max(), short),
    )
    for edge, allowed in corners:
        reached = choices.load[edge & ~free].max(initial=0)
        beyond = edge & allowed & (choices.load > reached)
        if beyond.any():
            return int(np.argmax(np.where(beyond, choices.load, -1)))
    if not short.any():
        late = fits & (allowance.left_s > 0) & (len(measured(points)) <= POINTS_BEFORE_FIT)
        return _cheapest(safe if safe.any() else late, seconds, len(measured(points)))
    hidden = short & (ms < ABOVE_FLOOR * ms.min())
    if hidden.any() and (len(points) % SMALL_EVERY == 0 or (hidden == short).all()):
        return int(np.argmin(np.where(hidden, choices.load, choices.load.max() + 1)))
    return int(np.argmax(np.where(short & ~hidden, doubt(choices, points), -1.0)))


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


def expected_gb(choices: Candidates, points: Sequence[Point]) -> FloatArray:
    """Predicted reservation of each candidate, above what it will be.

    Each measured point bounds a candidate: by what it reserved, and the steepest growth a token and a sample
    for what the candidate has more of them, with a margin. The lowest bound holds.
    """
    data = columns(points)
    load = data.batch_size * data.tokens
    token_gb, sample_gb = _growth_gb(data, int(choices.tokens.min()))
    tokens = np.maximum(0, choices.load[:, None] - load)
    samples = np.maximum(0, choices.batch_size[:, None] - data.batch_size)
    return (data.reserved_gb + SLOPE_MARGIN * (token_gb * tokens + sample_gb * samples)).min(axis=1)


def _growth_gb(data: Columns, shortest: int) -> tuple[float, float]:
    """The steepest growth of memory between two points: GB a token, and GB a sample beyond its tokens.

    What the passes take counts as well as what is reserved: below the optimizer step's level the latter shows
    no growth. Pairs [from, to] that lie close together say nothing; and of a token, those say most that
    differ by few samples. What more samples took is theirs, less the least that their tokens can have taken.
    """
    load = data.batch_size * data.tokens
    tokens, samples = load - load[:, None], data.batch_size - data.batch_size[:, None]
    grown = np.maximum(data.pass_gb - data.pass_gb[:, None], data.reserved_gb - data.reserved_gb[:, None])
    longer = tokens >= APART * load.max()
    few = np.abs(samples) * shortest <= APART * tokens
    longer = longer & few if (longer & few).any() else longer
    slopes = np.maximum(0.0, grown[longer] / tokens[longer])
    steepest = slopes.max(initial=0.0)
    wider = ~few & (samples >= APART * data.batch_size.max())
    beyond_tokens = grown[wider] - slopes.min(initial=steepest) * np.maximum(0, tokens[wider])
    return steepest, (beyond_tokens / samples[wider]).max(initial=0.0)


def doubt(choices: Candidates, points: Sequence[Point]) -> FloatArray:
    """Relative uncertainty of the prediction at each candidate."""
    data = columns(points)
    steps = np.abs(np.log2(choices.batch_size[:, None] / data.batch_size))
    steps += np.abs(np.log2(choices.tokens[:, None] / data.tokens))
    distance = DOUBT_A_DOUBLING * steps.min(axis=1)
    if len(data) <= POINTS_BEFORE_FIT:
        return distance
    models = refits_without_each(PROVISIONAL, data.batch_size, data.tokens, data.ms)
    predicted = np.stack([model.cost(choices.batch_size, choices.tokens) for model in models])
    jackknife = np.sqrt((len(data) - 1) * predicted.var(axis=0)) / predicted.mean(axis=0)
    return jackknife + distance


def _free(choices: Candidates, points: Sequence[Point]) -> np.ndarray:
    taken = {(point.batch_size, point.tokens) for point in points}
    pairs = zip(choices.batch_size.tolist(), choices.tokens.tolist(), strict=True)
    return np.array([pair not in taken for pair in pairs])


def _within_memory(choices: Candidates, points: Sequence[Point], limit_gb: float | None) -> np.ndarray:
    """Growth in B and B*S, and the predicted reservation where a limit is known."""
    batch_sizes = {point.batch_size for point in measured(points)}
    loads = {point.batch_size * point.tokens for point in measured(points)}
    failed = min((p.batch_size * p.tokens for p in points if p.status == OUT_OF_MEMORY), default=np.inf)
    within = (choices.load <= GROWTH * max(loads)) & (choices.load < failed)
    within &= choices.batch_size <= GROWTH * max(batch_sizes)
    if limit_gb is None:
        return within
    if len(loads) == 1:  # no slope yet: the smallest step up
        larger = choices.load[choices.load > max(loads)]
        return within & (choices.load <= larger.min(initial=choices.load.max()))
    return within & (expected_gb(choices, points) <= limit_gb)
