"""From samples to micro-batches: shuffle within buckets, cut, and split until whole steps are full.

A micro-batch is a run of the epoch's sample order: three integers (bucket, first place, size). Cutting and
splitting never touch the samples themselves, so exact coverage is a matter of adding up sizes.
"""

from dataclasses import dataclass, replace

import numpy as np

from al_deepspeed.scheduling.constraints import power_of_two_sizes
from al_deepspeed.scheduling.shapes import FloatArray, IntArray


@dataclass(frozen=True)
class Pieces:
    """Micro-batches before they have a place in the epoch; equal-length arrays.

    bucket: of the shape. first: start of the run in the epoch's sample order. size: B. home: the class of
    micro-steps that it was cut for.
    """

    bucket: IntArray
    first: IntArray
    size: IntArray
    home: IntArray

    def __len__(self) -> int:
        return len(self.size)

    def take(self, places) -> "Pieces":
        return Pieces(self.bucket[places], self.first[places], self.size[places], self.home[places])


def concatenate(parts: list[Pieces]) -> Pieces:
    names = ("bucket", "first", "size", "home")
    return Pieces(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def random_stream(seed: int, *path: int) -> np.random.PCG64:
    """Bits that depend on (seed, path) alone. Only raw bits are used: NumPy keeps them equal in every
    version.
    """
    return np.random.PCG64(np.random.SeedSequence([seed, *path]))


def shuffled(count: int, bits: np.random.PCG64) -> IntArray:
    """A permutation of range(count)."""
    return shuffle_within_buckets(np.zeros(count, dtype=np.int64), bits)


def fractions(count: int, bits: np.random.PCG64) -> FloatArray:
    """Uniform numbers in [0, 1)."""
    return (bits.random_raw(count) >> np.uint64(11)) * 2.0**-53


def places_within(group: IntArray) -> IntArray:
    """How many earlier elements have the same group, for each element."""
    order = np.argsort(group, kind="stable")
    numbers = np.bincount(group)
    places = np.empty(len(group), dtype=np.int64)
    places[order] = np.arange(len(group)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    return places


def spread_evenly(group: IntArray, bits: np.random.PCG64) -> FloatArray:
    """Keys by which sorting spreads the elements of every group evenly over the whole, each from a random
    phase.

    Any run of the sorted sequence holds of each group its share, to within one element or two.
    """
    numbers = np.bincount(group)
    phase = fractions(len(numbers), bits)
    return (places_within(group) + phase[group]) / numbers[group]


def shuffle_within_buckets(bucket: IntArray, bits: np.random.PCG64) -> IntArray:
    """Places of the samples, bucket by bucket, in random order inside each.

    One sort of 64-bit keys that hold bucket, random bits and place. No two are equal, so that any sorting
    algorithm gives the same order, and NumPy may take the one that suits the processor.
    """
    place_bits = np.uint64(max(1, len(bucket) - 1).bit_length())
    bucket_bits = np.uint64(int(bucket.max(initial=0)).bit_length())
    random_bits = np.uint64(64) - bucket_bits - place_bits
    keys = bits.random_raw(len(bucket)) >> (np.uint64(64) - random_bits)
    keys |= bucket.astype(np.uint64) << random_bits
    keys <<= place_bits
    keys |= np.arange(len(bucket), dtype=np.uint64)
    keys.sort()
    keys &= (np.uint64(1) << place_bits) - np.uint64(1)
    return keys.view(np.int64)


def evenly_chosen(values: np.ndarray, number: int) -> np.ndarray:
    """`number` of the values at even distances."""
    return values[(2 * np.arange(number) + 1) * len(values) // max(1, 2 * number)]


def cut(bucket: IntArray, first: IntArray, count: IntArray, size: IntArray, home: IntArray) -> Pieces:
    """Cut lots, each `count` samples of one bucket from place `first` on, into runs of at most `size`."""
    pieces = -(-count // size)
    lot = np.repeat(np.arange(len(count)), pieces)
    start = (np.arange(len(lot)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * size[lot]
    return Pieces(bucket[lot], first[lot] + start, np.minimum(size[lot], count[lot] - start), home[lot])


def power_of_two_pieces(pieces: Pieces) -> Pieces:
    """Cut on until every size is a power of two; a remainder of 13 becomes 8 + 4 + 1."""
    done, rest = [], pieces
    while len(rest):
        top = power_of_two_sizes(rest.size)
        done.append(replace(rest, size=top))
        left = rest.size > top
        rest = replace(rest, first=rest.first + top, size=rest.size - top).take(left)
    return concatenate(done) if done else pieces


def halve(pieces: Pieces, chosen: IntArray, home: int | None = None) -> Pieces:
    """Each of the chosen micro-batches in two, side by side; the halves move to class `home` if given."""
    copies = np.ones(len(pieces), dtype=np.int64)
    copies[chosen] = 2
    origin = np.repeat(np.arange(len(pieces)), copies)
    second = np.zeros(len(origin), dtype=bool)
    second[np.cumsum(copies)[chosen] - 1] = True
    whole = pieces.take(origin)
    halved, low = copies[origin] == 2, whole.size // 2
    high = whole.size - low
    return Pieces(
        whole.bucket,
        whole.first + np.where(second, high, 0),
        np.where(halved, np.where(second, low, high), whole.size),
        whole.home if home is None else np.where(halved, home, whole.home),
    )


def split(pieces: Pieces, extra: int, home: int | None = None) -> tuple[Pieces, int]:
    """Make up to `extra` more micro-batches by halving some that hold two samples or more.

    They are taken evenly over the sequence: first from class `home`, where all halves go, then from the class
    that has most of them, so that halves cost alike. A second round halves halves: nothing is cut finer
    than it must be.

    Returns:
        the micro-batches, and how many more there are.
    """
    made = 0
    source = home
    while made < extra:
        splittable = pieces.size > 1
        if not splittable.any():
            break
        if source is None or not (splittable & (pieces.home == source)).any():
            source = int(np.argmax(np.bincount(pieces.home[splittable])))
        candidates = np.flatnonzero(splittable & (pieces.home == source))
        number = min(extra - made, len(candidates))
        pieces = halve(pieces, evenly_chosen(candidates, number), home)
        made += number
        source = None
    return pieces, made


def laid_out(pieces: Pieces, starts: IntArray) -> Pieces:
    """The same buckets and sizes, as runs that lie one after the other from the start of each bucket on."""
    order = np.argsort(pieces.bucket, kind="stable")
    bucket, size = pieces.bucket[order], pieces.size[order]
    numbers = np.bincount(bucket, minlength=len(starts))
    before = np.append(0, np.cumsum(size))
    first = np.empty_like(pieces.first)
    first[order] = before[:-1] + (starts - before[np.cumsum(numbers) - numbers])[bucket]
    return replace(pieces, first=first)
