"""Whole micro-steps: the micro-batches of each class become a multiple of R, at the least waste.

Four means, in this order. Shares shift a little, so that all classes but the largest come out whole. Samples
that fill no micro-batch go where one is lacking. What is uneven after that moves to the next class, where it
has room, or to a pool. And the pool is cut anew, into a whole number, at one common cost.
"""

from dataclasses import replace

import numpy as np

from al_deepspeed.scheduling.arrangement import Task
from al_deepspeed.scheduling.classes import LEAST_POPULARITY, Classes
from al_deepspeed.scheduling.pieces import Pieces, concatenate, evenly_chosen, laid_out, places_within
from al_deepspeed.scheduling.shapes import FloatArray, IntArray

POOL = 0  # the class of what fits no other
ITERATIONS = 200
WHOLE = 1e-3  # share of a class's micro-batches that its aim may be missed by
BISECTIONS = 40
CERTAIN = 0.5  # of what short buckets should give; the other half balances what comes of the long ones
ROUND_UP_FROM = np.linspace(0.5, 1.0, 51)


def aim_at_whole_micro_steps(
    classes: Classes, counts: IntArray, ranks: int, *, roomy: bool
) -> tuple[Classes, IntArray]:
    """The same classes, shares shifted a little so that all but the largest have whole micro-steps.

    Args:
        roomy: have room for all the samples in them, even if that makes more of the micro-steps dear.
    Returns:
        the classes, and the number of micro-batches that each aims at.
    """
    per_sample = counts[:, None] / np.maximum(1, classes.size)
    share, riders = classes.share, classes.riders
    has_room = classes.size[riders] > 0
    micro_batches = (per_sample * share).sum(axis=0)
    aim = _rounded(micro_batches / ranks, classes.target, roomy=roomy) * ranks
    largest = int(np.argmax(micro_batches))
    for _ in range(ITERATIONS):
        factor = np.maximum(1, aim) / np.maximum(1e-300, (per_sample * share).sum(axis=0))
        factor[largest] = 1.0
        if np.abs(factor - 1).max() < WHOLE:
            break
        share = share * factor
        share = share / share.sum(axis=1, keepdims=True)
        share[riders] = has_room * np.maximum(LEAST_POPULARITY, counts[~riders] @ share[~riders])
        share[riders] /= share[riders].sum(axis=1, keepdims=True)
    aim[largest] = (per_sample * share).sum(axis=0)[largest]
    return replace(classes, share=share), aim


def _rounded(values: FloatArray, targets: FloatArray, *, roomy: bool) -> IntArray:
    """Whole numbers near the values and of nearly their sum: what one rounds away is added to the next, so
    that a class gives to its neighbour, whose cost is much the same.

    Args:
        roomy: round up less readily where the sum of number times target would come out below that of the
            values.
    """
    partial = np.cumsum(values)
    for threshold in ROUND_UP_FROM if roomy else ROUND_UP_FROM[:1]:
        whole = np.append(np.floor(partial[:-1] + 1 - threshold), np.round(partial[-1]))
        if (whole - partial)[:-1] @ np.diff(targets) <= 0:
            break
    return np.diff(whole.astype(np.int64), prepend=0)


def divide_samples(
    classes: Classes, counts: IntArray, aim: IntArray, short: np.ndarray
) -> tuple[IntArray, IntArray, IntArray]:
    """Whole micro-batches a bucket and class near the shares, and a total a class near the aim.

    Args:
        short: buckets of which any number may be left over; of them, half of that at first.
    Returns:
        numbers of micro-batches [buckets, classes]; the samples of each bucket that fill none, of the others
        fewer than any of its batch sizes; and how many micro-batches a class lacks, of others and of riders:
        [2, classes].
    """
    wanted = np.where(classes.size > 0, counts[:, None] * classes.share / np.maximum(classes.size, 1), 0.0)
    certain = np.where(short, CERTAIN, 1.0)[:, None]
    numbers = np.floor(wanted * certain).astype(np.int64)
    rest = counts - (numbers * classes.size).sum(axis=1)
    of_riders = wanted[classes.riders].sum(axis=0)
    lacking = np.stack([aim - of_riders, of_riders])
    lacking -= [numbers[~classes.riders].sum(axis=0), numbers[classes.riders].sum(axis=0)]
    for bucket in np.flatnonzero(~short).tolist():
        size, rider = classes.size[bucket], int(classes.riders[bucket])
        while True:
            fits = np.flatnonzero((size > 0) & (size <= rest[bucket]) & (wanted[bucket] > 0))
            if len(fits) == 0:
                break
            common_rider = rider and wanted[bucket].sum() >= len(aim)
            need = wanted[bucket] - numbers[bucket] if common_rider else lacking[rider]
            chosen = fits[np.argmax(need[fits])]
            numbers[bucket, chosen] += 1
            lacking[rider, chosen] -= 1
            rest[bucket] -= size[chosen]
    return numbers, rest, lacking


