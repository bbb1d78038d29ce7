"""The two rules without balancing: micro-batches are dealt to ranks as chance has it.

They are what `balanced` is measured against, and useful on one rank, where there is nothing to balance.
"""

import numpy as np

from al_deepspeed.scheduling.arrangement import Arrangement, Task, complete
from al_deepspeed.scheduling.constraints import batch_sizes, memory_batch_sizes
from al_deepspeed.scheduling.pieces import shuffled
from al_deepspeed.scheduling.shapes import IntArray


def equal_token_sizes(task: Task) -> IntArray:
    """B from memory alone: every micro-batch holds about max_tokens, whatever it costs."""
    return task.largest_sizes(memory_batch_sizes(task.corpus.tokens, task.limits))


def dual_constraint_sizes(task: Task) -> IntArray:
    """B from memory and cost: the paper's rule."""
    return task.largest_sizes(batch_sizes(task.corpus.tokens, task.cost, task.limits))


def equal_token(task: Task) -> Arrangement:
    return _dealt_at_random(task, equal_token_sizes(task))


def dual_constraint(task: Task) -> Arrangement:
    return _dealt_at_random(task, dual_constraint_sizes(task))


def _dealt_at_random(task: Task, sizes: IntArray) -> Arrangement:
    """Cut, complete, shuffle. Fillers stay behind, so that every step has something to learn from."""
    used = np.flatnonzero(task.counts)
    pieces = task.cut(used, task.counts[used], sizes[used], np.zeros(len(used), dtype=np.int64))
    pieces, filler, splits = complete(task, pieces)
    real = int((~filler).sum())
    order = np.concatenate([shuffled(real, task.bits), np.arange(real, len(pieces))])
    return Arrangement(pieces.take(order), filler, splits)
