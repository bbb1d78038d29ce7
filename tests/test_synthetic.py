"""The trainer's factory for `al-deepspeed calibrate`: the model, the loss and the batches of a run."""

from pathlib import Path

import pytest
import torch
from small_corpus import CHANNELS, TEXT_DIM, TEXT_LENGTH, make_corpus

from al_deepspeed.calibration.workload import load_factory
from al_deepspeed.config import BATCHING_KEY
from al_deepspeed.errors import ConfigError

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture
def calibration(monkeypatch):
    """As the command line names it."""
    monkeypatch.chdir(REPOSITORY)
    return load_factory("launch.train_wan:calibration")


def ds_config(manifest, **changes):
    batching = {"enabled": True, "manifest": str(manifest), "calibration": "not made yet.json"}
    sampling = {"enabled": True, "dual_constraint_batching": batching}
    efficiency = {"enabled": True, "seed": 1, "data_sampling": sampling}
    return {"torch_autocast": {"enabled": True}, "data_efficiency": efficiency, **changes}


def test_a_batch_of_any_size_and_shape_trains_the_runs_model(calibration, tmp_path):
    config = ds_config(make_corpus(tmp_path))
    words = ["--preset", "tiny", "--layers", "2", "--precision", "fp32", "--gradient-checkpointing"]
    model, synthetic = calibration([*words, "--set", "fused_adaln.enabled=true"], config)
    assert config["fused_adaln"] == {"enabled": True}  # the engine, which fuses, sees it too
    assert "torch_autocast" not in config
    assert model.training and model.gradient_checkpointing and len(model.blocks) == 2
    batch, loss = synthetic(3, (5, 6, 10))
    assert batch["noisy"].shape == batch["target"].shape == (3, CHANNELS, 5, 6, 10)
    assert batch["text"].shape == (3, TEXT_LENGTH, TEXT_DIM) and batch["timestep"].shape == (3,)
    value = loss(model, batch)
    prediction = model(batch["noisy"], batch["timestep"], batch["text"], return_dict=False)[0]
    assert value.item() == pytest.approx((prediction - batch["target"]).square().mean().item())
    value.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_same_seed_makes_the_same_weights(calibration, tmp_path):
    config = ds_config(make_corpus(tmp_path))
    first, second = (calibration(["--precision", "fp32"], dict(config))[0] for _ in range(2))
    assert all(
        torch.equal(one, two) for one, two in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_without_a_corpus_it_says_which_key_names_one(calibration):
    with pytest.raises(ConfigError, match=f"does not enable {BATCHING_KEY}"):
        calibration([], {})
