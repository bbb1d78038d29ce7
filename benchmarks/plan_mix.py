"""A manifest of sizes alone, drawn from workload_mix.csv: `python benchmarks/plan_mix.py OUT.csv`.

For `al-deepspeed plan` and plan_tradeoff.py, which read no latents: pictures and clips of 1 to 129 frames, S
from 256 to 75,600.
"""

import argparse
import csv
from pathlib import Path

import numpy as np

MIX = Path(__file__).with_name("workload_mix.csv")
SIDES = ("latent_frames", "latent_height", "latent_width")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=200_000)
    arguments = parser.parse_args()
    with MIX.open(newline="") as file:
        rows = list(csv.DictReader(file))
    weights = np.array([float(row["weight_percent"]) for row in rows])
    drawn = np.random.default_rng(0).choice(len(rows), arguments.samples, p=weights / weights.sum())
    with arguments.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(SIDES)
        writer.writerows([rows[place][side] for side in SIDES] for place in drawn.tolist())


if __name__ == "__main__":
    main()
