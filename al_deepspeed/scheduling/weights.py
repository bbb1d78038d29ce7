"""What each micro-batch's mean loss is multiplied with, so that a step's gradient is the mean asked for.

DeepSpeed averages gradients over R ranks and G micro-steps. With `engine.backward(mean_loss * w)` and
    sample       w = n * R*G / n_step    n samples here, n_step in the step: every sample weighs the same
    token        the same with n counted in tokens
    micro_batch  w = R*G / m_step        m_step micro-batches of the step that are no filler: 1 as a rule
the weights of a step sum to R*G. A filler weighs 0 and counts nowhere. With `normalise_by="epoch"` the mean
of n_step over the epoch takes its place: every sample weighs the same all epoch, and R*G holds for the mean
step.
"""

import numpy as np

from al_deepspeed.errors import PlanError
from al_deepspeed.scheduling.shapes import FloatArray, IntArray

LOSS_WEIGHTINGS = ("sample", "token", "micro_batch")
NORMALISATIONS = ("step", "epoch")
LR_SCALINGS = ("none", "linear", "sqrt")


def loss_weights(
    size: IntArray, tokens: IntArray, filler: np.ndarray, accumulation: int, weighting: str, normalise_by: str
) -> FloatArray:
    """Weights of a grid [micro_steps, R] of micro-batches with B = size and S = tokens."""
    amount = {
        "sample": lambda: size,
        "token": lambda: size.astype(np.int64) * tokens,
        "micro_batch": lambda: np.ones_like(size),
    }[weighting]()
    amount = np.where(filler, 0, amount)
    per_step = amount.reshape(-1, accumulation * amount.shape[1]).sum(axis=1, dtype=np.float64)
    slots = accumulation * amount.shape[1]
    if normalise_by == "epoch":
        return amount * (slots / per_step.mean())
    return amount * np.repeat(slots / per_step, accumulation)[:, None]


def lr_factors(step_samples: IntArray, scaling: str) -> FloatArray:
    """Learning-rate factor a step from its sample count, by DeepSpeed's names of the rules.

    Args:
        step_samples: samples of each step over all ranks and micro-steps.
        scaling: "none", "linear" (n / mean) or "sqrt" (its root).
    """
    if scaling not in LR_SCALINGS:
        raise PlanError(f"lr_scaling is {scaling!r}; allowed are {', '.join(LR_SCALINGS)}.")
    ratio = np.asarray(step_samples) / np.mean(step_samples)
    return {"none": np.ones_like, "linear": np.asarray, "sqrt": np.sqrt}[scaling](ratio)
