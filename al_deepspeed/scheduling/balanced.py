"""Strategy `balanced`: the ranks of a micro-step cost the same, and steps still resemble the corpus.

1. Choose classes of micro-steps, each with a target cost, and divide every shape among them (classes.py).
2. Cut: in a class with target T a micro-batch has the largest B with cost(B, S) <= T.
3. Fill: make the micro-batches of each class a multiple of R (filling.py); what is over goes to a pool, with
   the halves that complete the last step, and is cut anew. Under mixing "free" short samples may be set apart
   for it, so that it is whole micro-steps of the least cost (leftovers.py).
4. Deal: spread kinds and shapes evenly over the micro-steps of a class, R micro-batches each.
5. Join G micro-steps to a step so that steps hold nearly equal numbers of tokens (steps.py).

`mixing` says what may be paid for resemblance: "corpus" a little of the epoch's time; "free" deals by cost
alone.
"""

from dataclasses import replace

import numpy as np

from al_deepspeed.scheduling.arrangement import Arrangement, Task, complete
from al_deepspeed.scheduling.classes import Classes
from al_deepspeed.scheduling.composition import choose_classes, rarer_kinds
from al_deepspeed.scheduling.filling import (
    POOL,
    aim_at_whole_micro_steps,
    divide_samples,
    fill_classes,
    fill_from_short,
    homes_of_rests,
    level_pool,
    share_with_pool,
)
from al_deepspeed.scheduling.leftovers import Leftovers, leftover_sizes, nothing_apart, set_apart
from al_deepspeed.scheduling.pieces import Pieces, spread_evenly
from al_deepspeed.scheduling.shapes import FloatArray, IntArray
from al_deepspeed.scheduling.steps import order_micro_steps

FEW_MICRO_STEPS = 500
RIVALS = 6
NEARLY_WHOLE = 0.75  # of a micro-step: shares that shift a little make a whole one of it


def balanced(task: Task) -> Arrangement:
    """Dual-constraint micro-batches whose sizes are chosen so that different shapes meet a common cost."""
    nothing = nothing_apart(task)
    choices = _choices(task, nothing)
    placed = pieces, filler, splits = _place(task, nothing, choices[0])
    few = len(pieces) <= FEW_MICRO_STEPS * task.world_size
    if few and task.options.tail == "split":  # how classes come out whole is a matter of luck
        rivals = [placed] + [_place(task, nothing, classes) for classes in choices[1:RIVALS]]
        if task.options.mixing == "free" and (leftovers := set_apart(task)).micro_batches:
            rivals += [_place(task, leftovers, classes) for classes in _choices(task, leftovers)[:RIVALS]]
        pieces, filler, splits = min(rivals, key=lambda placed: _time(task, placed[0]))
    samples = np.where(filler, 0, pieces.size)
    amounts = np.stack([samples * task.corpus.tokens[pieces.bucket], samples], axis=1)
    micro_steps = order_micro_steps(
        amounts.reshape(-1, task.world_size, 2).sum(axis=1).astype(np.float64),
        pieces.home[:: task.world_size],
        task.accumulation,
        task.options.lookahead,
        task.bits,
    )
    ranks = np.argsort(task.bits.random_raw(len(pieces)).reshape(-1, task.world_size), axis=1)
    order = (micro_steps[:, None] * task.world_size + ranks).reshape(-1)
    return Arrangement(pieces.take(order), filler[order], splits)


def _choices(task: Task, leftovers: Leftovers) -> list[Classes]:
    """Classes for the samples that are not set apart.

    Of every bucket that nothing is set apart of, one micro-batch is not full, half empty on average: as much
    is left for them.
    """
    task = replace(task, counts=task.counts - leftovers.samples)
    used = np.flatnonzero(task.counts)
    beside = leftovers.micro_batches + (leftovers.size[used] == 0).sum() / 2
    return choose_classes(task, used, NEARLY_WHOLE, task.slots, beside)


def _place(task: Task, leftovers: Leftovers, classes: Classes) -> tuple[Pieces, np.ndarray, int]:
    """Micro-batches of these classes, R in a row a micro-step; which are fillers; how many were split off."""
    used = np.flatnonzero(task.counts - leftovers.samples)
    pieces, targets = cut_by_class(task, used, leftovers, classes)
    if not leftovers.micro_batches:
        pieces = fill_classes(task, pieces, targets)
    pieces, filler, splits = complete(task, pieces, POOL)
    pieces, filler = level_pool(task, pieces, filler)
    if task.options.mixing == "corpus":
        rare = np.zeros(task.corpus.buckets, dtype=bool)
        rare[used[rarer_kinds(task, used)]] = True
        pieces = share_with_pool(task, pieces, rare[pieces.bucket], filler, targets)
    order = deal(task, pieces, filler)
    return pieces.take(order), filler[order], splits


