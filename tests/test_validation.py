"""Fixed-noise validation: which forwards run, on which rank, and what the figures are."""

import pytest
import torch
from test_objective import Constant, Latents

from al_deepspeed.scheduling.shapes import corpus_from_samples
from al_deepspeed.training.objective import FlowDataset, Objective
from al_deepspeed.training.validation import Validation, items, share


def corpus():
    """Samples 0, 2, 4 are images of 6 tokens, samples 1, 3 clips of 18."""
    return corpus_from_samples([1, 3, 1, 3, 1], [4] * 5, [6] * 5)


class Mixed(Latents):
    def __getitem__(self, i):
        return Latents(frames=3 if i % 2 else 1)[i]


def test_items_are_the_first_samples_of_each_shape_at_each_level_longest_first():
    chosen = items(corpus(), [0.2, 0.8], samples_a_shape=2)
    assert [(item.sample_id, item.level) for item in chosen] == [
        *((1, 0.2), (1, 0.8), (3, 0.2), (3, 0.8)),
        *((0, 0.2), (0, 0.8), (2, 0.2), (2, 0.8)),
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 50])
def test_every_rank_runs_as_many_forwards_and_each_item_counts_once(world_size):
    chosen = items(corpus(), [0.2, 0.8], samples_a_shape=2)
    shares = [share(chosen, rank, world_size) for rank in range(world_size)]
    assert len({len(part) for part in shares}) == 1 and shares[0]
    counted = [item for part in shares for item in part if item.weight]
    assert sorted(counted, key=str) == sorted(chosen, key=str)


def test_figures_are_means_over_the_items_of_a_shape():
    dataset = FlowDataset(Mixed(), Objective("uniform", shift=1), seed=5)
    validation = Validation(dataset, corpus(), levels=2, samples_a_shape=2)
    model = Constant(0.5)
    figures = validation(model, torch.device("cpu"), torch.float32)
    # A constant's loss does not depend on the level, and the noise is fixed: straight from the targets.
    expected = {i: (dataset.fixed(i, 0.25)["target"] - 0.5).square().mean().item() for i in range(4)}
    image, video = (expected[0] + expected[2]) / 2, (expected[1] + expected[3]) / 2
    assert figures["image 1x4x6"] == pytest.approx(image, rel=1e-6)
    assert figures["video 3x4x6"] == pytest.approx(video, rel=1e-6)
    assert figures["all"] == pytest.approx((image + video) / 2, rel=1e-6)
    assert figures == validation(model, torch.device("cpu"), torch.float32)
    assert model.training
