"""Which sizes and lengths a picture or clip is encoded at: areas x aspect ratios, and frames.

A size is the area in the shape of an aspect ratio, each side rounded to whole patches. A source takes, in
each area, the size whose shape is nearest its own, so that the centre crop loses least, and it is never
enlarged unless every size is larger than it is.
"""

import math
import re
from dataclasses import dataclass

from al_deepspeed.errors import CorpusError

Size = tuple[int, int]  # height, width in pixels


@dataclass(frozen=True)
class Buckets:
    """The allowed sizes and lengths.

    areas: pixels a frame.
    aspects: width / height.
    max_frames: the longest clip; any length of whole latent frames up to it is allowed ...
    lengths: ... or only these, in frames; pictures have one in any case.
    multiple: pixels a patch of the model, to which sides are rounded.
    temporal_stride: frames a latent frame after the first, so lengths are this times k plus 1.
    """

    areas: tuple[int, ...]
    aspects: tuple[float, ...]
    max_frames: int
    lengths: tuple[int, ...] | None
    multiple: Size
    temporal_stride: int

    def __post_init__(self):
        for length in self.lengths or ():
            if length < 1 or (length - 1) % self.temporal_stride:
                low = max(0, length - 1) // self.temporal_stride * self.temporal_stride + 1
                raise CorpusError(
                    f"--frames holds {length}; a clip has {self.temporal_stride}k+1 frames with this codec, "
                    f"such as {low} or {low + self.temporal_stride}."
                )
        if self.max_frames < 1:
            raise CorpusError(f"--max-frames is {self.max_frames}; at least 1 is needed.")

    def sizes(self, height: int, width: int) -> list[Size]:
        """Sizes for a source of this size, smallest first: one an area, without enlarging where possible."""
        nearest = {self._nearest(area, height, width) for area in self.areas}
        ordered = sorted(nearest, key=lambda size: (size[0] * size[1], size))
        fitting = [size for size in ordered if size[0] <= height and size[1] <= width]
        return fitting or ordered[:1]

    def clip_lengths(self, frames: int) -> list[int]:
        """Allowed lengths that so many frames can fill, shortest first."""
        if self.lengths is not None:
            return [length for length in sorted(set(self.lengths)) if length <= frames]
        return list(range(1, min(frames, self.max_frames) + 1, self.temporal_stride))

    @property
    def longest(self) -> int:
        return max(self.lengths) if self.lengths is not None else self.max_frames

    def _nearest(self, area: int, height: int, width: int) -> Size:
        sizes = [self._rounded(area, aspect) for aspect in self.aspects]
        return min(sizes, key=lambda size: (abs(math.log(size[1] / size[0] * height / width)), size))

    def _rounded(self, area: int, aspect: float) -> Size:
        sides = (math.sqrt(area / aspect), math.sqrt(area * aspect))
        return tuple(
            max(1, round(side / unit)) * unit for side, unit in zip(sides, self.multiple, strict=True)
        )


def parse_areas(given: str) -> tuple[int, ...]:
    """`256x256,480x832` -> (65536, 399360)."""
    return tuple(height * width for height, width in _pairs("--areas", given, "x", "256x256,480x832"))


def parse_aspects(given: str) -> tuple[float, ...]:
    """`1:1,16:9` -> (1.0, 1.77...), width : height."""
    return tuple(width / height for width, height in _pairs("--aspects", given, ":", "1:1,4:3,16:9"))


def parse_lengths(given: str) -> tuple[int, ...]:
    """`17,33` -> (17, 33)."""
    if not re.fullmatch(r"\d+(,\d+)*", given):
        raise CorpusError(f"--frames is {given!r}; lengths with commas between are needed, such as 17,33.")
    return tuple(int(part) for part in given.split(","))


def _pairs(option: str, given: str, mark: str, example: str) -> list[tuple[int, int]]:
    pairs = []
    for part in given.split(","):
        match = re.fullmatch(rf"\s*([1-9]\d*){mark}([1-9]\d*)\s*", part)
        if not match:
            raise CorpusError(f"{option} is {given!r}; a list such as {example} is needed.")
        pairs.append((int(match[1]), int(match[2])))
    return pairs
