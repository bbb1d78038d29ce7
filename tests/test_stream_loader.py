"""Batches from a WebDataset pipeline on one rank, without a launch."""

import math

import numpy as np
import pytest
import torch
import webdataset
from small_corpus import SHAPES, make_corpus

from al_deepspeed.errors import ConfigError, PlanError
from al_deepspeed.loader import Listener
from al_deepspeed.scheduling.constraints import Limits
from al_deepspeed.scheduling.cost import PowerCost
from al_deepspeed.scheduling.streaming import StreamSampler
from al_deepspeed.stream_loader import ShapedSamples, StreamedBatches, latent_shape

KEYS = sorted("x".join(map(str, shape)) + f"_{number}" for shape in SHAPES for number in range(SHAPES[shape]))


def sample_of(record: dict) -> dict:
    latent = torch.from_numpy(record["latent.npy"])
    return {"latent": latent, "text": torch.from_numpy(record["text.npy"]), "key": record["__key__"]}


def has_latent(record: dict) -> bool:
    return "latent.npy" in record


def pipeline(folder):
    shard = str(make_corpus(folder).parent / "shard.tar")
    return webdataset.WebDataset([shard], shardshuffle=False).decode().select(has_latent).map(sample_of)


def loader_of(dataset, num_workers=0, shape_of=None) -> tuple[StreamedBatches, StreamSampler]:
    sampler = StreamSampler(
        ShapedSamples(dataset, shape_of, num_workers),
        PowerCost(),
        Limits(160, 6400.0),
        rank=0,
        world_size=1,
        gather=lambda report: [report],
        accumulation=2,
        lookahead=4,
    )
    return StreamedBatches(sampler, listener=Listener()), sampler


@pytest.mark.parametrize("workers", [0, 1])
def test_a_webdataset_pipeline_gives_each_sample_once_an_epoch_in_batches_of_one_shape(tmp_path, workers):
    loader, sampler = loader_of(pipeline(tmp_path), workers)
    for epoch in (0, 1):
        keys, weights, micro_steps = [], 0.0, 0
        assert loader.epoch == epoch
        for batch in loader:
            assert batch["latent"].shape[2:] == batch["shape"]
            assert len(batch["sample_ids"]) == len(batch["key"]) == len(batch["latent"])
            frames, height, width = batch["shape"]
            assert batch["tokens"] == frames * height * width // 4
            keys += [] if batch["filler"] else batch["key"]
            weights += batch["loss_weight"].item()
            micro_steps += 1
            sampler.advance()
        assert sorted(keys) == KEYS
        assert weights == pytest.approx(micro_steps)  # R*G a step of G micro-steps, and R is 1


def test_what_has_no_shape_is_refused_with_what_it_has():
    with pytest.raises(
        ConfigError, match=r'no "latent" \[C, F, H, W\] that gives its shape, but pixels, text'
    ):
        latent_shape({"pixels": torch.zeros(3, 1, 8, 8), "text": ""})
    loader, _ = loader_of([torch.zeros(4, 1, 8, 8)])
    with pytest.raises(PlanError, match=r"rank 0 could not read its stream: ConfigError: .* but Tensor"):
        next(iter(loader))


NO_SHAPES = [
    (0, 4, 4), (1, 4), (1, 4, 4, 4), (1, 4.5, 4), None, 4, "144", ("a", 4, 4), (1, None, 4), (1, math.nan, 4),
    (math.inf, 4, 4), (1, torch.zeros(2), 4), torch.tensor(4),
]  # fmt: skip


@pytest.mark.parametrize("shape", NO_SHAPES, ids=str)
def test_a_shape_that_is_none_is_refused_as_a_manifest_would(shape):
    shapes = iter([(1, 4, 4), shape])
    loader, _ = loader_of([{"pixels": torch.zeros(3, 1, 8, 8)}] * 2, shape_of=lambda sample: next(shapes))
    with pytest.raises(
        PlanError, match=r"sample 1 of the stream \(from 0\) has latent size .*; it must be .* at least 1"
    ):
        next(iter(loader))


@pytest.mark.parametrize("shape", [(1, 4, 4), [1.0, 4.0, 4.0], torch.tensor([1, 4, 4]), np.array([1, 4, 4])])
def test_whole_numbers_of_any_type_are_a_shape(shape):
    samples = ShapedSamples([{"pixels": torch.zeros(3)}], lambda sample: shape, 0)
    assert [shape for shape, _ in samples] == [("image", 1, 4, 4)]


def test_a_blank_kind_is_none_given_and_blanks_around_one_are_none_of_it():
    kinds = [None, "", " ", "clip", " clip ", ...]
    samples = [{"latent": torch.zeros(4, frames, 4, 4), "kind": kind} for frames in (1, 5) for kind in kinds]
    for sample in samples:
        if sample["kind"] is ...:
            del sample["kind"]
    read = [shape[0] for shape, _ in ShapedSamples(samples, None, 0)]
    assert read == [
        *("image", "image", "image", "clip", "clip", "image"),
        *("video", "video", "video", "clip", "clip", "video"),
    ]


@pytest.mark.parametrize("kind", [3, b"image", torch.tensor(1), ["image"]], ids=str)
def test_a_kind_that_is_no_string_is_refused(kind):
    good = {"latent": torch.zeros(4, 1, 4, 4)}
    loader, _ = loader_of([good, good, {**good, "kind": kind}])
    with pytest.raises(PlanError, match=r'sample 2 of the stream .* as its "kind" .* must be a string'):
        next(iter(loader))


def test_a_shape_can_be_told(tmp_path):
    loader, sampler = loader_of([{"pixels": torch.zeros(3, 1, 8, 8)}] * 3, shape_of=lambda sample: (1, 4, 4))
    for batch in loader:
        assert batch["shape"] == (1, 4, 4)
        sampler.advance()
    assert loader.epoch == 1
