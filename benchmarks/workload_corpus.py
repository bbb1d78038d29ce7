"""Random latents in the shapes of workload_mix.csv: `python benchmarks/workload_corpus.py OUT SAMPLES`.

For timing strategies on pictures and clips of 1 to 129 frames, up to 720p: S from 256 to 75,600. `--tiny`
divides sides by ten and shortens captions, to try it on CPUs. The numbers are slices of one random pool; how
long a step takes does not depend on them.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from al_deepspeed.data.index import index_shards
from al_deepspeed.data.shards import CorpusInfo, Sample, write_shard

MIX = Path(__file__).with_name("workload_mix.csv")
CHANNELS = 16
POOL = 1 << 23


def counts(samples: int, *, tiny: bool) -> dict[tuple[int, int, int], int]:
    """Latent (frames, height, width) -> samples, by the mix's weights, at least one each."""
    with MIX.open() as file:
        rows = list(csv.DictReader(file))
    found = {}
    for row in rows:
        frames, *sides = (int(row[f"latent_{side}"]) for side in ("frames", "height", "width"))
        if tiny:
            sides = [max(4, 2 * round(side / 20)) for side in sides]
        number = max(1, round(samples * float(row["weight_percent"]) / 100))
        shape = (frames, *sides)
        found[shape] = found.get(shape, 0) + number
    return found


def make(out: Path, samples: int, *, tiny: bool) -> None:
    """Writes OUT/shard.tar and OUT/manifest.parquet."""
    out.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    pool = random.standard_normal(POOL, np.float32).astype(np.float16)
    text = (16, 64) if tiny else (512, 4096)
    captions = [random.standard_normal(text, np.float32).astype(np.float16) for _ in range(4)]
    info = CorpusInfo(
        codec="random",
        stride=(4, 8, 8),
        latent_mean=(0.0,) * CHANNELS,
        latent_std=(1.0,) * CHANNELS,
        text_encoder="random",
        empty_text_length=1,
    )

    def latents() -> Iterator[Sample]:
        for shape, count in counts(samples, tiny=tiny).items():
            size = CHANNELS * int(np.prod(shape))
            for number in range(count):
                start = int(random.integers(POOL - size))
                yield Sample(
                    key=f"{'x'.join(map(str, shape))}_{number}",
                    latent=pool[start : start + size].reshape(CHANNELS, *shape),
                    text=captions[number % len(captions)],
                    record={"source": "random numbers", "text_length": text[0], "caption": ""},
                )

    write_shard(out / "shard.tar", info, np.zeros(text, np.float16), latents())
    manifest, _ = index_shards([out], out / "manifest.parquet")
    print(f"{manifest.path}: {manifest.table.num_rows} samples")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("samples", type=int)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    make(arguments.out, arguments.samples, tiny=arguments.tiny)
