"""Micro-steps for what is left over, at the least that a micro-batch can cost.

However small, a micro-batch takes as long as the cost model's floor says. A bucket of few short samples, and
what fills no micro-batch of another, would make ranks wait in any class. So samples are set apart for
micro-steps of their own: such buckets whole, and of the larger buckets of short samples as many as make the
micro-steps complete.
"""

from dataclasses import dataclass

import numpy as np

from al_deepspeed.scheduling.arrangement import Task
from al_deepspeed.scheduling.baselines import dual_constraint_sizes
from al_deepspeed.scheduling.filling import level
from al_deepspeed.scheduling.shapes import IntArray


@dataclass(frozen=True)
class Leftovers:
    """Micro-batches of the least cost.

    samples: set apart of each bucket, int64 [buckets].
    size: B of a bucket at that cost, int64 [buckets]; 0 for long samples, which cost more.
    micro_batches: how many are to be made of what is set apart, and of what is left of the same buckets.
    """

    samples: IntArray
    size: IntArray
    micro_batches: int

    @property
    def needed(self) -> IntArray:
        """Micro-batches of each bucket that is set apart."""
        return -(-self.samples // np.maximum(1, self.size))


def nothing_apart(task: Task) -> Leftovers:
    return Leftovers(np.zeros_like(task.counts), np.zeros_like(task.counts), 0)


def set_apart(task: Task) -> Leftovers:
    """Whole micro-steps at the least cost, of the smallest buckets; none if no bucket is that small."""
    counts, tokens = task.counts, task.corpus.tokens
    least = float(task.cost.cost(1, tokens[counts > 0].min()))
    size = np.minimum(dual_constraint_sizes(task), task.cost.largest_batch(tokens, least))
    needed = -(-counts // np.maximum(1, size)) * (size > 0)
    small = (needed == 1).sum()
    places = -(-small // task.world_size) * task.world_size
    ascending = np.argsort(needed, kind="stable")
    before = np.cumsum(needed[ascending]) - needed[ascending]
    taken = np.zeros_like(needed)
    taken[ascending] = np.clip(places - before, 0, needed[ascending])
    if taken.sum() < places or (taken == needed)[counts > 0].all() or task.options.max_variants is not None:
        return nothing_apart(task)
    return Leftovers(np.minimum(counts, taken * size), size, int(places))


def leftover_sizes(task: Task, samples: IntArray, micro_batches: int) -> IntArray:
    """B a bucket that makes so many micro-batches of these samples, at the lowest common cost."""
    used = np.flatnonzero(samples)
    sizes = np.zeros_like(samples)
    if len(used):
        most = np.minimum(samples, dual_constraint_sizes(task))[used]
        places = min(micro_batches, int(samples.sum()))
        sizes[used] = -(-samples[used] // level(task, task.corpus.tokens[used], samples[used], most, places))
    return sizes
