"""From samples to micro-batches: shuffle within buckets, cut, and split until whole steps are full.

A micro-batch is a run of the epoch's sample order: three integers (bucket, first place, size). Cutting and
splitting never touch the samples themselves, so exact coverage is a matter of adding up sizes.
"""

from dataclasses import dataclass

import numpy as np

from al_deepspeed.scheduling.shapes import IntArray


@dataclass(frozen=True)
class Pieces:
    """Micro-batches before they have a place in the epoch; equal-length arrays.

    bucket: of the shape. first: start of the run in the epoch's sample order. size: B.
    """

    bucket: IntArray
    first: IntArray
    size: IntArray

    def __len__(self) -> int:
        return len(self.size)

    def take(self, places) -> "Pieces":
        return Pieces(self.bucket[places], self.first[places], self.size[places])


def concatenate(parts: list[Pieces]) -> Pieces:
    return Pieces(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("bucket", "first", "size"))
    )


def random_stream(seed: int, *path: int) -> np.random.PCG64:
    """Bits that depend on (seed, path) alone. Only raw bits are used: NumPy keeps them equal in every
    version.
    """
    return np.random.PCG64(np.random.SeedSequence([seed, *path]))


def shuffled(count: int, bits: np.random.PCG64) -> IntArray:
    """A permutation of range(count)."""
    return np.argsort(bits.random_raw(count), kind="stable")


def shuffle_within_buckets(bucket: IntArray, bits: np.random.PCG64) -> IntArray:
    """Places of the samples, bucket by bucket, in random order inside each: one sort of 64-bit keys."""
    keys = bits.random_raw(len(bucket)) >> np.uint64(24)
    keys |= bucket.astype(np.uint64) << np.uint64(40)
    return np.argsort(keys, kind="stable")


def cut(bucket: IntArray, first: IntArray, count: IntArray, size: IntArray) -> Pieces:
    """Cut lots, each `count` samples of one bucket from place `first` on, into runs of at most `size`."""
    pieces = -(-count // size)
    lot = np.repeat(np.arange(len(count)), pieces)
    index = np.arange(len(lot)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = index * size[lot]
    return Pieces(bucket[lot], first[lot] + start, np.minimum(size[lot], count[lot] - start))


def power_of_two_pieces(pieces: Pieces) -> Pieces:
    """Cut on until every size is a power of two; a remainder of 13 becomes 8 + 4 + 1."""
    done, rest = [], pieces
    while len(rest):
        top = 1 << (np.frexp(rest.size.astype(np.float64))[1] - 1).astype(np.int64)
        done.append(Pieces(rest.bucket, rest.first, top))
        left = rest.size > top
        rest = Pieces(rest.bucket[left], (rest.first + top)[left], (rest.size - top)[left])
    return concatenate(done) if done else pieces


def split_last(pieces: Pieces, extra: int) -> tuple[Pieces, int]:
    """Make up to `extra` more micro-batches by halving the last ones that hold two samples or more.

    Halves stay side by side. A second round halves halves, so no micro-batch is cut finer than it must be.

    Returns:
        the micro-batches, and how many more there are.
    """
    made = 0
    while made < extra:
        splittable = np.flatnonzero(pieces.size > 1)[made - extra :]
        if len(splittable) == 0:
            break
        pieces = halve(pieces, splittable)
        made += len(splittable)
    return pieces, made


def halve(pieces: Pieces, places: IntArray) -> Pieces:
    """Each micro-batch of `places` in two, the larger half first, where the whole one stood."""
    copies = np.ones(len(pieces), dtype=np.int64)
    copies[places] = 2
    origin = np.repeat(np.arange(len(pieces)), copies)
    second = np.zeros(len(origin), dtype=bool)
    second[np.cumsum(copies)[places] - 1] = True
    halved = copies[origin] == 2
    low = pieces.size[origin] // 2
    high = pieces.size[origin] - low
    size = np.where(halved, np.where(second, low, high), pieces.size[origin])
    return Pieces(pieces.bucket[origin], pieces.first[origin] + np.where(second, high, 0), size)