def homes_of_rests(
    targets: FloatArray, lacking: FloatArray, costs: FloatArray, riders: np.ndarray
) -> tuple[IntArray, FloatArray]:
    """A class with room for each micro-batch of left-over samples: the lowest that lacks one, or the lowest.

    Riders go where most of them are lacking.

    Returns:
        the classes, and what is lacking after that.
    """
    lacking = lacking.copy()
    homes = np.searchsorted(targets, costs * (1 - 1e-9))
    for place, (lowest, rider) in enumerate(zip(homes.tolist(), riders.astype(int).tolist(), strict=True)):
        room = lacking[rider, lowest:]
        homes[place] = lowest + np.argmax(room if rider else room > 0)
        lacking[rider, homes[place]] -= 1
    return homes, lacking


def fill_from_short(
    classes: Classes,
    numbers: IntArray,
    rest: IntArray,
    lacking: FloatArray,
    *,
    missing: int,
    least_size: IntArray,
    places: int,
) -> tuple[IntArray, IntArray]:
    """The numbers and rests of `divide_samples` once short buckets have given what is missing.

    They give to the highest class as long as more is left than the leftovers have places for, and then to the
    class that lacks most.

    Args:
        missing: micro-batches of all classes together.
        least_size: B of each bucket among leftovers; 0 for long ones, which give nothing.
        places: micro-batches of leftovers.
    """
    numbers, rest, lacking = numbers.copy(), rest.copy(), lacking[0].copy()
    short = np.flatnonzero(least_size)
    for bucket in short.tolist():
        size = classes.size[bucket]
        while missing > 0 and (fits := np.flatnonzero((size > 0) & (size <= rest[bucket]))).size:
            too_much = (-(-rest[short] // least_size[short])).sum() > places
            chosen = fits[-1] if too_much else fits[np.argmax(lacking[fits])]
            numbers[bucket, chosen] += 1
            lacking[chosen] -= 1
            rest[bucket] -= size[chosen]
            missing -= 1
    return numbers, rest


def fill_classes(task: Task, pieces: Pieces, targets: FloatArray) -> Pieces:
    """Make the micro-batches of each class a multiple of R, at the least waste.

    A class with a few too many sends them to the pool. Otherwise the dearest of a class move up to the next.
    What is too much in the last class that may stay uneven goes to the pool too.
    """
    home = pieces.home.copy()
    ranks, classes = task.world_size, range(1, len(targets) + 1)
    for number in classes:
        members = np.flatnonzero(home == number)
        surplus = len(members) % ranks
        if surplus <= min((pieces.size[members] > 1).sum(), ranks / 4):
            home[_for_the_pool(task, pieces, members, surplus)] = POOL
    by_class = [np.flatnonzero(home == number) for number in classes]
    numbers = np.array([len(members) for members in by_class])
    price = targets.copy()
    for number in np.flatnonzero(numbers).tolist():
        first = _for_the_pool(task, pieces, by_class[number], min(ranks, len(by_class[number])))
        price[number] *= (1 / pieces.size[first]).mean()
    moves, open_class = moves_up(numbers, targets, price, ranks)
    costs = task.costs(pieces)
    for number in np.flatnonzero(moves).tolist():
        members = np.flatnonzero(home == number + 1)
        dearest = members[np.argsort(-costs[members], kind="stable")[: moves[number]]]
        home[dearest] = number + 2
    members = np.flatnonzero(home == open_class + 1)
    home[_for_the_pool(task, pieces, members, len(members) % ranks)] = POOL
    return replace(pieces, home=home)


def _for_the_pool(task: Task, pieces: Pieces, members: IntArray, number: int) -> IntArray:
    """Which members of a class go there: those that can be cut most finely, or by the corpus's mix any that
    can be cut.
    """
    if task.options.mixing == "free":
        return members[np.argsort(-pieces.size[members], kind="stable")[:number]]
    splittable = members[pieces.size[members] > 1]
    return evenly_chosen(splittable if len(splittable) >= number else members, number)


def moves_up(numbers: IntArray, targets: FloatArray, price: FloatArray, ranks: int) -> tuple[IntArray, int]:
    """How many micro-batches each class hands to the next, and which class alone may end up uneven.

    Below the open class, each hands on what it has over a multiple of R; above it, each asks the class
    below for what it lacks. A moved micro-batch wastes the step between the targets. What is over in the open
    class joins the pool, at a price a place that is left there. The open class is the one that makes the
    waste least.
    """
    climbs = np.diff(targets)
    best, chosen = np.inf, (np.zeros(len(numbers), dtype=np.int64), 0)
    for open_class in range(len(numbers)):
        moves = np.zeros(len(numbers) + 1, dtype=np.int64)  # moves[k]: from class k - 1 to class k
        for low in range(open_class):
            moves[low + 1] = (numbers[low] + moves[low]) % ranks
        for high in range(len(numbers) - 1, open_class, -1):
            moves[high] = (moves[high + 1] - numbers[high]) % ranks
        over = numbers[open_class] + moves[open_class] - moves[open_class + 1]
        waste = (moves[1:-1] * climbs).sum() + (-over % ranks) * price[open_class]
        if over >= 0 and waste < best:
            best, chosen = waste, (moves[1:], open_class)
    return chosen


def level_pool(task: Task, pieces: Pieces, filler: np.ndarray) -> tuple[Pieces, np.ndarray]:
    """Cut what is in the pool anew, into as many micro-batches as it had, at the lowest common cost.

    Returns:
        the micro-batches, and which of them are fillers.
    """
    pooled = (pieces.home == POOL) & ~filler
    pool = pieces.take(pooled)
    if len(pool) == 0 or task.options.max_variants is not None:
        return pieces, filler
    bucket, place = np.unique(pool.bucket, return_inverse=True)
    count = np.bincount(place, weights=pool.size).astype(np.int64)
    most = np.zeros(len(bucket), dtype=np.int64)
    np.maximum.at(most, place, pool.size)
    number = level(task, task.corpus.tokens[bucket], count, most, len(pool))
    bucket, count, number = (np.repeat(column, number) for column in (bucket, count, number))
    size = count // number + (places_within(bucket) < count % number)
    pool = Pieces(bucket, np.zeros_like(bucket), size, np.full(len(bucket), POOL))
    real = laid_out(concatenate([pool, pieces.take(~pooled & ~filler)]), task.starts)
    return concatenate([real, pieces.take(filler)]), np.sort(filler)


def level(task: Task, tokens: IntArray, count: IntArray, most: IntArray, places: int) -> IntArray:
    """How many micro-batches of at most `most` samples each bucket is cut into, so many `places` in all."""
    low, high = 0.0, float(task.cost.cost(most, tokens).max())
    number = -(-count // most)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        size = np.minimum(most, task.cost.largest_batch(tokens, middle))
        fits = size.min() > 0 and (-(-count // size)).sum() <= places
        low, high = (low, middle) if fits else (middle, high)
        number = -(-count // size) if fits else number
    for _ in range(places - number.sum()):
        costs = np.where(number < count, task.cost.cost(-(-count // number), tokens), 0.0)
        number[np.argmax(costs)] += 1
    return number


def share_with_pool(
    task: Task, pieces: Pieces, rare: np.ndarray, filler: np.ndarray, targets: FloatArray
) -> Pieces:
    """Let the pool have its share of the rarer kinds, in exchange for micro-batches of its own that fit."""
    pooled = pieces.home == POOL
    missing = int(np.round(rare.mean() * pooled.sum())) - int((rare & pooled).sum())
    given = np.flatnonzero(pooled & ~rare & ~filler)
    taken = np.flatnonzero(~pooled & rare)
    exchanged = max(0, min(missing, len(given), len(taken)))
    given, taken = evenly_chosen(given, exchanged), evenly_chosen(taken, exchanged)
    fits = task.costs(pieces.take(given)) <= targets[pieces.home[taken] - 1] * (1 + 1e-9)
    home = pieces.home.copy()
    home[given[fits]], home[taken[fits]] = home[taken[fits]], POOL
    return replace(pieces, home=home)
