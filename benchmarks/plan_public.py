"""Sizes of public data as a corpus: pictures of COCO val2017 and segments of ActivityNet 1.3.

    python benchmarks/plan_public.py coco_val2017_sizes.csv activitynet13_segments.csv sizes.csv
    al-deepspeed plan --manifest sizes.csv --calibration C --max-tokens 166320 --world-size 16 --compare

The conversion, for a VAE of stride 4x8x8 and patch 1x2x2:
    a picture  keeps its size, cut down to multiples of 32 pixels a side (at least 64)
    a segment  is sampled at 2 frames a second, cut down to 4k + 1 frames, 1 to 129, at 480 x 832 pixels: the
               table has no pixel sizes. Segments that end before they start are left out, and counted.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path

FRAMES_A_SECOND, MOST_FRAMES = 2, 129


def pictures(path: Path) -> Iterator[tuple[int, int, int, str]]:
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            height, width = (max(64, int(row[side]) // 32 * 32) // 8 for side in ("height", "width"))
            yield 1, height, width, f"coco_{row['image_id']}"


def segments(path: Path) -> Iterator[tuple[int, int, int, str]]:
    left_out = 0
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            seconds = float(row["end_s"]) - float(row["start_s"])
            if seconds <= 0:
                left_out += 1
                continue
            frames = min(MOST_FRAMES, max(1, int(seconds * FRAMES_A_SECOND)))
            yield 1 + (frames - 1) // 4, 60, 104, f"{row['video']}_{number}"
    print(f"{left_out} segments without length left out", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("coco", type=Path)
    parser.add_argument("activitynet", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    with arguments.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["latent_frames", "latent_height", "latent_width", "key"])
        writer.writerows(pictures(arguments.coco))
        writer.writerows(segments(arguments.activitynet))


if __name__ == "__main__":
    main()
