"""Fixed-noise validation: the same samples, noise and levels each time, so that only the model changes it.

For each shape a few samples, each at a few noise levels (mid-quantiles of the training distribution). One
forward holds one sample at one level. Every rank runs the same number of forwards, as ZeRO-3 needs; where the
items do not divide, the last one runs again at weight 0. Items lie in order of length, so that ranks side by
side cost the same.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from al_deepspeed.scheduling.shapes import Corpus
from al_deepspeed.training.objective import FlowDataset, flow_loss


@dataclass(frozen=True)
class Item:
    """One forward. `weight` is 0 where an item only keeps a rank company."""

    sample_id: int
    bucket: int
    level: float
    weight: float = 1.0


def items(corpus: Corpus, levels: Sequence[float], samples_a_shape: int) -> list[Item]:
    """Every item, longest first: the first samples of each bucket, at each level."""
    chosen = []
    for bucket in np.argsort(-corpus.tokens, kind="stable"):
        for sample_id in np.flatnonzero(corpus.bucket == bucket)[:samples_a_shape]:
            chosen += [Item(int(sample_id), int(bucket), level) for level in levels]
    return chosen


def share(everything: Sequence[Item], rank: int, world_size: int) -> list[Item]:
    """This rank's items; the same count on every rank."""
    filled = list(everything)
    missing = -len(filled) % world_size
    filled += [Item(i.sample_id, i.bucket, i.level, weight=0.0) for i in [filled[-1]] * missing]
    return filled[rank::world_size]


class Validation:
    """Call with the engine: mean loss of each shape and `all`, the mean over items; equal on all ranks."""

    def __init__(
        self, dataset: FlowDataset, corpus: Corpus, *, levels: int = 3, samples_a_shape: int = 1
    ) -> None:
        quantiles = [(k + 0.5) / levels for k in range(levels)]
        chosen = items(corpus, [dataset.objective.level(q) for q in quantiles], samples_a_shape)
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.dataset = dataset
        self.items = share(chosen, rank, world_size)
        self.names = [corpus.bucket_name(bucket) for bucket in range(corpus.buckets)]

    def __call__(self, engine: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
        sums = torch.zeros(2, len(self.names), dtype=torch.float64)
        engine.eval()
        with torch.no_grad():
            for item in self.items:
                batch = default_collate([self.dataset.fixed(item.sample_id, item.level)])
                loss = flow_loss(engine, batch, device, dtype).item()
                sums[:, item.bucket] += item.weight * torch.tensor([loss, 1.0], dtype=torch.float64)
        engine.train()
        sums = sums.to(device)
        if dist.is_initialized():
            dist.all_reduce(sums)
        losses, counts = sums.tolist()
        result = {name: losses[i] / counts[i] for i, name in enumerate(self.names) if counts[i]}
        return {**result, "all": sum(losses) / sum(counts)}


FILE_NAME = "validation.jsonl"


class ValidationFile:
    """RUN/validation.jsonl, by rank 0: {"step": 10, "loss": {"image 1x8x8": 0.9, ..., "all": 0.8}}."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE_NAME

    def write(self, step: int, losses: dict[str, float]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "loss": losses}) + "\n")


def read_validation(run_dir: Path) -> list[dict]:
    """The records by step; where a restart validated a step again, the later record counts."""
    path = run_dir / FILE_NAME
    if not path.is_file():
        return []
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [record for _, record in sorted({record["step"]: record for record in records}.items())]
