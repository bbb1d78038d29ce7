"""One epoch, laid out: which samples each rank runs in each micro-step, and with which weight.

A plan is a pure function of (corpus, cost, limits, world size, accumulation, seed, epoch, options), so every
rank computes the same one and nobody has to talk. All strategies share one path:
    population -> shuffle within buckets -> the strategy cuts and arranges -> whole steps -> grid
    [micro_steps, R]
The result is a few arrays. A micro-batch is a run of `sample_order`; a rank's view is a column; resuming is
an offset; a report is a sum over an axis.
"""

from dataclasses import dataclass

import numpy as np

from al_deepspeed.errors import PlanError
from al_deepspeed.scheduling.arrangement import Arrangement, Task
from al_deepspeed.scheduling.balanced import balanced
from al_deepspeed.scheduling.baselines import dual_constraint, equal_token
from al_deepspeed.scheduling.budget import best_max_cost
from al_deepspeed.scheduling.constraints import Limits, oversize_buckets
from al_deepspeed.scheduling.cost import CostModel
from al_deepspeed.scheduling.options import PlanOptions
from al_deepspeed.scheduling.pieces import random_stream, shuffle_within_buckets
from al_deepspeed.scheduling.shapes import Corpus, FloatArray, IntArray
from al_deepspeed.scheduling.weights import loss_weights

STRATEGIES = {"equal_token": equal_token, "dual_constraint": dual_constraint, "balanced": balanced}


@dataclass(frozen=True)
class MicroBatch:
    """What one rank runs in one forward and backward pass. `cost` is predicted, in the cost model's units."""

    sample_ids: IntArray
    bucket: int
    shape: tuple[int, int, int]
    tokens: int
    cost: float
    loss_weight: float
    filler: bool


@dataclass(frozen=True)
class Plan:
    """An epoch, or what was left of it when the world changed.

    sample_order: sample ids; a micro-batch is the run [first, first + size).
    bucket, first, size, cost, loss_weight, filler: grids [micro_steps, R].
    splits: micro-batches made by halving so that steps are full.
    dropped: samples that this plan leaves out for good (tail "drop", on_oversize "skip").
    waiting: samples that no step admitted (curriculum); later epochs hold them again.
    warnings: sentences for the user, the same on every rank.
    """

    corpus: Corpus
    limits: Limits
    options: PlanOptions
    accumulation: int
    sample_order: IntArray
    bucket: IntArray
    first: IntArray
    size: IntArray
    cost: FloatArray
    loss_weight: FloatArray
    filler: np.ndarray
    splits: int = 0
    dropped: int = 0
    waiting: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def micro_steps(self) -> int:
        return self.size.shape[0]

    @property
    def world_size(self) -> int:
        return self.size.shape[1]

    @property
    def steps(self) -> int:
        return self.micro_steps // self.accumulation

    @property
    def samples(self) -> IntArray:
        """Samples that count, a micro-batch: 0 for a filler."""
        return np.where(self.filler, 0, self.size)

    @property
    def tokens(self) -> IntArray:
        """Tokens that count, a micro-batch: 0 for a filler."""
        return self.samples.astype(np.int64) * self.corpus.tokens[self.bucket]

    def by_step(self, grid: np.ndarray) -> np.ndarray:
        """Sums of a grid over the micro-batches of each step."""
        return grid.reshape(self.steps, -1).sum(axis=1)

    def sample_ids(self, micro_step: int, rank: int) -> IntArray:
        first = self.first[micro_step, rank]
        return self.sample_order[first : first + self.size[micro_step, rank]]

    def micro_batch(self, micro_step: int, rank: int) -> MicroBatch:
        bucket = int(self.bucket[micro_step, rank])
        return MicroBatch(
            sample_ids=self.sample_ids(micro_step, rank),
            bucket=bucket,
            shape=tuple(self.corpus.shapes[bucket].tolist()),
            tokens=int(self.corpus.tokens[bucket]),
            cost=float(self.cost[micro_step, rank]),
            loss_weight=float(self.loss_weight[micro_step, rank]),
            filler=bool(self.filler[micro_step, rank]),
        )

    def left_after(self, micro_step: int) -> IntArray:
        """Sample ids (each as often as the population holds it) that the first `micro_step` micro-steps
        skip.
        """
        done = ~self.filler[:micro_step]
        first, size = self.first[:micro_step][done], self.size[:micro_step][done]
        edges = np.zeros(len(self.sample_order) + 1, dtype=np.int32)
        edges[first] += 1
        edges[first + size] -= 1
        return np.sort(self.sample_order[np.cumsum(edges[:-1]) == 0])


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
        options: fields of `PlanOptions`.
    """
    choice = PlanOptions(**options)
    if world_size < 1 or accumulation < 1:
        raise PlanError(
            f"world size is {world_size} and accumulation is {accumulation}; both must be at least 1."
        )
    if corpus.samples == 0:
        raise PlanError("the corpus holds no sample. At least one is needed; check the manifest.")
    if limits.max_cost is None:
        limits = Limits(limits.max_tokens, best_max_cost(corpus, cost, limits.max_tokens, world_size)[0])
    population, skipped, warnings = _without_oversize(corpus, population, limits, choice)
    bits = random_stream(seed, epoch, part)
    bucket = corpus.bucket if population is None else corpus.bucket[population]
    order = shuffle_within_buckets(bucket, bits)
    counts = np.bincount(bucket, minlength=corpus.buckets)
    task = Task(corpus, counts, cost, limits, world_size, accumulation, choice, bits)
    arrangement = STRATEGIES[choice.strategy](task)
    if choice.tail == "split" and len(bucket) < world_size * accumulation:
        warnings.append(
            f"{len(bucket)} samples are fewer than the {world_size * accumulation} micro-batches of one step "
            f"(world size {world_size} x accumulation {accumulation}); fillers of weight 0 complete it."
        )
    sample_order = (order if population is None else population[order]).astype(_id_type(corpus.samples))
    return _plan(task, arrangement, sample_order, skipped, tuple(warnings))


def _plan(task: Task, arrangement: Arrangement, sample_order: IntArray, skipped: int, warnings) -> Plan:
    """Lay an arrangement out as a grid and weigh it."""
    grid = (-1, task.world_size)
    pieces = arrangement.pieces
    bucket, size = pieces.bucket.reshape(grid), pieces.size.reshape(grid)
    filler = arrangement.filler.reshape(grid)
    tokens = task.corpus.tokens[bucket]
    return Plan(
        corpus=task.corpus,
        limits=task.limits,
        options=task.options,
        accumulation=task.accumulation,
        sample_order=sample_order,
        bucket=bucket.astype(np.int32),
        first=pieces.first.reshape(grid),
        size=size.astype(np.int32),
        cost=task.cost.cost(size, tokens),
        loss_weight=loss_weights(
            size, tokens, filler, task.accumulation, task.options.loss_weighting, task.options.normalise_by
        ),
        filler=filler,
        splits=arrangement.splits,
        dropped=skipped + len(sample_order) - int(size[~filler].sum()),
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
        f"tokens "
        f"(shape {'x'.join(map(str, corpus.shapes[worst]))}); {int(corpus.counts()[oversize].sum())} "
        f"sample(s) "
        "exceed it alone."
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


def _id_type(samples: int) -> type:
    return np.int32 if samples < 2**31 else np.int64
