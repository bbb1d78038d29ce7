"""A corpus of random latents in Wan's own sizes: `python benchmarks/synthetic_corpus.py OUT [tiny]`.

For timing, in real shards with a manifest: 16-channel latents, captions of 512 x 4096 as Wan's text encoder
gives. Pictures and 480p clips of 1 to 81 frames, so S goes from 256 to 32,760. `tiny` divides sides and
captions, to try it on CPUs. How long a step takes does not depend on the numbers.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from al_deepspeed.data.noise import write_noise

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


def make(out: Path, counts: Mapping[Shape, int], *, tiny: bool) -> None:
    """Writes OUT/shard.tar and OUT/manifest.parquet."""
    manifest = write_noise(out, counts, channels=16, text_shape=(16, 64) if tiny else (512, 4096))
    print(f"{manifest.path}: {manifest.table.num_rows} samples")


def main() -> None:
    tiny = sys.argv[2:] == ["tiny"]
    divisor = 5 if tiny else 1
    counts = {(frames, *(side // divisor for side in sides)): n for (frames, *sides), n in COUNTS.items()}
    make(Path(sys.argv[1]), counts, tiny=tiny)


if __name__ == "__main__":
    main()
