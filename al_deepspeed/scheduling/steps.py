"""Which micro-steps make a step: G of them that add up to nearly the same tokens and samples everywhere.

Micro-steps of one class differ from those of another, so G at random would make uneven steps. First every
class is spread evenly over the epoch. Then, in windows of `lookahead` micro-steps, the window's micro-steps
are ordered by tokens and cut into G layers; each step gets one of every layer. Layer after layer is dealt
out again
so that the sums of squared deviations, of tokens and of samples, become least: a linear assignment each time.
"""

import itertools

import numpy as np
from scipy.optimize import linear_sum_assignment

from al_deepspeed.scheduling.pieces import shuffled, spread_evenly
from al_deepspeed.scheduling.shapes import FloatArray, IntArray

SWEEPS = 2
LARGEST_ASSIGNMENT = 64  # steps dealt out at once: an assignment takes the cube of their number


def order_micro_steps(
    amounts: FloatArray, home: IntArray, accumulation: int, lookahead: int, bits: np.random.PCG64
) -> IntArray:
    """The order in which micro-steps run; G in a row are a step.

    Args:
        amounts: what should be even over steps, each column in units of its own: [micro_steps, columns].
            Layers are cut by the first.
        home: class of each micro-step.
        accumulation: G; there are whole steps.
        lookahead: micro-steps that may be exchanged with one another.
    """
    mixed = np.argsort(spread_evenly(home, bits), kind="stable")
    if accumulation == 1:
        return mixed
    steps = len(home) // accumulation
    window = np.clip(lookahead // accumulation, 1, LARGEST_ASSIGNMENT)
    windows = max(1, steps // window)
    edges = np.arange(windows + 1) * steps // windows * accumulation
    parts = [mixed[start:end] for start, end in itertools.pairwise(edges.tolist())]
    relative = amounts / np.maximum(1e-300, amounts.mean(axis=0))
    return np.concatenate([part[_join(relative[part], accumulation, bits)] for part in parts])


def _join(amounts: FloatArray, accumulation: int, bits: np.random.PCG64) -> IntArray:
    """Order of one window's micro-steps, G in a row a step, the steps themselves in random order."""
    steps = len(amounts) // accumulation
    layers = np.argsort(-amounts[:, 0], kind="stable").reshape(accumulation, steps)
    amounts = amounts - amounts.mean(axis=0)
    joined = layers.copy()
    total = np.zeros((steps, amounts.shape[1]))
    for layer in range(accumulation * (1 + SWEEPS) if steps > 1 else 0):
        place = layer % accumulation
        if layer >= accumulation:
            total -= amounts[joined[place]]
        _, joined[place] = linear_sum_assignment(total @ amounts[layers[place]].T)
        joined[place] = layers[place][joined[place]]
        total += amounts[joined[place]]
    return joined.T[shuffled(steps, bits)].reshape(-1)
