"""Batches from a stream, for data without a manifest: a WebDataset pipeline, any iterable of samples.

Every rank reads its own stream (shards are split among ranks as the pipeline does it), sees shapes only as it
reads, and agrees with the others on a window of micro-steps at a time; see scheduling/streaming.py. Of ranks
that share a model only the first reads, and hands the others what it read.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate

from al_deepspeed.errors import ConfigError, CorpusError, PlanError
from al_deepspeed.groups import DataRanks
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
        for number, sample in enumerate(self._samples):
            sides = _checked_sides(self._shape_of(sample), number)
            given = _checked_kind(sample.get("kind"), number) if isinstance(sample, dict) else ""
            yield (given or ("image" if sides[0] == 1 else "video"), *sides), sample


class _Iterable(IterableDataset):
    def __init__(self, samples: Iterable) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator:
        return iter(self._samples)


def _checked_sides(shape: Any, number: int) -> tuple[int, int, int]:
    """The same sizes as integers, if they are three whole numbers of at least 1."""
    try:
        given = tuple(shape)
        frames, height, width = (int(side) for side in given)
        whole = (frames, height, width) == given
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is a tensor's of many numbers
        whole = False
    if not whole or min(frames, height, width) < 1:
        raise CorpusError(
            f"sample {number} of the stream (from 0) has latent size {shape!r}; it must be (frames, height, "
            "width), whole numbers of at least 1. Leave such samples out of the stream, or correct shape_of."
        )
    return frames, height, width


def _checked_kind(kind: Any, number: int) -> str:
    """The same without blanks around it, if it is a string; nothing, where there is none."""
    if kind is not None and not isinstance(kind, str):
        raise CorpusError(
            f'sample {number} of the stream (from 0) has as its "kind" {kind!r}; it must be a string, or '
            "absent: then one latent frame is an image. Decode it, or leave it out."
        )
    return (kind or "").strip()


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


def gathering(ranks: DataRanks) -> Callable[[Any], list]:
    """All data-parallel ranks' objects for this one's, over a group of its own, since a thread uses it.
    Collective.
    """
    firsts = [ranks.of_rank.index(place) for place in range(ranks.size)]
    group = dist.new_group(backend="gloo")

    def gather(own: Any) -> list:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own, group=group)
        return [everyone[rank] for rank in firsts]

    return gather


def sharing(ranks: DataRanks) -> Callable[[Callable[[], Any]], Any]:
    """Of ranks that share batches the first reads for all of them. Collective."""
    if ranks.size == len(ranks.of_rank):
        return lambda read: read()
    places = np.array(ranks.of_rank)
    members = [np.flatnonzero(places == place).tolist() for place in range(ranks.size)]
    group = [dist.new_group(rank_list, backend="gloo") for rank_list in members][ranks.own]
    first = members[ranks.own][0]

    def share(read: Callable[[], Any]) -> Any:
        answer: tuple[Any, Exception | None] = (None, None)
        if dist.get_rank() == first:
            try:
                answer = (read(), None)
            except Exception as error:
                answer = (None, PlanError(f"{type(error).__name__}: {error}"))
        answers = [answer]
        dist.broadcast_object_list(answers, src=first, group=group)
        value, failure = answers[0]
        if failure is not None:
            raise failure
        return value

    return share
