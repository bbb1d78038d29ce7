"""Buckets, sequence lengths and the corpus of the planner."""

import numpy as np
import pytest

from al_deepspeed.errors import CorpusError
from al_deepspeed.scheduling.shapes import corpus_from_samples, latent_tokens


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        ((1, 32, 32), 256),
        ((1, 60, 104), 1560),
        ((21, 60, 104), 32760),
        ((21, 90, 160), 75600),
        ((1, 3, 5), 6),
    ],
)
def test_tokens_of_wan_shapes(shape, tokens):
    assert latent_tokens(*shape) == tokens


def test_patch_belongs_to_the_model():
    assert latent_tokens(4, 8, 8, patch=(2, 1, 1)) == 2 * 64


def test_samples_fall_into_buckets_ordered_by_length():
    corpus = corpus_from_samples([21, 1, 1, 21], [60, 32, 60, 60], [104, 32, 104, 104])
    assert corpus.tokens.tolist() == [256, 1560, 32760]
    assert corpus.kinds == ("image", "image", "video")
    assert corpus.bucket.tolist() == [2, 0, 1, 2]
    assert corpus.counts().tolist() == [1, 1, 2]
    assert corpus.bucket_name(2) == "video 21x60x104"


def test_kind_column_splits_one_shape_into_two_buckets():
    corpus = corpus_from_samples([1, 1, 1], [4, 4, 4], [4, 4, 4], kinds=["photo", "still", "photo"])
    assert corpus.kinds == ("photo", "still")
    assert corpus.bucket.tolist() == [0, 1, 0]


def test_fingerprint_follows_the_rows():
    one = corpus_from_samples([1, 5], [4, 4], [4, 4])
    same = corpus_from_samples([1, 5], [4, 4], [4, 4])
    swapped = corpus_from_samples([5, 1], [4, 4], [4, 4])
    assert one.fingerprint == same.fingerprint != swapped.fingerprint


def test_a_zero_dimension_is_refused_with_its_row():
    with pytest.raises(CorpusError, match="row 1 has latent size 0x4x4"):
        corpus_from_samples([1, 0], [4, 4], [4, 4])


def test_an_empty_corpus_is_refused():
    with pytest.raises(CorpusError, match="no sample"):
        corpus_from_samples(np.zeros(0), np.zeros(0), np.zeros(0))


def test_samples_are_named_by_row_and_key():
    corpus = corpus_from_samples([1], [4], [4], keys=["clip_000812"])
    assert corpus.sample_name(0) == "row 0 (key clip_000812)"
