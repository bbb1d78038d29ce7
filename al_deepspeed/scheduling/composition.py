"""What keeps steps like the corpus: the rarer kinds, images among videos, are in every class and most steps.

The kind that takes most of the time follows its costs. The others are few micro-batches and cheap to
spread, but count for as much in the loss. So each class holds them in the corpus's proportion to the other
samples, and their batches are cut finer where more steps would otherwise lack the kind than if chance dealt
the paper's.
"""

from dataclasses import replace

import numpy as np

from al_deepspeed.scheduling.arrangement import Task
from al_deepspeed.scheduling.baselines import dual_constraint_sizes
from al_deepspeed.scheduling.classes import Classes, best_classes
from al_deepspeed.scheduling.constraints import power_of_two_sizes
from al_deepspeed.scheduling.shapes import IntArray

MIXING_PRICE = {"corpus": 0.004, "free": 0.002}  # of the epoch's time
MARGIN = 1.05  # chance would sometimes do better than its mean
ROUNDS = 5


def choose_classes(
    task: Task, used: IntArray, least: float = 2.0, whole: int = 1, beside: float = 0.0
) -> list[Classes]:
    """Classes for the buckets in use, the best choice first.

    Args:
        least: micro-steps that a class takes, or more.
        whole: all micro-batches should be a multiple of this, `beside` of them in no class.
    """
    largest = dual_constraint_sizes(task)[used]
    classes = _best_classes(task, used, largest, least, whole, beside)
    for _ in range(ROUNDS if task.options.mixing == "corpus" else 0):
        finer = cover_steps(task, used, largest, classes[0])
        if (finer == largest).all():
            break
        largest = finer
        classes = _best_classes(task, used, largest, least, whole, beside)
    return classes


def _best_classes(
    task: Task, used: IntArray, largest: IntArray, least: float, whole: int, beside: float
) -> list[Classes]:
    tokens, counts = task.corpus.tokens[used], task.counts[used]
    micro_steps = (counts / np.minimum(counts, largest)).sum() / task.world_size
    choices = best_classes(
        tokens,
        counts,
        largest,
        task.cost,
        windows=min(task.options.lookahead, max(1.0, micro_steps / least)),
        price=MIXING_PRICE[task.options.mixing],
        riders=rarer_kinds(task, used) & (task.options.mixing == "corpus"),
        whole=whole,
        beside=beside,
    )
    if task.options.max_variants is None:
        return choices
    return [replace(classes, size=power_of_two_sizes(classes.size)) for classes in choices]


def rarer_kinds(task: Task, used: IntArray) -> np.ndarray:
    """Which buckets are of another kind than the one that takes most of the time."""
    kind = task.kind_codes[used]
    work = task.counts[used] * task.cost.sample_cost(task.corpus.tokens[used])
    return kind != np.argmax(np.bincount(kind, weights=work))


def cover_steps(task: Task, used: IntArray, largest: IntArray, classes: Classes) -> IntArray:
    """Batch sizes cut down until each rarer kind is in as many steps as if chance dealt the paper's
    batches.
    """
    counts, kind = task.counts[used], task.kind_codes[used]
    ours = (counts[:, None] * classes.share / np.maximum(1, classes.size)).sum(axis=1)
    paper = counts / dual_constraint_sizes(task)[used]
    finer = largest.copy()
    for code in np.unique(kind[rarer_kinds(task, used)]).tolist():
        of_kind = kind == code
        chance = 1 - (1 - paper[of_kind].sum() / paper.sum()) ** task.slots
        needed = MARGIN * chance * ours.sum() / task.slots
        scale = min(1.0, ours[of_kind].sum() / needed)
        finer[of_kind] = np.maximum(1, np.floor(largest[of_kind] * scale))
    return finer
