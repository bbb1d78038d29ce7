"""Whole micro-steps: the micro-batches of each class become a multiple of R, at the least waste.

Three means, in this order. Shares shift a little, so that all classes but the largest come out whole. Samples
that fill no micro-batch go where one is lacking. And what is uneven after that moves to the next class,
where it has room, or to a pool of halves.
"""

from dataclasses import replace

import numpy as np

from al_deepspeed.scheduling.arrangement import Task
from al_deepspeed.scheduling.classes import LEAST_POPULARITY, Classes
from al_deepspeed.scheduling.pieces import Pieces, evenly_chosen
from al_deepspeed.scheduling.shapes import FloatArray, IntArray

POOL = 0  # the class of what fits no other
ITERATIONS = 60
WASTE_OF_HALVES = 0.1  # of the target: halves of odd batch sizes differ


def aim_at_whole_micro_steps(classes: Classes, counts: IntArray, ranks: int) -> tuple[Classes, IntArray]:
    """The same classes, shares shifted a little so that all but the largest have whole micro-steps.

    Returns:
        the classes, and the number of micro-batches that each aims at.
    """
    per_sample = counts[:, None] / np.maximum(1, classes.size)
    share, riders = classes.share, classes.riders
    has_room = classes.size[riders] > 0
    micro_batches = (per_sample * share).sum(axis=0)
    aim = _largest_remainders(micro_batches / ranks) * ranks
    largest = int(np.argmax(micro_batches))
    for _ in range(ITERATIONS):
        factor = np.maximum(1, aim) / np.maximum(1e-300, (per_sample * share).sum(axis=0))
        factor[largest] = 1.0
        share = share * factor
        share = share / share.sum(axis=1, keepdims=True)
        share[riders] = has_room * np.maximum(LEAST_POPULARITY, counts[~riders] @ share[~riders])
        share[riders] /= share[riders].sum(axis=1, keepdims=True)
    aim[largest] = (per_sample * share).sum(axis=0)[largest]
    return replace(classes, share=share), aim


def _largest_remainders(values: FloatArray) -> IntArray:
    """Whole numbers near the values that add up to the whole part of their sum."""
    whole = np.floor(values).astype(np.int64)
    order = np.argsort(whole - values, kind="stable")
    whole[order[: int(values.sum() + 1e-9) - whole.sum()]] += 1
    return whole


def divide_samples(classes: Classes, counts: IntArray, aim: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Whole micro-batches a bucket and class near the shares, and a total a class near the aim.

    Returns:
        numbers of micro-batches [buckets, classes]; the samples of each bucket that fill none, fewer than any
        of its batch sizes; and how many micro-batches a class lacks, of others and of riders: [2, classes].
    """
    wanted = np.where(classes.size > 0, counts[:, None] * classes.share / np.maximum(classes.size, 1), 0.0)
    numbers = np.floor(wanted).astype(np.int64)
    rest = counts - (numbers * classes.size).sum(axis=1)
    of_riders = wanted[classes.riders].sum(axis=0)
    lacking = np.stack([aim - of_riders, of_riders])
    lacking -= [numbers[~classes.riders].sum(axis=0), numbers[classes.riders].sum(axis=0)]
    for bucket, (size, rider) in enumerate(zip(classes.size, classes.riders.astype(int), strict=True)):
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
) -> IntArray:
    """A class with room for each micro-batch of left-over samples: the lowest that lacks one, or the lowest.

    Riders go where most of them are lacking.
    """
    lacking = lacking.copy()
    homes = np.searchsorted(targets, costs * (1 - 1e-9))
    for place, (lowest, rider) in enumerate(zip(homes.tolist(), riders.astype(int).tolist(), strict=True)):
        room = lacking[rider, lowest:]
        homes[place] = lowest + np.argmax(room if rider else room > 0)
        lacking[rider, homes[place]] -= 1
    return homes


def fill_classes(task: Task, pieces: Pieces, targets: FloatArray) -> Pieces:
    """Make the micro-batches of each class a multiple of R, at the least waste.

    A class with a few too many sends them to the pool, in halves. Otherwise the dearest of a class move up to
    the next. What is too much in the last class that may stay uneven goes to the pool too.
    """
    home = pieces.home.copy()
    ranks, classes = task.world_size, range(1, len(targets) + 1)
    for number in classes:
        members = np.flatnonzero(home == number)
        surplus = len(members) % ranks
        splittable = members[pieces.size[members] > 1]
        if surplus <= min(len(splittable), ranks / 4):
            home[evenly_chosen(splittable, surplus)] = POOL
    numbers = np.bincount(home, minlength=len(targets) + 1)[1:]
    unsplittable = np.bincount(home, weights=pieces.size == 1, minlength=len(targets) + 1)[1:]
    price = targets * (WASTE_OF_HALVES + unsplittable / np.maximum(1, numbers))
    moves, open_class = moves_up(numbers, targets, price, ranks)
    costs = task.costs(pieces)
    for number in np.flatnonzero(moves).tolist():
        members = np.flatnonzero(home == number + 1)
        dearest = members[np.argsort(-costs[members], kind="stable")[: moves[number]]]
        home[dearest] = number + 2
    members = np.flatnonzero(home == open_class + 1)
    home[evenly_chosen(members, len(members) % ranks)] = POOL
    return replace(pieces, home=home)


def moves_up(numbers: IntArray, targets: FloatArray, price: FloatArray, ranks: int) -> tuple[IntArray, int]:
    """How many micro-batches each class hands to the next, and which class alone may end up uneven.

    Below the open class, each hands on what it has over a multiple of R; above it, each asks the class
    below for what it lacks. A moved micro-batch wastes the step between the targets. In the open class,
    what is over joins halves of micro-batches, at a price a place that is left to them. The open class is
    the one that makes the waste least.
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
