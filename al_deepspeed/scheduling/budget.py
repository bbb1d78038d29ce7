"""M_comp is not a guess: the budget that makes predicted tokens per second largest.

A large budget lets long samples set the pace while images wait; a small one cannot hold the longest samples
(B = 1 overruns it) and pays the fixed cost of many small micro-batches, and of more steps, each with an
optimizer step of its own. With micro-batches dealt at random to R ranks, a micro-step lasts as long as its
slowest: the expected maximum of R draws, which has a closed form.
"""

from dataclasses import dataclass

import numpy as np

from al_deepspeed.scheduling.constraints import Limits, batch_sizes
from al_deepspeed.scheduling.cost import CostModel
from al_deepspeed.scheduling.shapes import Corpus, FloatArray, IntArray

ALIKE = 0.999  # of the highest rate: no difference


@dataclass(frozen=True, kw_only=True)
class Deal:
    """How micro-batches become steps.

    world_size: R, the ranks that wait for each other. accumulation: G, micro-steps a step.
    step_cost: what a step takes beside its micro-batches, in the cost model's units.
    endless: the samples are a taste of a stream. Otherwise they are an epoch, of whole micro-batches (of a
        shape's samples the last ones are a smaller one) and whole steps.
    """

    world_size: int
    accumulation: int = 1
    step_cost: float = 0.0
    endless: bool = False


def expected_maximum(values: FloatArray, weights: FloatArray, draws: int) -> float:
    """Mean of the largest of `draws` independent draws of `values` with probabilities ~ `weights`."""
    order = np.argsort(values)
    below = np.cumsum(weights[order]) / np.sum(weights)
    chance = np.diff(np.concatenate([[0.0], below**draws]))
    return float(values[order] @ chance)


def random_deal_throughput(
    tokens: IntArray, counts: IntArray, sizes: IntArray, cost: CostModel, deal: Deal
) -> float:
    """Predicted tokens per second of the world when micro-batches of the given sizes are dealt at random."""
    slots = deal.world_size * deal.accumulation
    if deal.endless:
        lengths, numbers = tokens, counts / sizes
        steps = numbers.sum() / slots
    else:
        lengths, sizes, numbers, steps = whole_steps(tokens, counts, sizes, slots)
    pace = expected_maximum(cost.cost(sizes, lengths), numbers, deal.world_size)
    return float(1000 * (counts @ tokens) / (steps * (deal.accumulation * pace + deal.step_cost)))


def whole_steps(
    tokens: IntArray, counts: IntArray, sizes: IntArray, slots: int
) -> tuple[IntArray, FloatArray, FloatArray, int]:
    """An epoch's micro-batches once whole steps are made of them: S, B, how many there are; and the steps.

    What is missing from the last step is made by halving micro-batches, taken evenly from all that can be
    halved, as in a plan.
    """
    tokens, numbers = np.tile(tokens, 2), np.concatenate([counts // sizes, counts % sizes > 0])
    sizes = np.concatenate([sizes, counts % sizes])
    tokens, sizes, numbers = tokens[numbers > 0], sizes[numbers > 0], numbers[numbers > 0]
    steps = -(-numbers.sum() // slots)
    divisible = np.where(sizes > 1, numbers, 0)
    halved = divisible * min(1.0, (steps * slots - numbers.sum()) / max(1, divisible.sum()))
    numbers = np.concatenate([numbers - halved, 2 * halved])
    return np.tile(tokens, 2), np.concatenate([sizes, sizes / 2]), numbers, int(steps)


def best_max_cost(
    corpus: Corpus, cost: CostModel, max_tokens: int, deal: Deal, *, points: int = 400
) -> tuple[float, list[tuple[float, float]]]:
    """The budget, in the cost model's units, with the highest predicted tokens/s under `dual_constraint`.

    Of budgets that are as good, the largest: fewest micro-batches, and fewest samples that overrun it alone.

    Args:
        corpus: gives sequence lengths and how often each occurs.
        cost: predicts what a micro-batch takes.
        max_tokens: M_mem, held all the while.
        deal: ranks and steps.
        points: budgets tried. All that matters happens at costs some (B, S) has exactly; of these, so many.
    Returns:
        the budget, and the curve [(budget, tokens per second)] by ascending budget.
    """
    counts = corpus.counts()
    used = np.flatnonzero(counts)
    tokens, counts = corpus.tokens[used], counts[used]
    largest = np.minimum(counts, np.maximum(1, max_tokens // tokens))
    budgets = candidate_budgets(tokens, cost, largest, points)
    curve = []
    for budget in budgets.tolist():
        sizes = batch_sizes(tokens, cost, Limits(max_tokens, budget))
        curve.append((budget, random_deal_throughput(tokens, counts, sizes, cost, deal)))
    best = max(rate for _, rate in curve)
    return max(budget for budget, rate in curve if rate >= ALIKE * best), curve


def candidate_budgets(tokens: IntArray, cost: CostModel, largest: IntArray, points: int) -> FloatArray:
    """Costs that micro-batches of at most `largest` samples have: at most `points`, evenly on a log scale."""
    low, high = float(cost.cost(1, tokens.min())), float(cost.cost(largest, tokens).max())
    grid = np.geomspace(low, high, points) if high > low else np.array([low])
    batch = np.stack([np.clip(cost.largest_batch(tokens, budget), 1, largest) for budget in grid.tolist()])
    costs = cost.cost(batch, tokens)
    # The highest cost at or below each point of the grid, so that some micro-batch meets the budget exactly.
    return np.unique(np.where(costs <= grid[:, None] * (1 + 1e-9), costs, low).max(axis=1))
