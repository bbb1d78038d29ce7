"""The objective against closed forms; its randomness as a function of (seed, epoch, sample id)."""

import math

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from al_deepspeed.errors import ConfigError
from al_deepspeed.training.objective import FlowDataset, Objective, flow_loss, generator, noised


class Latents:
    """Two-channel latents and captions that say which sample they belong to."""

    empty_text = torch.zeros(3, 8, dtype=torch.float16)

    def __init__(self, frames=1, samples=16):
        self.frames, self.samples = frames, samples

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        latent = torch.from_numpy(np.random.default_rng(i).standard_normal((2, self.frames, 4, 6))).half()
        return {
            "latent": latent,
            "text": torch.full((3, 8), float(i + 1), dtype=torch.float16),
            "key": str(i),
        }


class Constant(torch.nn.Module):
    """Predicts one number everywhere."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, hidden_states, timestep, encoder_hidden_states, return_dict):
        return (torch.full_like(hidden_states, self.value),)


@pytest.mark.parametrize("level", [0.0, 0.25, 1.0])
def test_noisy_latent_lies_on_the_line_and_its_target_is_the_direction(level):
    latent, noise = torch.randn(2, 1, 4, 6, dtype=torch.float64), torch.randn(2, 1, 4, 6, dtype=torch.float64)
    noisy, target = noised(latent, noise, level)
    # One step along the target from the noisy latent reaches the noise; back by the level, the latent.
    assert torch.allclose(noisy + (1 - level) * target, noise, atol=1e-14, rtol=0)
    assert torch.allclose(noisy - level * target, latent, atol=1e-14, rtol=0)


def test_levels_against_hand_worked_quantiles():
    assert Objective("uniform", shift=1).level(0.3) == pytest.approx(0.3, abs=1e-15)
    # shift 3: 3 * 0.5 / (1 + 2 * 0.5) = 0.75
    assert Objective("uniform", shift=3).level(0.5) == pytest.approx(0.75, abs=1e-15)
    # The normal's 97.5% quantile is 1.959964; its sigmoid is 1 / (1 + exp(-1.959964)).
    expected = 1 / (1 + math.exp(-1.959963984540054))
    assert Objective("logit_normal", shift=1).level(0.975) == pytest.approx(expected, abs=1e-12)
    assert Objective("logit_normal", shift=1).level(0.5) == pytest.approx(0.5, abs=1e-15)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_uniform_draw_give_finite_levels(uniform):
    assert 0 <= Objective("logit_normal").level(uniform) <= 1


def test_logit_normal_draws_have_the_distribution_asked_for():
    draws = [Objective("logit_normal", shift=1).level(generator(7, 0, 0, i).random()) for i in range(4000)]
    logits = np.log(np.array(draws) / (1 - np.array(draws)))
    # 4,000 draws: the mean's standard error is 0.016, the deviation's 0.011.
    assert abs(logits.mean()) < 0.06 and abs(logits.std() - 1) < 0.05


def test_noise_is_standard_normal():
    noise = generator(7, 0, 3, 12).standard_normal(200_000, dtype=np.float32)
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1) < 0.01


def test_loss_of_a_constant_prediction_is_its_mean_square_distance():
    batch = {
        "noisy": torch.zeros(2, 2, 1, 2, 2),
        "target": torch.stack([torch.full((2, 1, 2, 2), 1.0), torch.full((2, 1, 2, 2), -2.0)]),
        "timestep": torch.tensor([100.0, 900.0]),
        "text": torch.zeros(2, 3, 8),
    }
    losses = flow_loss(Constant(0.5), batch, torch.device("cpu"), torch.float32)
    assert losses.tolist() == [0.25, 6.25]  # (0.5 - 1)^2 and (0.5 + 2)^2


def test_an_example_is_a_function_of_seed_epoch_and_sample():
    dataset = FlowDataset(Latents(), Objective(), seed=5)
    first = dataset[3]
    np.random.seed(0)
    torch.manual_seed(0)
    again = FlowDataset(Latents(), Objective(), seed=5)[np.int64(3)]
    assert all(torch.equal(first[key], again[key]) for key in first)
    dataset.epoch = 1
    other_epoch = dataset[3]
    other_seed = FlowDataset(Latents(), Objective(), seed=6)[3]
    for other in (other_epoch, other_seed, dataset[4]):
        assert not torch.equal(first["target"], other["target"])
        assert first["timestep"] != other["timestep"]


def test_validation_noise_stays_and_differs_from_training_noise():
    dataset = FlowDataset(Latents(), Objective(), seed=5)
    first = dataset.fixed(3, 0.4)
    dataset.epoch = 9
    again = dataset.fixed(3, 0.4)
    assert torch.equal(first["noisy"], again["noisy"]) and first["timestep"].item() == pytest.approx(400)
    dataset.epoch = 0
    assert not torch.equal(first["target"], dataset[3]["target"])
    # The noise does not depend on the level: target = noise - latent is the same.
    assert torch.equal(first["target"], dataset.fixed(3, 0.9)["target"])


def test_condition_dropout_replaces_the_caption_by_the_stored_empty_one():
    always = FlowDataset(Latents(), Objective(condition_dropout=1), seed=5)
    never = FlowDataset(Latents(), Objective(condition_dropout=0), seed=5)
    assert torch.equal(always[3]["text"], Latents.empty_text)
    assert torch.equal(never[3]["text"], torch.full((3, 8), 4.0, dtype=torch.float16))
    assert torch.equal(always[3]["target"], never[3]["target"])  # the choice takes nothing from the noise
    some = FlowDataset(Latents(samples=2000), Objective(condition_dropout=0.1), seed=5)
    dropped = sum(bool((some[i]["text"] == 0).all()) for i in range(2000))
    assert 150 <= dropped <= 250  # binomial: 200 +- 13


def test_worker_processes_see_the_epoch():
    dataset = FlowDataset(Latents(), Objective(), seed=5)
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=1, persistent_workers=True)
    dataset.epoch = 1
    assert torch.equal(next(iter(loader))["target"][1], dataset[1]["target"])
    dataset.epoch = 2
    assert torch.equal(next(iter(loader))["target"][1], dataset[1]["target"])


def test_a_samples_loss_is_the_same_alone_and_in_any_batch():
    from al_deepspeed.training import wan

    torch.manual_seed(0)
    model = wan.build(wan.preset("tiny", channels=2, text_dim=8), {}).double()
    dataset = FlowDataset(Latents(frames=3), Objective(), seed=5)

    def losses(ids):
        batch = default_collate([dataset[i] for i in ids])
        return flow_loss(model, batch, torch.device("cpu"), torch.float64).tolist()

    alone = {i: losses([i])[0] for i in range(5)}
    for ids in ([0, 1, 2, 3, 4], [4, 1], [3, 0, 4]):
        assert losses(ids) == pytest.approx([alone[i] for i in ids], rel=1e-6)


@pytest.mark.parametrize(
    "settings", [{"timesteps": "cosine"}, {"shift": 0}, {"condition_dropout": 1.5}, {"shift": float("nan")}]
)
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ConfigError, match=r"allowed|must be"):
        Objective(**settings)
