"""Which micro-steps make a step: G of them whose numbers of tokens add up to nearly the same everywhere.

Micro-steps of a class differ in tokens from those of another, so G at random would make uneven steps. First
every class is spread evenly over the epoch. Then, in windows of `lookahead` micro-steps, the window's
micro-steps are ordered by tokens and cut into G layers; each layer is dealt to the window's steps, the most
tokens to the step that has the fewest so far.
"""

import numpy as np

from al_deepspeed.scheduling.pieces import shuffled, spread_evenly
from al_deepspeed.scheduling.shapes import IntArray


def order_micro_steps(
    tokens: IntArray, home: IntArray, accumulation: int, lookahead: int, bits: np.random.PCG64
) -> IntArray:
    """The order in which micro-steps run; G in a row are a step.

    Args:
        tokens, home: tokens and class of each micro-step; there are whole steps of them.
        accumulation: G.
        lookahead: micro-steps that may be exchanged with one another.
    """
    mixed = np.argsort(spread_evenly(home, bits), kind="stable")
    if accumulation == 1:
        return mixed
    steps = len(tokens) // accumulation
    windows = max(1, steps // max(1, lookahead // accumulation))
    edges = np.arange(windows + 1) * steps // windows * accumulation
    parts = [mixed[start:end] for start, end in zip(edges[:-1], edges[1:], strict=True)]
    return np.concatenate([part[_join(tokens[part], accumulation, bits)] for part in parts])


def _join(tokens: IntArray, accumulation: int, bits: np.random.PCG64) -> IntArray:
    """Order of one window's micro-steps, G in a row a step, the steps themselves in random order."""
    steps = len(tokens) // accumulation
    layers = np.argsort(-tokens, kind="stable").reshape(accumulation, steps)
    joined = np.empty((steps, accumulation), dtype=np.int64)
    total = np.zeros(steps, dtype=np.int64)
    for place, layer in enumerate(layers):
        fewest_first = np.argsort(total, kind="stable")
        joined[fewest_first, place] = layer
        total[fewest_first] += tokens[layer]
    return joined[shuffled(steps, bits)].reshape(-1)
