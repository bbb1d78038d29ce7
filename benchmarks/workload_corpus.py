"""Random latents in the shapes of workload_mix.csv: `python benchmarks/workload_corpus.py OUT SAMPLES`.

For timing strategies on pictures and clips of 1 to 129 frames, up to 720p: S from 256 to 75,600. `--tiny`
divides sides by ten and shortens captions, to try it on CPUs.
"""

import argparse
import csv
from pathlib import Path

from synthetic_corpus import Shape, make

MIX = Path(__file__).with_name("workload_mix.csv")


def counts(samples: int, *, tiny: bool) -> dict[Shape, int]:
    """Latent (frames, height, width) -> samples, by the mix's weights, at least one each."""
    with MIX.open() as file:
        rows = list(csv.DictReader(file))
    found = {}
    for row in rows:
        frames, *sides = (int(row[f"latent_{side}"]) for side in ("frames", "height", "width"))
        if tiny:
            sides = [max(4, 2 * round(side / 20)) for side in sides]
        shape = (frames, *sides)
        found[shape] = found.get(shape, 0) + max(1, round(samples * float(row["weight_percent"]) / 100))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("samples", type=int)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    make(arguments.out, counts(arguments.samples, tiny=arguments.tiny), tiny=arguments.tiny)
