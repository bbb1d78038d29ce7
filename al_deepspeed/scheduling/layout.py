"""The result of planning: an epoch as a few arrays.

A micro-batch is a run of `sample_order`; a rank's view is a column of the grids; resuming is an offset; a
report is a sum over an axis. Ten million samples are 40 MB and their micro-batches some tens more.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from al_deepspeed.scheduling.constraints import Limits
from al_deepspeed.scheduling.options import PlanOptions
from al_deepspeed.scheduling.shapes import Corpus, FloatArray, IntArray


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

    @property
    def step_samples(self) -> IntArray:
        """Samples of each step, over all ranks: what `lr_scaling` goes by."""
        return self.by_step(self.samples)

    def digests(self) -> dict[str, str]:
        """Of who runs what and with which weight: ranks whose digests agree will train the same steps."""
        names = ("sample_order", "bucket", "first", "size", "loss_weight", "filler")
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in names}
        return {name: hashlib.sha256(array).hexdigest() for name, array in arrays.items()}

    def digest(self) -> str:
        """All `digests` in one."""
        return hashlib.sha256("".join(self.digests().values()).encode()).hexdigest()

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
