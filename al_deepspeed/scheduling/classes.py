"""Which common costs micro-steps should have, and which shapes belong to each: a rate-distortion problem.

All ranks of a micro-step wait for its slowest. So micro-steps come in a few *classes*, each with a target
cost T: a sample of length S in a class runs in a micro-batch of the largest B with cost(B, S) <= T, and
takes W = T / B of a rank's time. Some targets suit a shape and some waste most of the time on it, but if
every shape kept to the target that suits it best, steps would no longer resemble the corpus. The best
compromise minimises
    mean W + temperature * mutual information(shape, class),
and is what the Blahut-Arimoto iteration finds: P(class | shape) ~ q(class) * exp(-W / temperature), where q
is the share of the samples in each class. Targets that do not pay die out by themselves. Temperature 0 lets
every shape keep to its best target; a high one gives every class the corpus's own mix.

An epoch takes a multiple of R*G micro-batches. A bonus a micro-batch, off W, makes lower targets more popular
until their number comes out at one by itself.
"""

from dataclasses import dataclass, replace

import numpy as np

from al_deepspeed.scheduling.budget import candidate_budgets
from al_deepspeed.scheduling.cost import CostModel
from al_deepspeed.scheduling.shapes import FloatArray, IntArray

CANDIDATES = 200
ITERATIONS = 30
LEAST_POPULARITY = 1e-12  # so that a bucket with room in one class alone finds it
BISECTIONS = 12
SETTLED = 1e-9  # change of a popularity
TEMPERATURES = 2.0 ** np.arange(-9, 0, 0.5)  # of the mean W: from every shape for itself to all alike


@dataclass(frozen=True)
class Classes:
    """Targets in ascending order, and how each bucket's samples divide among them.

    target: cost T of a class, float64 [classes].
    size: B of a bucket in a class, int64 [buckets, classes]; 0 where even one sample costs more than T.
    share: part of a bucket's samples that a class gets, float64 [buckets, classes]; rows sum to 1.
    rank_time: W summed over all samples: what the epoch takes of all ranks together.
    information: between shape and class, bits a sample; 0 when every class has the corpus's mix.
    riders: buckets whose share does not follow their costs, bool [buckets].
    """

    target: FloatArray
    size: IntArray
    share: FloatArray
    rank_time: float
    information: float
    riders: np.ndarray


def best_classes(
    tokens: IntArray,
    counts: IntArray,
    largest: IntArray,
    cost: CostModel,
    *,
    windows: float,
    price: float,
    riders: np.ndarray,
    whole: int = 1,
    beside: float = 0.0,
) -> list[Classes]:
    """Divisions that cost no more than `price` of the epoch's time over the best, the most mixing first.

    Args:
        tokens, counts: S and samples of each bucket, all >= 1.
        largest: B >= 1 that the limits allow, a bucket.
        windows: micro-steps of which each class has to take one or more; this bounds how many there are.
        price: share of the least possible time that may be spent on mixing.
        riders: buckets that keep to the corpus's mix in every class that has room for them, whatever it
            costs.
        whole: all micro-batches should be a multiple of this, where that costs no more than `price` either.
        beside: how many of them are in no class.
    """
    largest = np.minimum(largest, counts)
    target = _candidate_targets(tokens, largest, cost, int(min(CANDIDATES, 16 * (1 + windows))))
    fits = np.stack([cost.largest_batch(tokens, value) for value in target], axis=1)
    menu = _Menu(target, np.minimum(largest[:, None], fits), counts, riders)
    mean_time = float(menu.time.min(axis=1) @ counts / counts.sum())
    temperatures = (mean_time * TEMPERATURES).tolist()
    divided = [_divide(menu, temperature, windows) for temperature in temperatures]
    affordable = (1 + price) * min(classes.rank_time for classes in divided)
    distinct = {  # of some temperatures the divisions are the same
        (classes.information, classes.rank_time): (classes, temperature)
        for classes, temperature in zip(divided, temperatures, strict=True)
        if classes.rank_time <= affordable
    }
    return [
        _with_whole_steps(menu, *distinct[mixing_and_time], whole, beside, price)
        for mixing_and_time in sorted(distinct)
    ]


