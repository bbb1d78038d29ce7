"""The two limits, which of them binds, the cap on variants, and the choice of M_comp."""

import numpy as np
import pytest
from corpora import RELATIVE, WAN, corpus_of

from al_deepspeed.errors import PlanError
from al_deepspeed.scheduling.budget import best_max_cost, expected_maximum, random_deal_throughput
from al_deepspeed.scheduling.constraints import (
    Limits,
    batch_sizes,
    binding_limits,
    cap_variants,
    memory_batch_sizes,
    power_of_two_sizes,
)


def test_batch_size_is_what_both_limits_allow():
    # M_mem = 1000: 10, 2, 1. B*S^2 <= 100000: 10, 0, 0.
    tokens, limits = np.array([100, 400, 1000]), Limits(1000, 100_000)
    assert batch_sizes(tokens, RELATIVE, limits).tolist() == [10, 1, 1]
    assert binding_limits(tokens, RELATIVE, limits) == ["both", "oversize", "oversize"]
    assert binding_limits(tokens, RELATIVE, Limits(1000, 1_000_000)) == ["memory", "memory", "both"]
    assert binding_limits(tokens, RELATIVE, Limits(10_000, 1_000_000)) == ["both", "cost", "cost"]


def test_equal_token_knows_memory_only():
    assert memory_batch_sizes(np.array([100, 400, 1001]), Limits(1000)).tolist() == [10, 2, 1]


def test_an_exponent_makes_the_second_limit_the_papers_whatever_the_cost_model():
    limits = Limits(10_000_000, 100.0**2 * 8, exponent=2.0)
    assert batch_sizes(np.array([100, 200]), WAN, limits).tolist() == [8, 2]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 9, "max_cost": 0.0}, "max_cost"),
        ({"max_tokens": 9, "max_cost": 1.0, "exponent": -1.0}, "exponent"),
        ({"max_tokens": 9, "exponent": 2.0}, "M_comp"),
    ],
)
def test_limits_that_make_no_sense_are_refused(given, named):
    with pytest.raises(PlanError, match=named):
        Limits(**given)


def test_power_of_two_sizes():
    assert power_of_two_sizes(np.array([0, 1, 2, 3, 4, 7, 8, 650])).tolist() == [0, 1, 2, 2, 4, 4, 8, 512]


def test_the_cap_counts_every_size_that_halving_can_reach():
    # 8 -> {8,4,2,1}, 5 -> {4,2,1}, 1 -> {1}: eight pairs. With six, the bucket with most loses one, twice.
    assert cap_variants(np.array([8, 5, 1]), 8).tolist() == [8, 4, 1]
    assert cap_variants(np.array([8, 5, 1]), 6).tolist() == [2, 4, 1]
    with pytest.raises(PlanError, match="3 shapes"):
        cap_variants(np.array([8, 5, 1]), 2)


def test_expected_maximum_of_two_dice():
    assert expected_maximum(np.arange(1.0, 7.0), np.ones(6), 2) == pytest.approx(161 / 36)


def test_throughput_of_one_shape_is_that_of_one_rank_times_ranks():
    tokens, sizes = np.array([1560]), np.array([4])
    alone = 1000 * 4 * 1560 / float(WAN.cost(4, 1560))
    assert random_deal_throughput(tokens, np.array([80]), sizes, WAN, 16) == pytest.approx(16 * alone)


def test_the_chosen_budget_is_the_best_of_its_curve_and_beats_both_ends():
    corpus = corpus_of({256: 600, 7800: 300, 32760: 100, 75600: 30})
    budget, curve = best_max_cost(corpus, WAN, 166_320, 16)
    rates = dict(curve)
    assert rates[budget] == max(rates.values())
    assert [cost for cost, _ in curve] == sorted(rates)
    assert rates[budget] > 1.02 * curve[0][1]
    assert rates[budget] > 1.02 * curve[-1][1]
    assert budget >= 0.99 * float(WAN.cost(1, 75600))  # lower, the longest would overrun it


def test_one_shape_has_one_best_budget_as_large_as_memory():
    budget, _ = best_max_cost(corpus_of({1024: 500}), WAN, 32_768, 8)
    assert budget == pytest.approx(float(WAN.cost(32, 1024)))
