"""Corpora and costs that the scheduling tests share: those of a Wan-1.3B block stack on one H200."""

import numpy as np

from al_deepspeed.scheduling.cost import PowerCost, RooflineCost
from al_deepspeed.scheduling.layout import Plan
from al_deepspeed.scheduling.shapes import Corpus, corpus_from_samples

RELATIVE = PowerCost()
WAN = RooflineCost(floor=37.3, intercept=3.55, linear=0.005124, quadratic=2.9207e-07)
MIX = (  # latent frames, height, width, weight in percent: images and videos of 256 to 75,600 tokens
    (1, 32, 32, 15), (1, 64, 64, 10), (1, 96, 96, 5), (1, 128, 128, 10), (1, 60, 104, 5),
    (1, 90, 160, 5), (5, 60, 104, 6), (9, 60, 104, 6), (13, 60, 104, 5), (17, 60, 104, 5), (21, 60, 104, 8),
    (25, 60, 104, 3), (33, 60, 104, 4), (5, 90, 160, 4), (9, 90, 160, 3), (13, 90, 160, 2.5), (17, 90, 160,
    1.5), (21, 90, 160, 2),
)  # fmt: skip
MIX_MEMORY = int(2.2 * 75600)


def corpus_of(counts: dict[int, int], seed: int = 0, kinds: dict[int, str] | None = None) -> Corpus:
    """A corpus with so many samples of each sequence length; lengths below 5,000 are images."""
    lengths = np.repeat(list(counts), list(counts.values()))
    lengths = np.random.default_rng(seed).permutation(lengths)
    frames = np.where(lengths < 5000, 1, 2)
    names = None if kinds is None else [kinds[length] for length in lengths.tolist()]
    return corpus_from_samples(frames, np.full(len(lengths), 2), 2 * lengths, tokens=lengths, kinds=names)


def mixed_corpus(samples: int, seed: int = 0) -> Corpus:
    """Samples drawn from MIX by its weights."""
    shapes = np.array([row[:3] for row in MIX])
    weights = np.array([row[3] for row in MIX], dtype=float)
    drawn = np.random.default_rng(seed).choice(len(MIX), samples, p=weights / weights.sum())
    return corpus_from_samples(*shapes[drawn].T)


def consumed(plan: Plan, start: int = 0, end: int | None = None) -> np.ndarray:
    """Ids of the samples that count, in the order of the grid."""
    return np.concatenate(
        [
            plan.sample_ids(micro_step, rank)
            for micro_step in range(start, plan.micro_steps if end is None else end)
            for rank in range(plan.world_size)
            if not plan.filler[micro_step, rank]
        ]
    )
