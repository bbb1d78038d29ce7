"""`al-deepspeed encode`: pictures and videos to latent shards, by as many processes as there are.

The listed sources are cut into groups, and each group becomes one shard, whoever encodes it: process I of N
takes the groups I, I+N, I+2N, ... So the shards' bytes depend on the sources and the settings alone, N
processes never meet, and a run that was killed goes on with the shards that are not there yet. What the bytes
depend on is written to OUT/encode.json first; a run with other settings or sources is refused there.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from al_deepspeed.data.buckets import Buckets
from al_deepspeed.data.codec import Codec
from al_deepspeed.data.files import create_whole, write_whole
from al_deepspeed.data.media import Clip, Media, open_media
from al_deepspeed.data.shards import CorpusInfo, Sample, write_shard
from al_deepspeed.data.sources import Source, list_sources, listing_digest
from al_deepspeed.data.text import TextEncoder
from al_deepspeed.errors import CorpusError

SETTINGS_FILE = "encode.json"


@dataclass(frozen=True)
class Cut:
    """How a source becomes samples.

    buckets: the allowed sizes and lengths. A source takes the largest size and the longest length ...
    all_sizes: ... unless every size and every length that it can fill is wanted.
    clips: samples from so many places of a video, evenly spread, as far as they do not overlap.
    fps: frames of a video are taken at this rate; None takes them as they are.
    """

    buckets: Buckets
    all_sizes: bool = False
    clips: int = 1
    fps: float | None = None

    def __post_init__(self):
        if self.fps is not None and not 0 < self.fps < math.inf:
            raise CorpusError(f"--fps is {self.fps}; a rate above 0 is needed, or none.")

    def wanted(self, media: Media) -> list[Clip]:
        """The clips to take from a picture or video."""
        sizes = self.buckets.sizes(media.height, media.width)
        lengths = self.buckets.clip_lengths(media.frames) if media.frames > 1 else [1]
        if not lengths:
            raise CorpusError(
                f"has {media.frames} frames; the shortest length in --frames is {min(self.buckets.lengths)}"
            )
        if not self.all_sizes:
            sizes, lengths = sizes[-1:], lengths[-1:]
        return [
            Clip(start, length, size)
            for size in sizes
            for length in lengths
            for start in self._starts(media.frames, length)
        ]

    def limit(self) -> int | None:
        """How many frames of a video matter."""
        return self.buckets.longest if self.clips == 1 else None

    def _starts(self, frames: int, length: int) -> list[int]:
        clips = min(self.clips, frames // length)
        return [clip * frames // clips for clip in range(clips)]


@dataclass(frozen=True)
class Encoded:
    """What one process did: shards written and found there, samples written, and the sources it left out."""

    written: int
    reused: int
    samples: int
    bad: int


def encode(
    src: str | Path,
    out: str | Path,
    *,
    codec: Codec,
    text: TextEncoder,
    cut: Cut,
    shard: tuple[int, int] = (0, 1),
    sources_per_shard: int = 64,
    skip_bad: bool = False,
    progress: Callable[[int], None] = lambda sources: None,
) -> Encoded:
    """Encode this process's share of SRC into OUT/shard-NNNNNN.tar.

    Args:
        src: a folder of pictures, videos and raw WebDataset tars, or one such tar.
        out: the folder of the shards.
        shard: (I, N): this process is number I of N, counted from 0.
        sources_per_shard: how many pictures and videos make a shard.
        skip_bad: leave out unusable sources, listing them in shard-NNNNNN.bad.jsonl, instead of raising.
        progress: called with the number of sources passed.
    Raises:
        CorpusError: OUT belongs to other settings or sources, or (unless skip_bad) a source cannot be used.
    """
    out, (number, count) = Path(out), shard
    sources = list_sources(src)
    empty_text, empty_text_length = text.encode("")
    info = CorpusInfo(codec.name, codec.stride, codec.mean, codec.std, text.name, empty_text_length)
    _settle(out, info, empty_text, cut, sources, sources_per_shard)
    encoder = _Encoder(codec, text, cut, skip_bad)
    written = reused = samples = 0
    for start in range(number * sources_per_shard, len(sources), count * sources_per_shard):
        group = sources[start : start + sources_per_shard]
        path = out / f"shard-{start // sources_per_shard:06d}.tar"
        if path.exists():
            reused += 1
            progress(len(group))
        else:
            samples += write_shard(path, info, empty_text, encoder.samples(group, path, progress))
            written += 1
    return Encoded(written, reused, samples, encoder.bad_sources)


def count_sources(src: str | Path, shard: tuple[int, int], sources_per_shard: int) -> int:
    """How many sources this process's share holds."""
    sources, (number, count) = len(list_sources(src)), shard
    starts = range(number * sources_per_shard, sources, count * sources_per_shard)
    return sum(min(sources_per_shard, sources - start) for start in starts)


