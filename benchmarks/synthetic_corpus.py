"""A corpus of random latents in Wan's own sizes: `python benchmarks/synthetic_corpus.py OUT [tiny]`.

For timing, in real shards with a manifest: 16-channel latents, captions of 512 x 4096 as Wan's text encoder
gives. Pictures and 480p clips of 1 to 81 frames, so S goes from 256 to 32,760. `tiny` divides sides and
captions, to try it on CPUs. The numbers are slices of one random pool; how long a step takes does not depend
on them.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from al_deepspeed.data.index import index_shards
from al_deepspeed.data.shards import CorpusInfo, Sample, write_shard

Shape = tuple[int, int, int]
# Latent (frames, height, width) -> samples.
COUNTS = {
    (1, 32, 32): 24,
    (1, 60, 104): 12,
    (1, 90, 160): 6,
    (5, 60, 104): 6,
    (9, 60, 104): 6,
    (13, 60, 104): 6,
    (21, 60, 104): 10,
}
CHANNELS = 16
POOL = 1 << 23
CAPTIONS = 4


def make(out: Path, counts: Mapping[Shape, int], *, tiny: bool) -> None:
    """Writes OUT/shard.tar and OUT/manifest.parquet."""
    out.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    pool = random.standard_normal(POOL, np.float32).astype(np.float16)
    text = (16, 64) if tiny else (512, 4096)
    captions = random.standard_normal((CAPTIONS, *text), np.float32).astype(np.float16)
    info = CorpusInfo(
        codec="random",
        stride=(4, 8, 8),
        latent_mean=(0.0,) * CHANNELS,
        latent_std=(1.0,) * CHANNELS,
        text_encoder="random",
        empty_text_length=1,
    )

    def samples() -> Iterator[Sample]:
        for shape, count in counts.items():
            size = CHANNELS * int(np.prod(shape))
            for number in range(count):
                start = int(random.integers(POOL - size))
                yield Sample(
                    key=f"{'x'.join(map(str, shape))}_{number}",
                    latent=pool[start : start + size].reshape(CHANNELS, *shape),
                    text=captions[number % CAPTIONS],
                    record={"source": "random numbers", "text_length": text[0], "caption": ""},
                )

    write_shard(out / "shard.tar", info, np.zeros(text, np.float16), samples())
    manifest, _ = index_shards([out], out / "manifest.parquet")
    print(f"{manifest.path}: {manifest.table.num_rows} samples")


def main() -> None:
    tiny = sys.argv[2:] == ["tiny"]
    divisor = 5 if tiny else 1
    counts = {(frames, *(side // divisor for side in sides)): n for (frames, *sides), n in COUNTS.items()}
    make(Path(sys.argv[1]), counts, tiny=tiny)


if __name__ == "__main__":
    main()
