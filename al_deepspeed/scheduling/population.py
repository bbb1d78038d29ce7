"""What an epoch draws: every sample once, or by `mixture` as many of each kind or shape as it says.

With a mixture an epoch still has as many draws as the corpus has samples. A kind (or shape) with share w of
the
mixture gets w of the draws, however many samples it has: each of its samples is drawn equally often, give
or take one. Who is drawn once more goes round from epoch to epoch, so that nobody is favoured. A kind that
the mixture does not name is not drawn.
"""

from collections.abc import Mapping

import numpy as np

from al_deepspeed.errors import PlanError
from al_deepspeed.scheduling.pieces import random_stream, shuffled
from al_deepspeed.scheduling.shapes import Corpus, IntArray

MIXTURE_STREAM = 1 << 32  # apart from the streams of epochs


def draw(corpus: Corpus, mixture: Mapping[str, float], seed: int, epoch: int) -> IntArray:
    """Sample ids of an epoch in ascending order; a sample that is drawn twice stands there twice."""
    groups = mixture_groups(corpus, mixture)
    shares = np.array(list(mixture.values()), dtype=np.float64)
    wanted = corpus.samples * shares / shares.sum()
    draws = np.floor(wanted).astype(np.int64)
    draws[np.argsort(draws - wanted, kind="stable")[: corpus.samples - draws.sum()]] += 1
    drawn = []
    for number, (name, count) in enumerate(zip(mixture, draws.tolist(), strict=True)):
        members = np.flatnonzero(groups == number)
        if count and len(members) == 0:
            raise PlanError(f"mixture names {name!r}, of which the corpus has no sample. Leave it out.")
        if count:
            members = members[shuffled(len(members), random_stream(seed, MIXTURE_STREAM, number))]
            drawn.append(members[(epoch * count + np.arange(count)) % len(members)])
    return np.sort(np.concatenate(drawn))


def mixture_groups(corpus: Corpus, mixture: Mapping[str, float]) -> IntArray:
    """For each sample the place of its kind or shape in the mixture, -1 where it is not named."""
    kinds, shapes = list(corpus.kinds), [corpus.bucket_name(bucket) for bucket in range(corpus.buckets)]
    names = kinds if set(mixture) <= set(kinds) else shapes
    unknown = set(mixture) - set(names)
    if unknown or not mixture:
        raise PlanError(
            f"mixture names {sorted(unknown)}; allowed are kinds ({', '.join(sorted(set(kinds)))}) or, all "
            f"of "
            f'them, shapes as "{shapes[0]}".'
        )
    bad = {name: share for name, share in mixture.items() if not 0 <= share < float("inf")}
    if bad or sum(mixture.values()) <= 0:
        raise PlanError(f"mixture is {dict(mixture)}; shares must be at least 0, and one above 0.")
    places = {name: place for place, name in enumerate(mixture)}
    return np.array([places.get(name, -1) for name in names])[corpus.bucket]
