"""One epoch, planned: which samples each rank runs in each micro-step, and with which weight.

A plan is a pure function of (corpus, cost, limits, world size, accumulation, seed, epoch, options), so every
rank computes the same one and nobody has to talk. All strategies share one path:
    population -> shuffle within buckets -> cut and arrange, whole steps -> grid [micro_steps, R] -> weights
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from al_deepspeed.errors import PlanError, TooFewForAStep
from al_deepspeed.scheduling.arrangement import Arrangement, Task
from al_deepspeed.scheduling.balanced import balanced
from al_deepspeed.scheduling.baselines import (
    dual_constraint,
    dual_constraint_sizes,
    equal_token,
    equal_token_sizes,
)
from al_deepspeed.scheduling.budget import Deal, best_max_cost
from al_deepspeed.scheduling.constraints import Limits, low_budget, oversize_buckets
from al_deepspeed.scheduling.cost import CostModel
from al_deepspeed.scheduling.curriculum import STRETCHES, Schedule, Stretches, admitted
from al_deepspeed.scheduling.grouped import group_by_shape
from al_deepspeed.scheduling.layout import MicroBatch, Plan
from al_deepspeed.scheduling.options import PlanOptions
from al_deepspeed.scheduling.pieces import concatenate, random_stream, shuffle_within_buckets, shuffled
from al_deepspeed.scheduling.population import draw
from al_deepspeed.scheduling.shapes import Corpus, IntArray
from al_deepspeed.scheduling.weights import loss_weights

__all__ = ["STRATEGIES", "MicroBatch", "Plan", "make_plan"]

STRATEGIES = {"equal_token": equal_token, "dual_constraint": dual_constraint, "balanced": balanced}


def make_plan(
    corpus: Corpus,
    cost: CostModel,
    limits: Limits,
    *,
    world_size: int,
    accumulation: int = 1,
    seed: int = 0,
    epoch: int = 0,
    part: int = 0,
    population: IntArray | None = None,
    curriculum: Mapping[str, Schedule] | None = None,
    first_step: int = 0,
    **options,
) -> Plan:
    """Plan an epoch.

    Args:
        corpus: the samples by bucket.
        cost: predicts what a micro-batch takes.
        limits: the budgets of a micro-batch; a max_cost of None is chosen by `best_max_cost`.
        world_size: R, the data-parallel size. accumulation: G, micro-steps a step.
        seed, epoch, part: what chance depends on. `part` counts changes of the world within the epoch.
        population: sample ids to plan, repeats allowed; left out, what `mixture` makes of the corpus.
        curriculum: a schedule by metric; samples above the difficulty of a step are not in it.
        first_step: global step at which the plan begins, counted from 0; only a curriculum asks.
        options: fields of `PlanOptions`.
    """
    choice = PlanOptions(**options)
    if world_size < 1 or accumulation < 1:
        raise PlanError(f"world size is {world_size}, accumulation {accumulation}; both must be at least 1.")
    if corpus.samples == 0:
        raise PlanError("the corpus holds no sample. At least one is needed; check the manifest.")
    given = limits.max_cost is not None
    if not given:
        deal = Deal(world_size=world_size, accumulation=accumulation, step_cost=limits.step_cost)
        limits = replace(limits, max_cost=best_max_cost(corpus, cost, limits.max_tokens, deal)[0])
    if population is None and choice.mixture is not None:
        population = draw(corpus, choice.mixture, seed, epoch)
    population, skipped, warnings = _without_oversize(corpus, population, limits, choice)
    if choice.strategy == "balanced" and choice.mixing == "free" and len(set(corpus.kinds)) > 1:
        warnings.append('mixing is "free": steps do not keep the corpus\'s mix of kinds; see kind_weight.')
    if given and choice.strategy != "equal_token" and (warning := low_budget(corpus, cost, limits)):
        warnings.append(warning)
    bits = random_stream(seed, epoch, part)
    task = Task(corpus, corpus.counts(), cost, limits, world_size, accumulation, choice, bits)
    if curriculum:
        ids = np.arange(corpus.samples) if population is None else population
        order, arrangement, waiting = _arrange_stretches(task, ids, curriculum, first_step, warnings)
    else:
        order, arrangement = _arrange(task, population)
        waiting = 0
    if choice.tail == "split" and len(order) < task.slots:
        warnings.append(
            f"{len(order)} samples are fewer than the {task.slots} micro-batches of one step "
            f"(world size {world_size} x accumulation {accumulation}); fillers of weight 0 complete it."
        )
    return _lay_out(task, order, arrangement, skipped, waiting, tuple(warnings))


def _arrange(task: Task, population: IntArray | None) -> tuple[IntArray, Arrangement]:
    """Shuffle, cut and arrange these samples, or all. Returns their order and the micro-batches."""
    bucket = task.corpus.bucket if population is None else task.corpus.bucket[population]
    order = shuffle_within_buckets(bucket, task.bits)
    task = replace(task, counts=np.bincount(bucket, minlength=task.corpus.buckets))
    if task.options.group_by_shape:
        memory_only = task.options.strategy == "equal_token"
        sizes = equal_token_sizes(task) if memory_only else dual_constraint_sizes(task)
        arrangement = group_by_shape(task, sizes)
    else:
        arrangement = STRATEGIES[task.options.strategy](task)
    order = order if population is None else population[order]
    return order.astype(np.int32 if task.corpus.samples < 2**31 else np.int64), arrangement


def _arrange_stretches(
    task: Task, pool: IntArray, curriculum: Mapping[str, Schedule], step: int, warnings: list[str]
) -> tuple[IntArray, Arrangement, int]:
    """Arrange stretch after stretch, each from the samples that it admits and no stretch before it used.

    Tail "drop" is about the epoch's end: before, what fills no step joins the next stretch. Where it is all
    that is admitted, it is split, for without steps the difficulty would not move on.

    Returns:
        the order of all samples, those that wait at its end; the micro-batches; how many wait.
    """
    least = max(1, task.options.lookahead // task.accumulation, _steps(task, pool) // STRETCHES)
    stretches = Stretches(task.corpus, curriculum, least)
    splitting = replace(task, options=replace(task.options, tail="split"))
    orders, arrangements, placed, dropped = [], [], 0, pool[:0]
    while len(pool):
        length, limits = stretches.next(step, _steps(task, pool) + 1)
        allowed = admitted(stretches.columns, pool, limits)
        candidates, pool = pool[allowed], pool[~allowed]
        if len(candidates) == 0:
            break
        try:
            order, arrangement, left = _arrange_steps(task, candidates, length)
        except TooFewForAStep:
            if len(pool):
                order, arrangement, left = _arrange_steps(splitting, candidates, length)
            elif arrangements:
                dropped = candidates
                break
            else:
                raise
        pool = np.concatenate([pool, left])
        pieces = replace(arrangement.pieces, first=arrangement.pieces.first + placed)
        arrangements.append(replace(arrangement, pieces=pieces))
        orders.append(order)
        placed += len(order)
        step += len(arrangement.pieces) // task.slots
    if not arrangements:
        raise PlanError(
            f"the curriculum admits too few samples at global step {step + 1}: its difficulties are "
            f"{dict(zip(curriculum, stretches.limits(step).tolist(), strict=True))}. Raise min_difficulty."
        )
    if len(pool):
        warnings.append(
            f"the curriculum holds {len(pool)} samples back; the epoch ends early at global step {step}, and "
            "they are in the next epoch."
        )
    whole = Arrangement(
        concatenate([arrangement.pieces for arrangement in arrangements]),
        np.concatenate([arrangement.filler for arrangement in arrangements]),
        sum(arrangement.splits for arrangement in arrangements),
    )
    return np.concatenate([*orders, dropped, pool]).astype(orders[0].dtype), whole, len(pool)


def _arrange_steps(task: Task, ids: IntArray, steps: int) -> tuple[IntArray, Arrangement, IntArray]:
    """At most so many steps of these samples, and the samples not used, drawing no more than needed."""
    share = min(1.0, 1.25 * steps / max(1, _steps(task, ids)))
    while True:
        ids = ids[shuffled(len(ids), task.bits)]
        drawn = len(ids) if share >= 0.8 else int(np.ceil(share * len(ids)))
        try:
            order, arrangement = _arrange(task, np.sort(ids[:drawn]))
            if len(arrangement.pieces) >= steps * task.slots or drawn == len(ids):
                break
        except TooFewForAStep:
            if drawn == len(ids):
                raise
        share *= 2
    arrangement = _first_steps(task, arrangement, steps)
    pieces, filler = arrangement.pieces, arrangement.filler
    used = np.zeros(len(order) + 1, dtype=np.int32)
    used[pieces.first[~filler]] += 1
    used[(pieces.first + pieces.size)[~filler]] -= 1
    unused = np.cumsum(used[:-1]) == 0
    left = np.concatenate([order[unused], ids[drawn:]])
    new_place = np.cumsum(~unused) - 1
    pieces = replace(pieces, first=new_place[pieces.first])
    return order[~unused], replace(arrangement, pieces=pieces), left


def _first_steps(task: Task, arrangement: Arrangement, steps: int) -> Arrangement:
    """At most the first so many steps.

    What completes an arrangement are fillers for less than a step. If a step or more is cut off, real
    micro-batches of that take their places. With `group_by_shape` these are whole micro-steps; the fillers
    that a shape with fewer samples than ranks needs stay beside them.
    """
    if len(arrangement.pieces) <= steps * task.slots:
        return arrangement
    together = task.world_size if task.options.group_by_shape else 1
    empty = arrangement.filler.reshape(-1, together).all(axis=1)
    kept = np.arange(steps * task.slots // together)
    vacant, cut_off = np.flatnonzero(empty[: len(kept)]), np.flatnonzero(~empty[len(kept) :])
    kept[vacant] = len(kept) + cut_off[: len(vacant)]
    places = (kept[:, None] * together + np.arange(together)).reshape(-1)
    return replace(arrangement, pieces=arrangement.pieces.take(places), filler=arrangement.filler[places])


def _steps(task: Task, ids: IntArray) -> int:
    """About how many steps these samples make, at least one micro-batch of every shape."""
    counts = np.bincount(task.corpus.bucket[ids], minlength=task.corpus.buckets)
    return int(np.ceil(np.ceil(counts / dual_constraint_sizes(task)).sum() / task.slots))


def _lay_out(
    task: Task,
    order: IntArray,
    arrangement: Arrangement,
    skipped: int,
    waiting: int,
    warnings: tuple[str, ...],
) -> Plan:
    """Lay an arrangement out as a grid and weigh it."""
    grid = (-1, task.world_size)
    pieces, choice = arrangement.pieces, task.options
    bucket, size = pieces.bucket.reshape(grid), pieces.size.reshape(grid)
    filler = arrangement.filler.reshape(grid)
    tokens = task.corpus.tokens[bucket]
    return Plan(
        corpus=task.corpus,
        limits=task.limits,
        options=choice,
        accumulation=task.accumulation,
        sample_order=order,
        bucket=bucket.astype(np.int32),
        first=pieces.first.reshape(grid),
        size=size.astype(np.int32),
        cost=task.cost.cost(size, tokens),
        loss_weight=loss_weights(
            size, tokens, filler, task.accumulation, choice.loss_weighting, choice.normalise_by
        ),
        filler=filler,
        splits=arrangement.splits,
        dropped=skipped + len(order) - int(size[~filler].sum()) - waiting,
        waiting=waiting,
        warnings=warnings,
    )


def _without_oversize(corpus: Corpus, population: IntArray | None, limits: Limits, choice: PlanOptions):
    """Deal with samples of which one alone exceeds max_tokens, as `on_oversize` says."""
    oversize = oversize_buckets(corpus, limits)
    if len(oversize) == 0:
        return population, 0, []
    worst = int(oversize[np.argmax(corpus.tokens[oversize])])
    sample = int(np.flatnonzero(corpus.bucket == worst)[0])
    found = (
        f"max_tokens is {limits.max_tokens}, but {corpus.sample_name(sample)} has {corpus.tokens[worst]} "
        f"tokens"
        f" (shape {'x'.join(map(str, corpus.shapes[worst]))}); {int(corpus.counts()[oversize].sum())} "
        f"sample(s)"
        " exceed it alone."
    )
    if choice.on_oversize == "error":
        raise PlanError(f'{found} Raise max_tokens, or set "on_oversize" to "keep" or "skip".')
    if choice.on_oversize == "keep":
        return population, 0, [f"{found} Each is trained alone (B = 1)."]
    if population is None:
        population = np.arange(corpus.samples)
    kept = population[~np.isin(corpus.bucket[population], oversize)]
    if len(kept) == 0:
        raise PlanError(f'{found} No sample is left with "on_oversize": "skip". Raise max_tokens.')
    return kept, len(population) - len(kept), [f"{found} They are skipped."]
