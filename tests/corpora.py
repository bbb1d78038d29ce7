"""Corpora and costs that the scheduling tests share: those of a Wan-1.3B block stack on one H200."""

import numpy as np

from al_deepspeed.scheduling.cost import PowerCost, RooflineCost
from al_deepspeed.scheduling.layout import Plan
from al_deepspeed.scheduling.shapes import Corpus, corpus_from_samples

RELATIVE = PowerCost()
WAN = RooflineCost(floor=37.3, intercept=3.55, linear=0.005124, quadratic=2.9207e-07)
H200 = RooflineCost(floor=37.73, intercept=3.19, text=0.1979, linear=0.0049926, quadratic=2.9807e-07)
MIX = (  # latent frames, height, width, weight in percent: images and videos of 256 to 75,600 tokens
    (1, 32, 32, 15), (1, 64, 64, 10), (1, 96, 96, 5), (1, 128, 128, 10), (1, 60, 104, 5),
    (1, 90, 160, 5), (5, 60, 104, 6), (9, 60, 104, 6), (13, 60, 104, 5), (17, 60, 104, 5), (21, 60, 104, 8),
    (25, 60, 104, 3), (33, 60, 104, 4), (5, 90, 160, 4), (9, 90, 160, 3), (13, 90, 160, 2.5), (17, 90, 160,
    1.5), (21, 90, 160, 2),
)  # fmt: skip
MIX_MEMORY = int(2.2 * 75600)
PUBLIC = {  # sequence length -> samples of COCO val2017 and ActivityNet 1.3: benchmarks/plan_public.py
    96: 1, 120: 1, 140: 1, 160: 1, 180: 1, 192: 1, 240: 1, 252: 1, 280: 12, 300: 1, 308: 1, 320: 1, 324:
    1, 352: 1, 360: 1, 400: 5, 416: 2, 420: 4, 432: 7, 480: 17, 504: 4, 520: 1, 540: 18, 560: 10, 576:
    2, 600: 227, 640: 6, 660: 389, 672: 1, 676: 1, 704: 1, 720: 64, 780: 10, 792: 1, 800: 28, 816: 1,
    832: 1, 840: 9, 864: 16, 880: 156, 900: 13, 912: 2, 936: 1, 960: 117, 1008: 2, 1040: 1747, 1064: 2,
    1120: 255, 1140: 1, 1200: 1510, 1280: 82, 1360: 38, 1440: 33, 1444: 106, 1520: 30, 1560: 1207, 1600:
    54, 3120: 1653, 4680: 1406, 6240: 1199, 7800: 1054, 9360: 807, 10920: 721, 12480: 655, 14040: 543,
    15600: 540, 17160: 459, 18720: 410, 20280: 400, 21840: 353, 23400: 341, 24960: 344, 26520: 320,
    28080: 309, 29640: 288, 31200: 280, 32760: 247, 34320: 235, 35880: 245, 37440: 244, 39000: 216,
    40560: 213, 42120: 211, 43680: 190, 45240: 201, 46800: 187, 48360: 169, 49920: 198, 51480: 6295,
}  # fmt: skip


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