@dataclass(frozen=True)
class _Menu:
    """Candidate targets, B of each bucket in each, and samples a bucket."""

    target: FloatArray
    size: IntArray
    counts: IntArray
    riders: np.ndarray

    @property
    def time(self) -> FloatArray:
        """W: time of a rank that a sample takes, infinite where it does not fit."""
        return np.where(self.size > 0, self.target / np.maximum(self.size, 1), np.inf)

    def only(self, live: IntArray) -> "_Menu":
        """The menu without the other targets."""
        return replace(self, target=self.target[live], size=self.size[:, live])

    def micro_batches(self, share: FloatArray) -> FloatArray:
        """Their number in each class, fractions and all."""
        return (self.counts[:, None] * share / np.maximum(1, self.size)).sum(axis=0)

    def classes(self, share: FloatArray) -> Classes:
        """All targets with these shares."""
        taken = np.where(share > 0, self.time, 0.0) * share
        return Classes(
            self.target,
            self.size,
            share,
            float(self.counts @ taken.sum(axis=1)),
            _information(share, self.counts),
            self.riders,
        )


def _candidate_targets(tokens: IntArray, largest: IntArray, cost: CostModel, points: int) -> FloatArray:
    """Costs that some micro-batch has; the cost of the longest sample alone is among them."""
    costs = candidate_budgets(tokens, cost, largest, points)
    return np.unique(np.append(costs, cost.cost(1, tokens.max())))


def _divide(menu: _Menu, temperature: float, windows: float) -> Classes:
    """Divide buckets among classes at one temperature, dropping classes until each has its micro-steps."""
    shelter = menu.target[np.argmax((menu.size > 0).all(axis=0))]  # the lowest that has room for every bucket
    while True:
        share = _blahut_arimoto(menu, temperature)
        micro_batches = menu.micro_batches(share)
        lacking = np.flatnonzero((micro_batches * windows < micro_batches.sum()) & (menu.target != shelter))
        if len(lacking) == 0:
            return menu.classes(share)
        weakest = lacking[np.argsort(micro_batches[lacking], kind="stable")]
        menu = menu.only(np.delete(np.arange(len(menu.target)), weakest[: -(-len(weakest) // 2)]))


def _with_whole_steps(
    menu: _Menu, classes: Classes, temperature: float, whole: int, beside: float, price: float
) -> Classes:
    """The same classes, lower ones more popular: micro-batches at the next multiple, if the price allows."""
    menu = replace(menu, target=classes.target, size=classes.size)
    number = menu.micro_batches(classes.share).sum()
    goal = -(-(number + beside - 1e-6) // whole) * whole - beside
    low, high = 0.0, float(menu.target.max())
    for _ in range(BISECTIONS if number + 1 <= goal else 0):
        bonus = (low + high) / 2
        enough = menu.micro_batches(_blahut_arimoto(menu, temperature, bonus)).sum() >= goal
        low, high = (low, bonus) if enough else (bonus, high)
    raised = menu.classes(_blahut_arimoto(menu, temperature, low))
    return raised if raised.rank_time <= (1 + price) * classes.rank_time else classes


def _blahut_arimoto(menu: _Menu, temperature: float, bonus: float = 0.0) -> FloatArray:
    """P(class | bucket), from equal classes, after a fixed number of iterations or once it has settled.

    Args:
        bonus: what a micro-batch takes off the time.
    """
    counts, riders = menu.counts, menu.riders
    time = menu.time - bonus / np.maximum(1, menu.size)
    affinity = np.exp((time.min(axis=1, keepdims=True) - time) / temperature)
    affinity[riders] = np.isfinite(time[riders])
    weight = np.where(riders, 0.0, counts) / counts[~riders].sum()
    popularity = np.full(time.shape[1], 1.0 / time.shape[1])
    for _ in range(ITERATIONS):
        share = affinity * popularity
        share /= share.sum(axis=1, keepdims=True)
        before, popularity = popularity, np.maximum(LEAST_POPULARITY, weight @ share)
        if np.abs(popularity - before).max() < SETTLED:
            break
    return share


def _information(share: FloatArray, counts: IntArray) -> float:
    """Mutual information of bucket and class in bits a sample."""
    weight = counts / counts.sum()
    ratio = share / np.maximum(1e-300, weight @ share)
    return float((weight[:, None] * share * np.log2(np.where(share > 0, ratio, 1.0))).sum())
