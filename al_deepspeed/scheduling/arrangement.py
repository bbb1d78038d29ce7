"""What a strategy is given and what it gives back, and how whole steps are made of what it cut.

Every rank runs the same number of micro-steps and every step has G of them, so the number of micro-batches
is a multiple of R*G. With tail "split" it is reached by halving micro-batches, and by fillers (a sample
repeated at weight 0) only when fewer samples than places are left. With tail "drop" what does not fill a
step is left out.
"""

from dataclasses import dataclass

import numpy as np

from al_deepspeed.errors import TooFewForAStep
from al_deepspeed.scheduling.constraints import Limits, cap_variants
from al_deepspeed.scheduling.cost import CostModel
from al_deepspeed.scheduling.options import PlanOptions
from al_deepspeed.scheduling.pieces import Pieces, concatenate, cut, power_of_two_pieces, shuffled, split
from al_deepspeed.scheduling.shapes import Corpus, FloatArray, IntArray


@dataclass(frozen=True)
class Task:
    """What is to be arranged: `counts` samples a bucket, which lie bucket by bucket in the sample order."""

    corpus: Corpus
    counts: IntArray
    cost: CostModel
    limits: Limits
    world_size: int
    accumulation: int
    options: PlanOptions
    bits: np.random.PCG64

    @property
    def slots(self) -> int:
        """Micro-batches of one step."""
        return self.world_size * self.accumulation

    @property
    def starts(self) -> IntArray:
        """First place of each bucket in the sample order."""
        return np.cumsum(self.counts) - self.counts

    @property
    def kind_codes(self) -> IntArray:
        """A small integer a bucket, equal for buckets of one kind."""
        return np.unique(np.array(self.corpus.kinds), return_inverse=True)[1].reshape(-1)

    def largest_sizes(self, sizes: IntArray) -> IntArray:
        """Batch sizes a bucket after the cap on variants."""
        cap = self.options.max_variants
        return sizes if cap is None else np.minimum(sizes, cap_variants(sizes, cap))

    def cut(self, bucket: IntArray, count: IntArray, size: IntArray, home: IntArray) -> Pieces:
        """Cut lots that together hold every sample; lots of a bucket lie one after the other."""
        order = np.argsort(bucket, kind="stable")
        bucket, count, size, home = bucket[order], count[order], size[order], home[order]
        pieces = cut(bucket, np.cumsum(count) - count, count, size, home)
        return pieces if self.options.max_variants is None else power_of_two_pieces(pieces)

    def costs(self, pieces: Pieces) -> FloatArray:
        return self.cost.cost(pieces.size, self.corpus.tokens[pieces.bucket])


@dataclass(frozen=True)
class Arrangement:
    """Micro-batches in the order of the grid (micro-step by micro-step, rank by rank): a multiple of R*G."""

    pieces: Pieces
    filler: np.ndarray
    splits: int


def complete(task: Task, pieces: Pieces, home: int | None = None) -> tuple[Pieces, np.ndarray, int]:
    """As many micro-batches as whole steps need, by the tail option. Fillers stand last.

    Args:
        home: class that halves move to.
    Returns:
        the micro-batches, which of them are fillers, and how many were made by halving.
    """
    if task.options.tail == "drop":
        surplus = len(pieces) % task.slots
        if surplus == len(pieces):
            raise TooFewForAStep(
                f"{len(pieces)} micro-batches do not fill one step of {task.slots} (world size x "
                f"accumulation) "
                'and "tail" is "drop". Use "split", fewer ranks, or more data.'
            )
        kept = np.sort(shuffled(len(pieces), task.bits)[surplus:])
        return pieces.take(kept), np.zeros(len(kept), dtype=bool), 0
    missing = -len(pieces) % task.slots
    pieces, splits = split(pieces, missing, home)
    number = missing - splits
    filler = np.arange(len(pieces) + number) >= len(pieces)
    return concatenate([pieces, cheapest_sample(task, number, home or 0)]), filler, splits


def cheapest_sample(task: Task, number: int, home: int) -> Pieces:
    """The cheapest sample of the population, `number` times: fillers."""
    present = np.flatnonzero(task.counts)
    bucket = present[np.argmin(task.corpus.tokens[present])]
    columns = (bucket, task.starts[bucket], 1, home)
    return Pieces(*(np.full(number, value, dtype=np.int64) for value in columns))
