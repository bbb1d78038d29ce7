"""Rectified flow: what is added to a latent, what the model must predict, where the randomness comes from.

A line joins a latent x and noise e; the model sees a point on it and predicts its direction:

    noisy = (1 - level) * x + level * e        target = e - x        timestep = 1000 * level

Level, condition dropout and noise are read, in this order, from a counter-based generator (Philox) keyed by
(seed, epoch, sample id), and from nothing else. So a sample's loss is the same whichever rank, micro-batch or
accumulation window it lands in, and after a resume. They are drawn in the loader's worker processes, where
prefetching hides them: the noise of a 75,600-token sample takes 0.12 s of one core.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from torch.utils.data import Dataset

from al_deepspeed.errors import ConfigError

TRAINING, VALIDATION = 0, 1  # two streams that share no draw
TIMESTEPS_A_LEVEL = 1000.0  # Wan counts timesteps from 0 to 1000


def _logit_normal(uniform: float) -> float:
    """Quantile of sigmoid(standard normal): most draws near the middle of the line."""
    return 1.0 / (1.0 + float(np.exp(-NormalDist().inv_cdf(uniform))))


# Name -> quantile function: maps a uniform draw in (0, 1) to a level in (0, 1).
TIMESTEPS = {"logit_normal": _logit_normal, "uniform": float}


@dataclass(frozen=True)
class Objective:
    """timesteps: an entry of TIMESTEPS. shift: > 1 moves levels towards noise, as longer sequences need.
    condition_dropout: probability that a sample sees the empty caption."""

    timesteps: str = "logit_normal"
    shift: float = 3.0
    condition_dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.timesteps not in TIMESTEPS:
            raise ConfigError(f"timesteps is {self.timesteps!r}; allowed: {', '.join(TIMESTEPS)}.")
        if not self.shift > 0:
            raise ConfigError(f"timestep shift is {self.shift}; it must be above 0 (1 shifts nothing).")
        if not 0 <= self.condition_dropout <= 1:
            raise ConfigError(f"condition dropout is {self.condition_dropout}; it must be from 0 to 1.")

    def level(self, uniform: float) -> float:
        """The noise level of a uniform draw in [0, 1): quantile, then shift."""
        level = TIMESTEPS[self.timesteps](min(max(uniform, 2.0**-53), 1 - 2.0**-53))
        return self.shift * level / (1 + (self.shift - 1) * level)


def generator(seed: int, stream: int, epoch: int, sample_id: int) -> np.random.Generator:
    """The random numbers of one sample in one epoch; equal on every machine."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, stream, epoch, sample_id))))


def noised(latent: torch.Tensor, noise: torch.Tensor, level: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(noisy, target) of one latent."""
    return (1 - level) * latent + level * noise, noise - latent


def flow_loss(model: torch.nn.Module, batch: dict, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Mean squared error of each sample, fp32 [B]; its mean is what `loss_weight` weighs."""
    prediction = model(
        hidden_states=batch["noisy"].to(device, dtype, non_blocking=True),
        timestep=batch["timestep"].to(device, non_blocking=True),
        encoder_hidden_states=batch["text"].to(device, dtype, non_blocking=True),
        return_dict=False,
    )[0]
    target = batch["target"].to(device, non_blocking=True)
    return (prediction.float() - target).square().flatten(1).mean(1)


class FlowDataset(Dataset):
    """Adds to a latent dataset what the objective needs: `ds[i] -> {noisy, target, timestep, text}`.

    `epoch` is read by worker processes too (shared memory): set it before iterating over the loader.
    """

    def __init__(self, latents: Dataset, objective: Objective, *, seed: int) -> None:
        self.latents = latents
        self.objective = objective
        self.seed = seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.latents)

    def __getitem__(self, sample_id: int) -> dict:
        draws = generator(self.seed, TRAINING, self.epoch, int(sample_id))
        level = self.objective.level(draws.random())
        drop = draws.random() < self.objective.condition_dropout
        return self.example(int(sample_id), draws, level, drop)

    def fixed(self, sample_id: int, level: float) -> dict:
        """A validation example: the same noise every time, at a given level, with its caption."""
        return self.example(sample_id, generator(self.seed, VALIDATION, 0, sample_id), level, False)

    def example(self, sample_id: int, draws: np.random.Generator, level: float, drop: bool) -> dict:
        sample = self.latents[sample_id]
        latent = sample["latent"].float()
        noise = torch.from_numpy(draws.standard_normal(latent.shape, dtype=np.float32))
        noisy, target = noised(latent, noise, level)
        return {
            "noisy": noisy,
            "target": target,
            "timestep": torch.tensor(TIMESTEPS_A_LEVEL * level, dtype=torch.float32),
            "text": self.latents.empty_text if drop else sample["text"],
        }
