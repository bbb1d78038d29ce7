"""Batches from a stream, for data without a manifest: a WebDataset pipeline, any iterable of samples.

Every rank reads its own stream (shards are split among ranks as the pipeline does it), sees shapes only as it
reads, and agrees with the others on a window of micro-steps at a time; see scheduling/streaming.py.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate

from al_deepspeed.errors import ConfigError, CorpusError
from al_deepspeed.loader import Batches, Listener, heed_only_the_rank
from al_deepspeed.scheduling.plan import MicroBatch, Plan
from al_deepspeed.scheduling.streaming import Shape, StreamSampler


class StreamedBatches(Batches):
    """Batches of a stream's samples. They have no length, and `sample_ids` count this rank's reads.

    Args:
        sampler: plans windows and holds their samples.
        collate_fn: list of samples -> dict; torch's default stacks tensors.
        listener: told of every batch.
    """

    def __init__(
        self,
        sampler: StreamSampler,
        *,
        collate_fn: Callable[[list], dict] | None = None,
        listener: Listener | None = None,
    ) -> None:
        super().__init__(sampler, listener)
        self._collate = collate_fn or default_collate

    def collated(self) -> Iterator[tuple[Plan, int, MicroBatch, Any]]:
        upcoming = self._sampler.upcoming(lambda: self._listener.micro_steps_done)
        for plan, micro_step, micro_batch, samples in upcoming:
            yield plan, micro_step, micro_batch, self._collate(samples)


class ShapedSamples:
    """(shape, sample) pairs of an iterable, read by worker processes if there are any.

    Args:
        dataset: gives samples, once an epoch. With workers each of them iterates over its own copy, which has
            to split the data by worker, as torch and WebDataset ask for.
        shape_of: sample -> latent (frames, height, width); None: those of its "latent", [C, F, H, W].
        num_workers: processes that read.
    """

    def __init__(self, dataset: Iterable, shape_of: Callable | None, num_workers: int) -> None:
        self._shape_of = shape_of or latent_shape
        self._samples = DataLoader(
            dataset if isinstance(dataset, IterableDataset) else _Iterable(dataset),
            batch_size=None,
            collate_fn=as_it_is,
            num_workers=num_workers,
            worker_init_fn=heed_only_the_rank,
        )

    def __iter__(self) -> Iterator[tuple[Shape, Any]]:
        for sample in self._samples:
            frames, height, width = _checked(self._shape_of(sample))
            kind = "image" if frames == 1 else "video"
            if isinstance(sample, dict):
                kind = sample.get("kind", kind)
            yield (kind, frames, height, width), sample


class _Iterable(IterableDataset):
    def __init__(self, samples: Iterable) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator:
        return iter(self._samples)


def _checked(shape: Any) -> tuple[int, int, int]:
    """The same sizes as integers, if they are three whole numbers of at least 1."""
    sides = list(shape) if isinstance(shape, Iterable) else []
    if len(sides) != 3 or not all(side == int(side) >= 1 for side in sides):
        raise CorpusError(
            f"a sample of the stream has latent size {shape!r}; it must be (frames, height, width), whole "
            "numbers of at least 1. Leave such samples out of the stream, or correct shape_of."
        )
    return tuple(int(side) for side in sides)


def as_it_is(sample: Any) -> Any:
    """Samples stay what they are until their micro-batch is collated."""
    return sample


def latent_shape(sample: Any) -> tuple[int, int, int]:
    """(frames, height, width) of a sample's latent."""
    sides = getattr(sample.get("latent"), "shape", ()) if isinstance(sample, dict) else ()
    if len(sides) != 4:
        entries = ", ".join(sample) if isinstance(sample, dict) else type(sample).__name__
        raise ConfigError(
            f'a sample of the stream has no "latent" [C, F, H, W] that gives its shape, but {entries}. Pass '
            "shape_of, a function from sample to latent (frames, height, width)."
        )
    return tuple(sides[1:])


def gathering() -> Callable[[Any], list]:
    """All ranks' objects for this rank's, over a group of its own, since a thread uses it. Collective."""
    group = dist.new_group(backend="gloo")

    def gather(own: Any) -> list:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own, group=group)
        return everyone

    return gather
