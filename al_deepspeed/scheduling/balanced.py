"""Strategy `balanced`: the ranks of a micro-step cost the same, and steps still resemble the corpus.

1. Choose classes of micro-steps, each with a target cost, and divide every shape among them (classes.py).
2. Cut: in a class with target T a micro-batch has the largest B with cost(B, S) <= T.
3. Deal: inside a class each kind and each shape is spread evenly over the micro-steps, R micro-batches at a
   time. What does not fill a micro-step of its class goes to a pool, and so do the halves that complete the
   last step; the pool is ordered by cost and dealt R at a time.
4. Join G micro-steps to a step so that steps hold nearly equal numbers of tokens (steps.py).

`mixing` says what may be paid for resemblance: "corpus" a little of the epoch's time, "free" nothing.
"""

import numpy as np

from al_deepspeed.scheduling.arrangement import Arrangement, Task, complete
from al_deepspeed.scheduling.baselines import dual_constraint_sizes
from al_deepspeed.scheduling.classes import Classes, best_classes
from al_deepspeed.scheduling.constraints import power_of_two_sizes
from al_deepspeed.scheduling.pieces import Pieces, places_within, spread_evenly
from al_deepspeed.scheduling.shapes import FloatArray, IntArray
from al_deepspeed.scheduling.steps import order_micro_steps

MIXING_PRICE = {"corpus": 0.012, "free": 0.0}
POOL = 0  # the class of what fits no other


def balanced(task: Task) -> Arrangement:
    """Dual-constraint micro-batches whose sizes are chosen so that different shapes meet a common cost."""
    pieces, filler, splits = complete(task, cut_by_class(task), POOL)
    order = deal(task, pieces, filler)
    pieces, filler = pieces.take(order), filler[order]
    grid = (-1, task.world_size)
    tokens = np.where(filler, 0, pieces.size * task.corpus.tokens[pieces.bucket]).reshape(grid)
    micro_steps = order_micro_steps(
        tokens.sum(axis=1),
        pieces.home.reshape(grid).min(axis=1),
        task.accumulation,
        task.options.lookahead,
        task.bits,
    )
    ranks = np.argsort(task.bits.random_raw(len(pieces)).reshape(grid), axis=1)
    order = (micro_steps[:, None] * task.world_size + ranks).reshape(-1)
    return Arrangement(pieces.take(order), filler[order], splits)


def cut_by_class(task: Task) -> Pieces:
    """Cut every bucket by its classes, which are numbered from 1 by ascending target."""
    used = np.flatnonzero(task.counts)
    tokens, counts = task.corpus.tokens[used], task.counts[used]
    classes = _choose_classes(task, tokens, counts, dual_constraint_sizes(task)[used])
    sizes = classes.size if task.options.max_variants is None else power_of_two_sizes(classes.size)
    numbers, rest = divide_samples(counts, sizes, classes.share)
    bucket, home = np.nonzero(numbers)
    left = np.flatnonzero(rest)
    home_of_rest = np.searchsorted(classes.target, task.cost.cost(rest, tokens)[left] * (1 - 1e-9))
    return task.cut(
        used[np.concatenate([bucket, left])],
        np.concatenate([(numbers * sizes)[bucket, home], rest[left]]),
        np.concatenate([sizes[bucket, home], rest[left]]),
        1 + np.concatenate([home, home_of_rest]),
    )


def _choose_classes(task: Task, tokens: IntArray, counts: IntArray, largest: IntArray) -> Classes:
    micro_steps = (counts / np.minimum(counts, largest)).sum() / task.world_size
    windows = min(task.options.lookahead, max(1.0, micro_steps / 2))
    price = MIXING_PRICE[task.options.mixing]
    return best_classes(tokens, counts, largest, task.cost, windows=windows, price=price)


def divide_samples(counts: IntArray, sizes: IntArray, share: FloatArray) -> tuple[IntArray, IntArray]:
    """Whole micro-batches a bucket and class that come nearest to the shares.

    Returns:
        numbers of micro-batches [buckets, classes], and the samples of each bucket that fill none.
    """
    wanted = np.where(sizes > 0, counts[:, None] * share / np.maximum(sizes, 1), 0.0)
    numbers = np.floor(wanted).astype(np.int64)
    rest = counts - (numbers * sizes).sum(axis=1)
    rows = np.arange(len(counts))
    for column in np.argsort(numbers - wanted, axis=1, kind="stable").T:  # the largest fraction first
        size = sizes[rows, column]
        one_more = (wanted[rows, column] > 0) & (size <= rest)
        numbers[rows, column] += one_more
        rest = rest - np.where(one_more, size, 0)
    return numbers, rest


def deal(task: Task, pieces: Pieces, filler: np.ndarray) -> IntArray:
    """Order of the micro-batches in which R in a row are a micro-step: class by class, then the pool by
    cost.
    """
    ranks = task.world_size
    order = np.argsort(_even_keys(task, pieces), kind="stable")
    order = order[np.argsort(pieces.home[order], kind="stable")]
    home = pieces.home[order]
    whole = np.bincount(home) // ranks * ranks
    fills = (home != POOL) & (places_within(home) < whole[home])
    pool = order[~fills]
    by_cost = np.argsort(np.where(filler[pool], 0.0, task.costs(pieces.take(pool))), kind="stable")
    return np.concatenate([order[fills], pool[by_cost]])


def _even_keys(task: Task, pieces: Pieces) -> FloatArray:
    """Keys by which sorting spreads kinds evenly over each class, and shapes evenly over each kind."""
    _, kind = np.unique(np.array(task.corpus.kinds), return_inverse=True)
    shape_keys = spread_evenly(pieces.home * task.corpus.buckets + pieces.bucket, task.bits)
    by_shape = np.argsort(shape_keys, kind="stable")
    keys = np.empty(len(pieces))
    group = pieces.home * (kind.max() + 1) + kind[pieces.bucket]
    keys[by_shape] = spread_evenly(group[by_shape], task.bits)
    return keys
