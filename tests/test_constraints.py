"""The two limits, which of them binds, the cap on variants, and the choice of M_comp."""

from dataclasses import replace

import numpy as np
import pytest
from corpora import RELATIVE, WAN, corpus_of

from al_deepspeed.errors import PlanError
from al_deepspeed.scheduling.budget import (
    Deal,
    best_max_cost,
    expected_maximum,
    random_deal_throughput,
    whole_steps,
)
from al_deepspeed.scheduling.constraints import (
    Limits,
    batch_sizes,
    binding_limits,
    cap_variants,
    memory_batch_sizes,
    power_of_two_sizes,
)
from al_deepspeed.scheduling.cost import PowerCost, TwoTermCost
from al_deepspeed.scheduling.plan import make_plan


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
    assert random_deal_throughput(tokens, np.array([64]), sizes, WAN, Deal(world_size=16)) == pytest.approx(
        16 * alone
    )


def test_an_epoch_is_of_whole_micro_batches_and_whole_steps():
    """10 samples at B = 4 are micro-batches of 4, 4 and 2; steps of two places leave one to fill.

    One of the three is halved, each with a chance of 1/3. That leaves 2 * 2/3 of 4, 2/3 and
    2 * 2 * 1/3 of 2, and 2 * 1/3 of 1.
    """
    tokens, counts, sizes = np.array([100]), np.array([10]), np.array([4])
    _, batches, numbers, steps = whole_steps(tokens, counts, sizes, 2)
    assert steps == 2 and numbers.sum() == pytest.approx(4)
    assert batches.tolist() == [4, 2, 2, 1]
    assert numbers.tolist() == pytest.approx([4 / 3, 2 / 3, 4 / 3, 2 / 3])


def test_a_steps_own_time_counts_once_a_step():
    """12 samples of 100 ms on two ranks: 3 steps of two micro-steps, 0.6 s; with 50 ms a step 0.75 s."""
    tokens, counts, sizes = np.array([100]), np.array([12]), np.array([1])
    cost = PowerCost(exponent=1.0)
    for step_cost, seconds in ((0.0, 0.6), (50.0, 0.75)):
        deal = Deal(world_size=2, accumulation=2, step_cost=step_cost)
        rate = random_deal_throughput(tokens, counts, sizes, cost, deal)
        assert rate == pytest.approx(1200 / seconds)
        assert rate == pytest.approx(
            random_deal_throughput(tokens, counts, sizes, cost, replace(deal, endless=True))
        )


def test_a_steps_own_time_makes_larger_budgets_pay():
    """Memory holds 4 long samples of 100 ms or 40 short ones of 1 ms. At 400 ms an epoch is 10 and 102
    micro-batches, 28 steps on four ranks; at 100 ms it is 40 and 102, 36 steps, in which ranks wait less.
    """
    corpus, cost = corpus_of({100: 4080, 1000: 40}), PowerCost(exponent=2.0, scale=1e-4)
    free, _ = best_max_cost(corpus, cost, 4000, Deal(world_size=4))
    dear, curve = best_max_cost(corpus, cost, 4000, Deal(world_size=4, step_cost=1000.0))
    assert (free, dear) == pytest.approx((100.0, 400.0))
    long = 1 - (102 / 112) ** 4  # the chance that one of four ranks has one
    assert curve[-1][1] == pytest.approx(1000 * 448_000 / (28 * (1000 + 400 * long + 40 * (1 - long))))


def test_the_closed_form_tells_what_a_plan_will_take():
    """Few samples, so that remainders and the last step count: 28 micro-batches in place of 19 fractions."""
    corpus = corpus_of({64: 10, 256: 20, 576: 24, 1260: 13, 2268: 8})
    cost = TwoTermCost(intercept=128.0, linear=0.067, quadratic=6.3e-5)
    deal = Deal(world_size=2, accumulation=2, step_cost=120.0)
    _, curve = best_max_cost(corpus, cost, 4536, deal)
    for budget, predicted in curve[:: len(curve) // 8]:
        plans = [
            make_plan(
                corpus,
                cost,
                Limits(4536, budget),
                world_size=2,
                accumulation=2,
                epoch=epoch,
                strategy="dual_constraint",
            )
            for epoch in range(20)
        ]
        taken = sum(plan.cost.max(axis=1).sum() + 120.0 * plan.steps for plan in plans)
        planned = 1000 * sum(plan.tokens.sum() for plan in plans) / taken
        assert predicted == pytest.approx(planned, rel=0.03)


def test_the_chosen_budget_is_as_good_as_the_best_and_beats_both_ends():
    corpus = corpus_of({256: 600, 7800: 300, 32760: 100, 75600: 30})
    budget, curve = best_max_cost(corpus, WAN, 166_320, Deal(world_size=16))
    rates = dict(curve)
    assert rates[budget] >= 0.999 * max(rates.values())
    assert all(rate < 0.999 * max(rates.values()) for cost, rate in curve if cost > budget)
    assert [cost for cost, _ in curve] == sorted(rates)
    assert rates[budget] > 1.02 * curve[0][1]
    assert rates[budget] > 1.02 * curve[-1][1]
    assert budget >= 0.99 * float(WAN.cost(1, 75600))  # lower, the longest would overrun it


def test_one_shape_has_one_best_budget_as_large_as_memory():
    budget, _ = best_max_cost(corpus_of({1024: 512}), WAN, 32_768, Deal(world_size=8))
    assert budget == pytest.approx(float(WAN.cost(32, 1024)))
