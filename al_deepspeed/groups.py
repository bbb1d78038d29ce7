"""Which ranks share a batch: R is the data-parallel size, and ranks that differ otherwise get the same batch.

DeepSpeed knows the data-parallel group in most cases: alone, under an `mpu`, AutoTP, pipelines or a device
mesh. With Ulysses by `parallel_state_sp` it has none (`engine.dp_world_size` is None); there each
sequence-parallel group is one data-parallel rank.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from al_deepspeed.errors import ConfigError


@dataclass(frozen=True)
class DataRanks:
    """The data-parallel place of every rank: `of_rank[r]` for global rank r, and `own` of this process."""

    of_rank: tuple[int, ...]
    own: int

    @property
    def size(self) -> int:
        return max(self.of_rank) + 1


def data_ranks(engine: Any) -> DataRanks:
    """Asks the engine's groups, and checks with all ranks that the answers fit together. Collective."""
    group = engine.data_parallel_group
    if group is not None:
        own, size = dist.get_rank(group), dist.get_world_size(group)
    else:
        shared = dist.get_process_group_ranks(engine.seq_parallel_group)
        own, size = min(shared), dist.get_world_size() // len(shared)
    answers: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(answers, (own, size))
    return order(answers, dist.get_rank())


def order(answers: list[tuple[int, int]], rank: int) -> DataRanks:
    """Numbers the data-parallel ranks from 0; each must stand for equally many ranks.

    Args:
        answers: of each global rank, any number that its batch-sharing group has in common, and R.
        rank: the global rank that asks.
    """
    labels = [label for label, _ in answers]
    distinct = sorted(set(labels))
    counts = {labels.count(label) for label in distinct}
    if len(counts) != 1 or {size for _, size in answers} != {len(distinct)}:
        raise ConfigError(
            f"the ranks' data-parallel places are {labels} of sizes {[size for _, size in answers]}; "
            "allowed: as many places as the data-parallel size, each of equally many ranks. Check the mpu."
        )
    of_rank = tuple(distinct.index(label) for label in labels)
    return DataRanks(of_rank, of_rank[rank])
