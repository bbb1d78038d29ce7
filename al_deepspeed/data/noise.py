"""Random latents as real shards with a manifest, for timing and tests."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from al_deepspeed.data.index import index_shards
from al_deepspeed.data.manifest import Manifest
from al_deepspeed.data.shards import CorpusInfo, Sample, write_shard

CAPTIONS = 4


def write_noise(
    folder: Path, counts: Mapping[tuple[int, int, int], int], *, channels: int, text_shape: tuple[int, int]
) -> Manifest:
    """Writes FOLDER/shard.tar and FOLDER/manifest.parquet.

    Args:
        counts: latent (frames, height, width) -> samples. Their numbers are slices of one random pool.
        text_shape: (length, width) of a caption's embedding, of which there are four.
    """
    random = np.random.default_rng(0)
    sizes = {shape: channels * int(np.prod(shape)) for shape in counts}
    pool = random.standard_normal(2 * max(sizes.values()), np.float32).astype(np.float16)
    captions = random.standard_normal((CAPTIONS, *text_shape), np.float32).astype(np.float16)
    info = CorpusInfo(
        codec="random",
        stride=(4, 8, 8),
        latent_mean=(0.0,) * channels,
        latent_std=(1.0,) * channels,
        text_encoder="random",
        empty_text_length=1,
    )

    def samples() -> Iterator[Sample]:
        for shape, count in counts.items():
            for number in range(count):
                start = int(random.integers(len(pool) - sizes[shape]))
                yield Sample(
                    key=f"{'x'.join(map(str, shape))}_{number}",
                    latent=pool[start : start + sizes[shape]].reshape(channels, *shape),
                    text=captions[number % CAPTIONS],
                    record={"source": "random numbers", "text_length": text_shape[0], "caption": "noise"},
                )

    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "shard.tar", info, np.zeros(text_shape, np.float16), samples())
    return index_shards([folder], folder / "manifest.parquet")[0]
