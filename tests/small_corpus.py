"""24 random latents in 4 shapes, as real shards with a manifest: seconds of training on two ranks."""

from pathlib import Path

import numpy as np

from al_deepspeed.data.index import index_shards
from al_deepspeed.data.shards import CorpusInfo, Sample, write_shard

CHANNELS, TEXT_LENGTH, TEXT_DIM = 4, 3, 8
# Latent shape -> samples. S is 4, 16, 18 and 80.
SHAPES = {(1, 4, 4): 9, (1, 8, 8): 6, (3, 4, 6): 5, (5, 8, 8): 4}


def make_corpus(folder: Path) -> Path:
    """Writes the shard and returns the manifest's path."""
    random = np.random.default_rng(0)
    samples = []
    for shape, count in SHAPES.items():
        for number in range(count):
            samples.append(
                Sample(
                    key="x".join(map(str, shape)) + f"_{number}",
                    latent=random.standard_normal((CHANNELS, *shape)).astype(np.float16),
                    text=random.standard_normal((TEXT_LENGTH, TEXT_DIM)).astype(np.float16),
                    record={"source": "random", "text_length": TEXT_LENGTH, "caption": "noise"},
                )
            )
    info = CorpusInfo(
        codec="random",
        stride=(4, 8, 8),
        latent_mean=(0.0,) * CHANNELS,
        latent_std=(1.0,) * CHANNELS,
        text_encoder="random",
        empty_text_length=1,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "shard.tar", info, np.zeros((TEXT_LENGTH, TEXT_DIM), np.float16), samples)
    manifest, _ = index_shards([folder], folder / "manifest.parquet")
    return manifest.path