def _time(task: Task, pieces: Pieces) -> float:
    """What an epoch of these micro-steps takes."""
    return float(task.costs(pieces).reshape(-1, task.world_size).max(axis=1).sum())


def cut_by_class(
    task: Task, used: IntArray, leftovers: Leftovers, classes: Classes
) -> tuple[Pieces, FloatArray]:
    """Cut every bucket by its classes, numbered from 1 by ascending target, and leftovers by their number.

    Args:
        used: buckets that are not wholly set apart.
    Returns:
        the micro-batches, and the targets.
    """
    classes, numbers, rest, home_of_rest = _divide(task, used, leftovers, classes)
    bucket, home = np.nonzero(numbers)
    left, home_of_left = leftovers.samples.copy(), np.full(len(task.counts), POOL)
    left[used], home_of_left[used] = rest, home_of_rest
    pooled = np.where(home_of_left == POOL, left, 0)
    size_of_left = np.where(pooled, leftover_sizes(task, pooled, leftovers.micro_batches), left)
    some = np.flatnonzero(left)
    pieces = task.cut(
        np.concatenate([used[bucket], some]),
        np.concatenate([(numbers * classes.size)[bucket, home], left[some]]),
        np.concatenate([classes.size[bucket, home], size_of_left[some]]),
        np.concatenate([1 + home, home_of_left[some]]),
    )
    return pieces, classes.target


def _divide(
    task: Task, used: IntArray, leftovers: Leftovers, classes: Classes
) -> tuple[Classes, IntArray, IntArray, IntArray]:
    """Divide buckets among classes: first what nothing is set apart of, then short samples as the rest needs.

    Returns:
        the classes; numbers of micro-batches [buckets, classes]; samples left of each bucket; and their home.
    """
    apart, least_size = leftovers.samples[used], leftovers.size[used]
    counts, short = task.counts[used] - apart, least_size > 0
    roomy = leftovers.micro_batches > 0
    classes, aim = aim_at_whole_micro_steps(classes, counts, task.world_size, roomy=roomy)
    numbers, rest, lacking = divide_samples(classes, counts, aim, short)
    home, long = np.full(len(used), POOL), np.flatnonzero((rest > 0) & ~short)
    costs = task.cost.cost(rest[long], task.corpus.tokens[used[long]])
    homes, lacking = homes_of_rests(classes.target, lacking, costs, classes.riders[long])
    home[long] = 1 + homes
    numbers, rest = fill_from_short(
        classes,
        numbers,
        rest + apart,
        lacking,
        missing=round(aim.sum() / task.world_size) * task.world_size - numbers.sum() - len(long),
        least_size=least_size,
        places=leftovers.micro_batches - np.delete(leftovers.needed, used).sum(),
    )
    return classes, numbers, rest, home


def deal(task: Task, pieces: Pieces, filler: np.ndarray) -> IntArray:
    """Order of the micro-batches in which R in a row are a micro-step.

    Under mixing "free" that is by cost, which makes the sum of the slowest least. Under "corpus" it is class
    by class, kinds and shapes spread evenly over each. Only of the pool, where costs differ more, the
    commonest kind is ordered by cost.
    """
    costs = np.where(filler, 0.0, task.costs(pieces))
    if task.options.mixing == "free":
        return np.argsort(costs, kind="stable")
    keys = _even_keys(task, pieces)
    kind = task.kind_codes[pieces.bucket]
    pool = np.flatnonzero((pieces.home == POOL) & (kind == np.argmax(np.bincount(kind, weights=costs))))
    keys[pool[np.argsort(costs[pool], kind="stable")]] = np.sort(keys[pool])
    return np.lexsort((keys, pieces.home))


def _even_keys(task: Task, pieces: Pieces) -> FloatArray:
    """Keys by which sorting spreads kinds evenly over each class, and shapes evenly over each kind."""
    shape_keys = spread_evenly(pieces.home * task.corpus.buckets + pieces.bucket, task.bits)
    by_shape = np.argsort(shape_keys, kind="stable")
    keys = np.empty(len(pieces))
    group = pieces.home * (task.kind_codes.max() + 1) + task.kind_codes[pieces.bucket]
    keys[by_shape] = spread_evenly(group[by_shape], task.bits)
    return keys
