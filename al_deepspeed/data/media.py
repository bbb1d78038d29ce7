"""Decoding: pictures with Pillow, videos with PyAV, both to uint8 RGB frames of an asked size.

Videos are decoded twice: once to learn which frames there are (a container's own frame count is not to be
trusted), once to collect the asked ones, scaled as they come. So memory holds the clips, never the video.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import av
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from al_deepspeed.data.buckets import Size
from al_deepspeed.data.sources import VIDEOS
from al_deepspeed.errors import CorpusError

FORMATS = "mov,matroska,avi,mpeg,mpegts,gif"  # formats that play one file; a playlist would open others


@dataclass(frozen=True)
class Clip:
    """Frames [start, start + length) of a video, scaled and centre-cropped to a size."""

    start: int
    length: int
    size: Size


class Media(ABC):
    """A picture or a video. frames: how many there are, as far as was asked; fps: None for a picture."""

    height: int
    width: int
    frames: int
    fps: float | None

    @abstractmethod
    def clips(self, wanted: list[Clip]) -> Iterator[np.ndarray]:
        """Frames of each clip in turn, uint8 RGB [length, height, width, 3]."""


def open_media(
    contents: Callable[[], BinaryIO], suffix: str, *, limit: int | None = None, fps: float | None = None
) -> Media:
    """Open a picture or video.

    Args:
        contents: opens the file anew.
        suffix: of its name; tells pictures from videos.
        limit: look no further than so many frames.
        fps: take a video's frames at this rate instead of as they are.
    Raises:
        CorpusError: broken, empty, or of a kind that is not supported; the reason, without the file's name.
    """
    with _decoding():
        return Video(contents, limit, fps) if suffix in VIDEOS else Picture(contents)


@contextmanager
def _decoding() -> Iterator[None]:
    """What Pillow and FFmpeg raise at broken files, as one error."""
    try:
        yield
    except av.FFmpegError as error:
        raise CorpusError(f"cannot be decoded: {error.strerror}") from error
    except UnidentifiedImageError as error:
        raise CorpusError("cannot be decoded: not a picture of a known format") from error
    except (OSError, ValueError, EOFError, SyntaxError, Image.DecompressionBombError) as error:
        raise CorpusError(f"cannot be decoded: {error}") from error


class Picture(Media):
    """One frame. Turned as its EXIF says; transparency on white; 16-bit grey scaled to 8."""

    def __init__(self, contents: Callable[[], BinaryIO]):
        with contents() as stream, Image.open(stream) as image:
            image.load()
            self._image = _to_rgb(ImageOps.exif_transpose(image))
        self.width, self.height = self._image.size
        self.frames, self.fps = 1, None

    def clips(self, wanted: list[Clip]) -> Iterator[np.ndarray]:
        return (_fit(self._image, clip.size)[None] for clip in wanted)


class Video(Media):
    """Frames in the order shown, turned as the container says."""

    def __init__(self, contents: Callable[[], BinaryIO], limit: int | None, fps: float | None):
        self._contents = contents
        times = []
        with closing(self._decode()) as frames:
            for index, frame in enumerate(frames):
                if index == 0:
                    first = _upright(frame)
                times.append(self._time(frame, index, fps))
                if limit and index + 1 >= limit and (not fps or (times[-1] - times[0]) * fps >= limit - 1):
                    break
        if not times:
            raise CorpusError("holds no frame that can be decoded")
        self.width, self.height = first.size
        self._shown = np.arange(len(times)) if fps is None else _at_rate(np.array(times), fps)
        if limit:
            self._shown = self._shown[:limit]
        self.frames, self.fps = len(self._shown), fps or self._rate

    def clips(self, wanted: list[Clip]) -> Iterator[np.ndarray]:
        """Decodes up to the last asked frame; clips of one size that overlap share their frames."""
        needed: dict[int, set[Size]] = {}
        for clip in wanted:
            for index in self._indices(clip):
                needed.setdefault(index, set()).add(clip.size)
        taken: dict[tuple[int, Size], np.ndarray] = {}
        with _decoding(), closing(self._decode()) as frames:
            for index, frame in enumerate(frames):
                if index in needed:
                    image = _upright(frame)
                    taken |= {(index, size): _fit(image, size) for size in needed.pop(index)}
                if not needed:
                    break
        if needed:
            raise CorpusError(f"cannot be decoded a second time: frame {min(needed)} did not come back")
        for clip in wanted:
            yield np.stack([taken[index, clip.size] for index in self._indices(clip)])

    def _indices(self, clip: Clip) -> list[int]:
        return self._shown[clip.start : clip.start + clip.length].tolist()

    def _decode(self) -> Iterator[av.VideoFrame]:
        options = {"format_whitelist": FORMATS, "protocol_whitelist": "file"}
        with self._contents() as file, av.open(file, container_options=options) as container:
            stream = container.streams.best("video")
            if stream is None:
                raise CorpusError("holds no video stream")
            self._rate = float(stream.average_rate) if stream.average_rate else None
            for index, frame in enumerate(container.decode(stream)):
                if frame.is_corrupt:
                    raise CorpusError(f"frame {index} is corrupt")
                yield frame

    def _time(self, frame: av.VideoFrame, index: int, fps: float | None) -> float:
        if frame.time is not None:
            return frame.time
        if fps and not self._rate:
            raise CorpusError("has neither time stamps nor a frame rate, so --fps cannot be kept")
        return index / self._rate if self._rate else float(index)


def _at_rate(times: np.ndarray, fps: float) -> np.ndarray:
    """For each tick of 1/fps, the frame shown at that moment: the last that began no later."""
    times = np.maximum.accumulate(times - times[0])
    ticks = np.arange(int(times[-1] * fps + 1e-6) + 1) / fps
    return np.searchsorted(times, ticks + 1e-6 / fps, side="right") - 1


def _upright(frame: av.VideoFrame) -> Image.Image:
    image = frame.to_image()
    quarter_turns = round(frame.rotation / 90) % 4
    return image.rotate(90 * quarter_turns, expand=True) if quarter_turns else image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey, of either byte order
        values = np.asarray(image, dtype=np.int64)
        image = Image.fromarray(np.clip((values + 128) // 257, 0, 255).astype(np.uint8))
    if image.mode == "F":
        raise CorpusError("pixels are floating point, whose range is unknown; convert them to 8 or 16 bit")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _fit(image: Image.Image, size: Size) -> np.ndarray:
    height, width = size
    return np.asarray(ImageOps.fit(image, (width, height), method=Image.Resampling.BICUBIC))
