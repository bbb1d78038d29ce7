"""What a corpus looks like to the scheduler: every sample is a row number in a bucket of one latent shape.

A batch holds one shape, so the planner never pads and never looks at pixels: all it needs is the bucket of
each sample and the sequence length S of each bucket. Ten million samples are one integer array.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from al_deepspeed.errors import CorpusError

IntArray = np.ndarray
FloatArray = np.ndarray

PATCH = (1, 2, 2)  # Wan 2.1, Wan 2.2 and most video DiTs


@dataclass(frozen=True)
class Corpus:
    """Samples by bucket. A bucket is a distinct (kind, shape); a sample's id is its row in the manifest.

    shapes: latent (frames, height, width) a bucket, int [buckets, 3].
    tokens: sequence length S a bucket, int64 [buckets].
    kinds: "image", "video" or a user's own word, one a bucket.
    bucket: the bucket of each sample, int [samples].
    fingerprint: hex digest of the rows, the same wherever the manifest lies.
    metrics: further numeric columns, one value a sample, usable as curriculum difficulty.
    keys: names of the samples for messages; anything that a row number indexes.
    """

    shapes: IntArray
    tokens: IntArray
    kinds: tuple[str, ...]
    bucket: IntArray
    fingerprint: str
    metrics: Mapping[str, np.ndarray] = field(default_factory=dict)
    keys: Sequence[str] | None = None

    @property
    def samples(self) -> int:
        return len(self.bucket)

    @property
    def buckets(self) -> int:
        return len(self.tokens)

    def counts(self) -> IntArray:
        """Samples a bucket, int64 [buckets]."""
        return np.bincount(self.bucket, minlength=self.buckets)

    def bucket_name(self, bucket: int) -> str:
        """`image 1x32x32`."""
        return f"{self.kinds[bucket]} " + "x".join(str(size) for size in self.shapes[bucket])

    def sample_name(self, sample: int) -> str:
        """`row 812 (key clip_000812)`, as far as known."""
        return f"row {sample}" if self.keys is None else f"row {sample} (key {self.keys[sample]})"


def latent_tokens(frames, height, width, patch: tuple[int, int, int] = PATCH):
    """Sequence length of a latent grid, for numbers or arrays: sides are rounded up to whole patches."""
    per_frame = -(-np.asarray(height) // patch[1]) * -(-np.asarray(width) // patch[2])
    tokens = -(-np.asarray(frames) // patch[0]) * per_frame
    return int(tokens) if np.ndim(tokens) == 0 else tokens


def corpus_from_samples(
    frames,
    height,
    width,
    *,
    kinds: Sequence[str] | None = None,
    tokens=None,
    patch: tuple[int, int, int] = PATCH,
    fingerprint: str | None = None,
    metrics: Mapping[str, np.ndarray] | None = None,
    keys: Sequence[str] | None = None,
) -> Corpus:
    """Group samples, given as one value a sample in each column, into buckets ordered by (S, shape, kind).

    Args:
        frames, height, width: latent sizes, ints [samples], all >= 1.
        kinds: a word a sample; left out, one latent frame is an image and more are a video.
        tokens: S a sample where the model does not patch as `patch` says; equal within a shape.
        fingerprint: of the rows; left out, computed from sizes and kinds.
    """
    sizes = np.stack([np.asarray(column, dtype=np.int64) for column in (frames, height, width)], axis=1)
    if len(sizes) == 0:
        raise CorpusError("the corpus holds no sample. At least one is needed; check the manifest's source.")
    bad = np.flatnonzero((sizes < 1).any(axis=1))
    if len(bad):
        row = int(bad[0])
        raise CorpusError(
            f"row {row} has latent size {'x'.join(map(str, sizes[row].tolist()))}; every size must be at "
            f"least "
            f"1 ({len(bad)} such row(s)). Remove them, or index with --skip-bad."
        )
    if kinds is None:
        names, kind = np.array(["image", "video"]), (sizes[:, 0] > 1).astype(np.int64)
    else:
        names, kind = np.unique(np.asarray(kinds, dtype=str), return_inverse=True)
    if tokens is None:
        tokens = latent_tokens(*sizes.T, patch=patch)
    tokens = np.asarray(tokens, dtype=np.int64)
    rows = np.column_stack([tokens, sizes, kind.reshape(-1)])
    distinct, bucket = _unique_rows(rows)
    if len(np.unique(distinct[:, 1:], axis=0)) != len(distinct):
        raise CorpusError("samples of one shape differ in tokens; a bucket has one sequence length.")
    if fingerprint is None:
        digest = hashlib.sha256(np.ascontiguousarray(rows).tobytes())
        digest.update("\0".join(names.tolist()).encode())
        fingerprint = digest.hexdigest()
    return Corpus(
        shapes=distinct[:, 1:4],
        tokens=distinct[:, 0],
        kinds=tuple(str(names[index]) for index in distinct[:, 4]),
        bucket=bucket.astype(np.int32),
        fingerprint=fingerprint,
        metrics=dict(metrics or {}),
        keys=keys,
    )


def _unique_rows(rows: IntArray) -> tuple[IntArray, IntArray]:
    """Distinct rows of small non-negative integers in sorted order, and the place of each row among them."""
    radices = rows.max(axis=0) + 1
    if np.log2(radices.astype(float)).sum() < 63:  # one integer a row sorts much faster than a row
        code = np.zeros(len(rows), dtype=np.int64)
        for column, radix in zip(rows.T, radices, strict=True):
            code = code * radix + column
        _, first, place = np.unique(code, return_index=True, return_inverse=True)
        return rows[first], place.reshape(-1)
    distinct, place = np.unique(rows, axis=0, return_inverse=True)
    return distinct, place.reshape(-1)
