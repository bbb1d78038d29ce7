"""Balance without a manifest: a window of micro-steps from what the ranks have buffered.

Samples stay on the rank that read them; only counts of shapes travel. All ranks compute the same window from
the counts of all: a target cost for each micro-step (classes.py, from every shape seen so far), and for each
rank the shape of its own buffer whose turn it is and that fills the target. A shape whose batch is not full
yet waits for more of it; turns missed are caught up. What a rank does not need it keeps: ranks read as much
as they use, so one that meets longer samples reads fewer.
"""

from dataclasses import dataclass

import numpy as np

from al_deepspeed.scheduling.arrangement import Task
from al_deepspeed.scheduling.classes import Classes
from al_deepspeed.scheduling.composition import choose_classes
from al_deepspeed.scheduling.pieces import fractions, spread_evenly
from al_deepspeed.scheduling.shapes import FloatArray, IntArray
from al_deepspeed.scheduling.steps import order_micro_steps

MOST_CREDIT = 2.0  # turns that a waiting shape can save up


@dataclass(frozen=True)
class Window:
    """Grids [micro_steps, R]: bucket, batch size, and whether a rank had nothing left and repeats one."""

    bucket: IntArray
    size: IntArray
    filler: np.ndarray


def plan_window(
    task: Task, buffered: IntArray, micro_steps: int, overdue: np.ndarray, idle: IntArray
) -> Window:
    """One window from the buffers.

    Args:
        task: its counts are the samples of each bucket that all ranks have seen so far.
        buffered: samples at hand, int [R, buckets].
        micro_steps: length of the window at most, a multiple of G.
        overdue: shapes that must not wait for a full batch any longer, bool [R, buckets].
        idle: the bucket that each rank repeats a sample of when it has nothing left, int [R].
    """
    used = np.flatnonzero(task.counts)
    classes = choose_classes(task, used)[0]
    turns = _turns(task, classes, task.counts[used], micro_steps)
    left, overdue = buffered[:, used].copy(), overdue[:, used]
    share = _shares(classes, left)
    credit = fractions(share.size, task.bits).reshape(share.shape)
    tokens, ranks = task.corpus.tokens[used], np.arange(task.world_size)
    bucket = np.zeros((micro_steps, task.world_size), dtype=np.int64)
    size, last = np.zeros_like(bucket), np.searchsorted(used, idle)
    for micro_step, turn in enumerate(turns.tolist()):
        if not (classes.size[:, turn] * left).any():
            turn = len(classes.target) - 1  # the dearest class has room for everything
        credit[turn] = np.minimum(MOST_CREDIT, credit[turn] + share[turn])
        batch = np.minimum(classes.size[:, turn], left)
        ready = (batch > 0) & ((batch == classes.size[:, turn]) | overdue)
        partial = np.where(batch > 0, task.cost.cost(batch, tokens), 0.0)
        preference = np.where(ready, credit[turn] + 1, -1.0)
        preference = np.where(ready.any(axis=1, keepdims=True), preference, partial)
        chosen = np.argmax(preference, axis=1)
        run = batch[ranks, chosen]
        chosen = np.where(run > 0, chosen, last)
        credit[turn, ranks, chosen] -= run > 0
        left[ranks, chosen] -= run
        bucket[micro_step], size[micro_step], last = chosen, run, chosen
    filler = size == 0
    order = _order(task, tokens[bucket] * size, size, turns)
    steps = filler[order].reshape(-1, task.accumulation * task.world_size)
    order = order[np.repeat(~steps.all(axis=1), task.accumulation)]  # once streams end, some hold nothing
    return Window(used[bucket][order], np.maximum(size, 1)[order], filler[order])


def _turns(task: Task, classes: Classes, seen: IntArray, micro_steps: int) -> IntArray:
    """The class of each micro-step, in proportion to the micro-batches of each."""
    micro_batches = (seen[:, None] * classes.share / np.maximum(1, classes.size)).sum(axis=0)
    middles = (np.arange(micro_steps) + 0.5) / micro_steps
    turns = np.searchsorted(np.cumsum(micro_batches) / micro_batches.sum(), middles)
    turns = np.minimum(turns, len(micro_batches) - 1)
    return turns[np.argsort(spread_evenly(turns, task.bits), kind="stable")]


def _shares(classes: Classes, left: IntArray) -> FloatArray:
    """How often it is whose turn on each rank: [classes, R, buckets]."""
    wanted = left[None] * (classes.share / np.maximum(1, classes.size)).T[:, None]
    return wanted / np.maximum(1e-12, wanted.sum(axis=2, keepdims=True))


def _order(task: Task, tokens: IntArray, samples: IntArray, turns: IntArray) -> IntArray:
    amounts = np.stack([tokens.sum(axis=1), samples.sum(axis=1)], axis=1).astype(np.float64)
    return order_micro_steps(amounts, turns, task.accumulation, task.options.lookahead, task.bits)
