"""`group_by_shape`: all ranks of a micro-step run one shape, for models that need it.

A bucket's samples are cut into micro-steps of R * B, and each of these is shared out evenly: the ranks
differ by one sample at most. Too few samples for the last micro-step share it with the one before. Fillers
complete a micro-step only where a bucket has fewer samples than ranks, or every batch is of one sample
already.
"""

import numpy as np

from al_deepspeed.errors import PlanError, TooFewForAStep
from al_deepspeed.scheduling.arrangement import Arrangement, Task, cheapest_sample
from al_deepspeed.scheduling.pieces import Pieces, concatenate, cut, halve, shuffled
from al_deepspeed.scheduling.shapes import IntArray
from al_deepspeed.scheduling.steps import order_micro_steps


def group_by_shape(task: Task, sizes: IntArray) -> Arrangement:
    """Arrange micro-steps of one shape each; `sizes` is the largest B a bucket."""
    if task.options.max_variants is not None:
        raise PlanError(
            "max_variants and group_by_shape are both given: an even share needs B and B - 1. Give one."
        )
    micro_steps, empty, splits = _complete(task, _cut_micro_steps(task, sizes))
    pieces, filler = _share_out(micro_steps, empty, task.world_size)
    amounts = np.stack([micro_steps.size * task.corpus.tokens[micro_steps.bucket], micro_steps.size], axis=1)
    amounts[empty] = 0
    order = order_micro_steps(
        amounts.astype(np.float64), micro_steps.bucket, task.accumulation, task.options.lookahead, task.bits
    )
    places = (order[:, None] * task.world_size + np.arange(task.world_size)).reshape(-1)
    return Arrangement(pieces.take(places), filler[places], splits)


def _cut_micro_steps(task: Task, sizes: IntArray) -> Pieces:
    """Micro-steps as pieces: `size` counts the samples of all ranks."""
    ranks = task.world_size
    used = np.flatnonzero(task.counts)
    count, size = task.counts[used], sizes[used]
    kept = count // (size * ranks) * size * ranks if task.options.tail == "drop" else count
    used, count, size, kept = (column[kept > 0] for column in (used, count, size, kept))
    pieces = cut(used, task.starts[used], kept, size * ranks, np.zeros(len(used), dtype=np.int64))
    last = np.flatnonzero(np.diff(pieces.bucket, append=-1))
    short = last[(pieces.size[last] < ranks) & (np.diff(last, prepend=-1) > 1)]
    short = short[pieces.size[short - 1] + pieces.size[short] >= 2 * ranks]
    both = pieces.size[short - 1] + pieces.size[short]
    pieces.size[short - 1], pieces.size[short] = both - both // 2, both // 2
    pieces.first[short] = pieces.first[short - 1] + pieces.size[short - 1]
    return pieces


def _complete(task: Task, micro_steps: Pieces) -> tuple[Pieces, np.ndarray, int]:
    """A multiple of G micro-steps, which of them are empty, and how many were made by halving."""
    if task.options.tail == "drop":
        kept = len(micro_steps) // task.accumulation * task.accumulation
        if kept == 0:
            raise TooFewForAStep(
                f"{len(micro_steps)} full micro-steps of one shape do not fill a step of "
                f"{task.accumulation}, and "
                '"tail" is "drop". Use "split", fewer ranks, or more data.'
            )
        chosen = np.sort(shuffled(len(micro_steps), task.bits)[:kept])
        return micro_steps.take(chosen), np.zeros(kept, dtype=bool), 0
    missing = -len(micro_steps) % task.accumulation
    splits = 0
    while splits < missing and micro_steps.size.max() >= 2 * task.world_size:
        micro_steps = halve(micro_steps, np.array([np.argmax(micro_steps.size)]))
        splits += 1
    empty = np.arange(len(micro_steps) + missing - splits) >= len(micro_steps)
    nothing = cheapest_sample(task, missing - splits, 0)
    return concatenate([micro_steps, nothing]), empty, splits * task.world_size


def _share_out(micro_steps: Pieces, empty: np.ndarray, ranks: int) -> tuple[Pieces, np.ndarray]:
    """R micro-batches for each micro-step, and which of them are fillers."""
    rank = np.arange(ranks)
    whole, over = micro_steps.size[:, None] // ranks, micro_steps.size[:, None] % ranks
    size = whole + (rank < over)
    filler = (size == 0) | empty[:, None]
    first = micro_steps.first[:, None] + np.where(filler, 0, rank * whole + np.minimum(rank, over))
    columns = (
        np.repeat(micro_steps.bucket, ranks),
        first.reshape(-1),
        np.maximum(1, size).reshape(-1),
        np.repeat(micro_steps.home, ranks),
    )
    return Pieces(*columns), filler.reshape(-1)
