"""M_comp is not a guess: the budget that makes predicted tokens per second largest.

A large budget lets long samples set the pace while images wait; a small one cannot hold the longest samples
(B = 1 overruns it) and pays the fixed cost of many small micro-batches. With micro-batches dealt at random
to R ranks, a micro-step lasts as long as its slowest: the expected maximum of R draws, which has a closed
form.
"""

import numpy as np

from al_deepspeed.scheduling.constraints import Limits, batch_sizes
from al_deepspeed.scheduling.cost import CostModel
from al_deepspeed.scheduling.shapes import Corpus, FloatArray, IntArray


def expected_maximum(values: FloatArray, weights: FloatArray, draws: int) -> float:
    """Mean of the largest of `draws` independent draws of `values` with probabilities ~ `weights`."""
    order = np.argsort(values)
    below = np.cumsum(weights[order]) / np.sum(weights)
    chance = np.diff(np.concatenate([[0.0], below**draws]))
    return float(values[order] @ chance)


def random_deal_throughput(
    tokens: IntArray, counts: IntArray, sizes: IntArray, cost: CostModel, world_size: int
) -> float:
    """Predicted tokens per second of the world when micro-batches of the given sizes are dealt at random."""
    micro_batches = counts / sizes
    pace = expected_maximum(cost.cost(sizes, tokens), micro_batches, world_size)
    return float(1000 * world_size * (counts @ tokens) / (micro_batches.sum() * pace))


def best_max_cost(
    corpus: Corpus, cost: CostModel, max_tokens: int, world_size: int, *, points: int = 400
) -> tuple[float, list[tuple[float, float]]]:
    """The budget, in the cost model's units, with the highest predicted tokens/s under `dual_constraint`.

    Args:
        corpus: gives sequence lengths and how often each occurs.
        cost: predicts what a micro-batch takes.
        max_tokens: M_mem, held all the while.
        world_size: R, the ranks that wait for each other.
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
        curve.append((budget, random_deal_throughput(tokens, counts, sizes, cost, world_size)))
    return max(curve, key=lambda point: (point[1], point[0]))[0], curve


def candidate_budgets(tokens: IntArray, cost: CostModel, largest: IntArray, points: int) -> FloatArray:
    """Costs that micro-batches of at most `largest` samples have: at most `points`, evenly on a log scale."""
    low, high = float(cost.cost(1, tokens.min())), float(cost.cost(largest, tokens).max())
    grid = np.geomspace(low, high, points) if high > low else np.array([low])
    per_sample = cost.sample_cost(tokens)
    batch = np.clip(np.floor((grid[:, None] - cost.intercept) / per_sample + 1e-9), 1, largest)
    costs = cost.cost(batch, tokens)
    # The highest cost at or below each point of the grid, so that some micro-batch meets the budget exactly.
    return np.unique(np.where(costs <= grid[:, None] * (1 + 1e-9), costs, low).max(axis=1))