class _Encoder:
    """Turns sources into samples, one source at a time."""

    def __init__(self, codec: Codec, text: TextEncoder, cut: Cut, skip_bad: bool):
        self._codec, self._text, self._cut, self._skip_bad = codec, text, cut, skip_bad
        self.bad_sources = 0

    def samples(self, group: list[Source], shard: Path, progress: Callable[[int], None]) -> Iterator[Sample]:
        """The group's samples; after the last, the side file of the sources that were left out."""
        bad = []
        for source in group:
            try:
                yield from self._samples_of(source)
            except CorpusError as error:
                if not self._skip_bad:
                    raise CorpusError(
                        f"{source.name}: {error}. Repair or remove it, or leave it out with --skip-bad."
                    ) from error
                bad.append({"source": source.name, "reason": str(error)})
            progress(1)
        self.bad_sources += len(bad)
        if bad:
            lines = (json.dumps(one, ensure_ascii=False) + "\n" for one in bad)
            write_whole(shard.with_suffix(".bad.jsonl"), "".join(lines))

    def _samples_of(self, source: Source) -> list[Sample]:
        """All samples of a source, or none: an error in the last leaves out the first."""
        if source.problem:
            raise CorpusError(source.problem)
        media = open_media(source.contents.open, source.suffix, limit=self._cut.limit(), fps=self._cut.fps)
        caption = source.read_caption()
        text, text_length = self._text.encode(caption)
        wanted = self._cut.wanted(media)
        samples = []
        for clip, frames in zip(wanted, media.clips(wanted), strict=True):
            height, width = clip.size
            record = {
                "source": source.name,
                "source_height": media.height,
                "source_width": media.width,
                "start": clip.start,
                "frames": clip.length,
                "height": height,
                "width": width,
                "fps": media.fps,
                "caption": caption,
                "text_length": text_length,
            }
            several = self._cut.all_sizes or self._cut.clips > 1
            key = f"{source.key}-{clip.length}x{height}x{width}-{clip.start}" if several else source.key
            samples.append(Sample(key, self._latent(frames), text, record))
        return samples

    def _latent(self, frames: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            latent = self._codec.encode(frames).astype(np.float16)
        if not np.isfinite(latent).all():
            raise CorpusError("its latent does not fit fp16")
        return latent


def _settle(
    out: Path,
    info: CorpusInfo,
    empty_text: np.ndarray,
    cut: Cut,
    sources: list[Source],
    sources_per_shard: int,
) -> None:
    """Write what the shards' bytes depend on, or check that OUT was begun with the same."""
    path = out / SETTINGS_FILE
    settings = {
        "info": asdict(info),
        "empty_text": {"shape": empty_text.shape, "sha256": hashlib.sha256(empty_text.tobytes()).hexdigest()},
        "cut": asdict(cut),
        "sources": {"count": len(sources), "sha256": listing_digest(sources)},
        "sources_per_shard": sources_per_shard,
    }
    text = json.dumps(settings, indent=1)
    out.mkdir(parents=True, exist_ok=True)
    create_whole(path, text)
    there, mine = _flat(json.loads(path.read_text(encoding="utf-8"))), _flat(json.loads(text))
    differing = [
        f"  {name}: {there.get(name)} there, {mine[name]} now"
        for name in mine
        if there.get(name) != mine[name]
    ]
    if differing:
        raise CorpusError(
            "\n".join([f"{out} was begun with other settings or sources:", *differing])
            + "\nGive another --out, or remove that folder."
        )


def _flat(settings: dict, prefix: str = "") -> dict:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
