"""How many samples of one shape fit in a micro-batch: the two limits of AdaptiveLoad (arXiv 2605.17923).

Memory grows with B*S, time with the cost model. The batch size is the largest B that both allow, and never
less
than one: a sample that exceeds a limit alone still has to be trained on.
"""

from dataclasses import dataclass

import numpy as np

from al_deepspeed.errors import PlanError
from al_deepspeed.scheduling.cost import CostModel, PowerCost
from al_deepspeed.scheduling.shapes import Corpus, IntArray

MOST_TOKENS = 1 << 53


@dataclass(frozen=True)
class Limits:
    """The two budgets of a micro-batch.

    max_tokens: M_mem, the B*S that a rank's memory holds.
    max_cost: M_comp. In the units of the cost model, or of B*S^exponent where `exponent` is given.
        None: the budget is chosen for the corpus (see budget.py).
    step_cost: what a step takes beside its micro-batches; counts where the budget is to be chosen.
    exponent: the paper's p. Given, the second limit is B*S^p <= max_cost, whatever the cost model predicts.
    """

    max_tokens: int
    max_cost: float | None = None
    exponent: float | None = None
    step_cost: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens <= MOST_TOKENS:
            raise PlanError(
                f"max_tokens is {self.max_tokens}; it must be from 1 to {MOST_TOKENS}. Give M_mem, B*S in "
                "tokens."
            )
        if self.max_cost is not None and not 0 < self.max_cost < float("inf"):
            raise PlanError(
                f"max_cost is {self.max_cost}; it must be a finite number above 0, or left out to be chosen."
            )
        if self.exponent is not None and not 0 < self.exponent <= 8:
            raise PlanError(f"exponent is {self.exponent}; it must lie in (0, 8]; the paper fits about 2.")
        if self.exponent is not None and self.max_cost is None:
            raise PlanError("exponent is given without max_cost; B*S^exponent needs its budget M_comp.")

    def second_limit(self, cost: CostModel) -> CostModel:
        """The model that max_cost is measured in."""
        return cost if self.exponent is None else PowerCost(exponent=self.exponent)


def memory_batch_sizes(tokens: IntArray, limits: Limits) -> IntArray:
    """B >= 1 that memory alone allows: the equal-token rule."""
    return np.maximum(1, limits.max_tokens // np.asarray(tokens))


def batch_sizes(tokens: IntArray, cost: CostModel, limits: Limits) -> IntArray:
    """B >= 1 for each sequence length under both limits."""
    by_memory = limits.max_tokens // np.asarray(tokens)
    by_time = limits.second_limit(cost).largest_batch(tokens, limits.max_cost)
    return np.maximum(1, np.minimum(by_memory, by_time))


def binding_limits(tokens: IntArray, cost: CostModel, limits: Limits) -> list[str]:
    """What sets B of each bucket: "memory", "cost", "both", or "oversize" (B = 1 exceeds a limit alone)."""
    by_memory = limits.max_tokens // np.asarray(tokens)
    by_time = limits.second_limit(cost).largest_batch(tokens, limits.max_cost)
    names = np.where(by_memory < by_time, "memory", np.where(by_time < by_memory, "cost", "both"))
    return np.where(np.minimum(by_memory, by_time) < 1, "oversize", names).tolist()


def low_budget(corpus: Corpus, cost: CostModel, limits: Limits) -> str | None:
    """A warning if samples overrun max_cost alone: then it caps all but those that ranks wait for."""
    alone = limits.second_limit(cost).cost(1, corpus.tokens)
    counts = np.where(alone > limits.max_cost * (1 + 1e-9), corpus.counts(), 0)
    if not counts.any():
        return None
    worst = int(np.argmax(np.where(counts, alone, 0)))
    return (
        f"max_cost is {limits.max_cost:g}, but {counts.sum()} of {corpus.samples} samples cost more alone, "
        f"up to {alone[worst]:g} (shape {'x'.join(map(str, corpus.shapes[worst]))}); each is trained alone "
        f"(B = 1). Give at least {np.ceil(alone[worst]):.0f}, or leave max_cost out to have it chosen."
    )


def oversize_buckets(corpus: Corpus, limits: Limits) -> IntArray:
    """Buckets in use of which one sample alone exceeds the memory limit."""
    return np.flatnonzero((corpus.tokens > limits.max_tokens) & (corpus.counts() > 0))


def power_of_two_sizes(sizes: IntArray) -> IntArray:
    """The largest power of two within each size; 0 stays 0."""
    return np.where(sizes, 1 << np.maximum(0, np.frexp(np.asarray(sizes, dtype=np.float64))[1] - 1), 0)


def cap_variants(sizes: IntArray, max_variants: int) -> IntArray:
    """Batch sizes for which a plan can hold at most `max_variants` distinct (B, shape) pairs.

    Sizes become powers of two, a set that splitting in halves never leaves: a bucket of size 2^k has k + 1
    variants. While there are too many, the bucket with most variants is halved.
    """
    sizes = power_of_two_sizes(sizes)
    if max_variants < len(sizes):
        raise PlanError(
            f"max_variants is {max_variants}, but the corpus has {len(sizes)} shapes; allow at least one "
            f"batch "
            "size a shape, or merge shapes."
        )
    variants = np.log2(sizes).astype(np.int64) + 1
    while variants.sum() > max_variants:
        variants[np.argmax(variants)] -= 1
    return 1 << (variants - 1)
