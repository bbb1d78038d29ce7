"""Real runs of launch/train_wan.py that several test modules look at; each is made once a session."""

import json
from functools import cache
from pathlib import Path

import torch
from launching import launch
from safetensors.torch import load_file
from small_corpus import make_corpus

from al_deepspeed.telemetry import read_telemetry

REPOSITORY = Path(__file__).parent.parent
TRAINER = REPOSITORY / "launch" / "train_wan.py"
STEPS = 12  # four epochs of the small corpus
BATCHING = "data_efficiency.data_sampling.dual_constraint_batching"


def trainer_arguments(run: Path, base: Path, stage: int = 3, **changes) -> list[str]:
    """Twelve steps of the smallest model on the small corpus, G = 2, checkpoints at 5 and 10."""
    manifest = base / "corpus" / "manifest.parquet"
    values = {
        f"{BATCHING}.manifest": manifest if manifest.exists() else make_corpus(manifest.parent),
        f"{BATCHING}.max_tokens": 80,
        f"{BATCHING}.max_cost": 80,
        f"{BATCHING}.exponent": 1.0,
        "data_efficiency.data_sampling.num_workers": 1,
        "gradient_accumulation_steps": 2,
        "scheduler.params.warmup_max_lr": 1e-3,
        "scheduler.params.warmup_num_steps": 5,
        **changes,
    }
    return [
        *("--config", str(REPOSITORY / "launch" / "configs" / f"zero{stage}.json")),
        *(word for key, value in values.items() for word in ("--set", f"{key}={value}")),
        *("--run", str(run), "--precision", "fp32", "--max-steps", str(STEPS), "--epochs", "100"),
        *("--save-every", "5", "--validate-every", "4"),
    ]


@cache
def unbroken_run(base: Path) -> Path:
    """Two ranks of one node at ZeRO-3, from the first step to the exported model."""
    run = base / "unbroken"
    with launch(
        TRAINER, *trainer_arguments(run, base), folder=base / "unbroken-logs", time_limit_s=270
    ) as launched:
        launched.wait()
    return run


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Of the exported model."""
    return load_file(run / "model" / "diffusion_pytorch_model.safetensors")


def largest_difference(one: Path, other: Path) -> float:
    """Of any weight of two runs' exported models."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def what_was_trained(run: Path) -> list[tuple]:
    """Step by step: the micro-batches of every rank, and the loss."""
    keys = ("step", "epoch", "micro_step", "shape", "batch_size", "samples_total")
    return [(*(json.dumps(line[key]) for key in keys), line["loss"]) for line in read_telemetry(run)]
