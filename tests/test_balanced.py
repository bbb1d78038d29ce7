"""The balanced strategy: what it must reach, and its parts by hand."""

import numpy as np
import pytest
from corpora import H200, MIX_MEMORY, PUBLIC, RELATIVE, WAN, corpus_of, mixed_corpus

from al_deepspeed.errors import PlanError
from al_deepspeed.scheduling.arrangement import Task
from al_deepspeed.scheduling.classes import best_classes
from al_deepspeed.scheduling.constraints import Limits
from al_deepspeed.scheduling.filling import POOL, level_pool, moves_up
from al_deepspeed.scheduling.leftovers import leftover_sizes, set_apart
from al_deepspeed.scheduling.metrics import plan_metrics
from al_deepspeed.scheduling.options import PlanOptions
from al_deepspeed.scheduling.pieces import Pieces, spread_evenly
from al_deepspeed.scheduling.plan import make_plan
from al_deepspeed.scheduling.steps import order_micro_steps

PAPER = Limits(MIX_MEMORY, 75600.0**2, exponent=2.0)
LONGEST_ALONE = Limits(MIX_MEMORY, float(WAN.cost(1, 75600)))


@pytest.fixture(scope="module")
def corpus():
    return mixed_corpus(200_000)


def metrics_of(corpus, strategy, world_size, accumulation, limits=PAPER, **options):
    plan = make_plan(
        corpus, WAN, limits, world_size=world_size, accumulation=accumulation, strategy=strategy, **options
    )
    return plan_metrics(plan)


@pytest.mark.parametrize("limits", [PAPER, LONGEST_ALONE], ids=["paper", "longest"])
@pytest.mark.parametrize("world_size", [16, 256])
def test_free_loads_every_rank_alike(corpus, world_size, limits):
    equal = metrics_of(corpus, "equal_token", world_size, 1)
    free = metrics_of(corpus, "balanced", world_size, 1, limits, mixing="free")
    assert free["efficiency"] >= 0.99
    assert free["imbalance"] <= 0.01
    assert free["tokens_per_s"] >= {16: 1.55, 256: 1.62}[world_size] * equal["tokens_per_s"]


@pytest.mark.parametrize("limits", [PAPER, LONGEST_ALONE], ids=["paper", "longest"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("world_size", [16, 256])
def test_corpus_mixing_loads_alike_and_keeps_the_mix(corpus, world_size, accumulation, limits):
    equal = metrics_of(corpus, "equal_token", world_size, accumulation)
    chance = metrics_of(corpus, "dual_constraint", world_size, accumulation, limits)
    ours = metrics_of(corpus, "balanced", world_size, accumulation, limits)
    assert ours["efficiency"] >= 0.97
    assert ours["tokens_per_s"] >= {16: 1.52, 256: 1.58}[world_size] * equal["tokens_per_s"]
    assert ours["steps_without_image"] <= chance["steps_without_image"]
    image, by_chance = ours["kind_weight"]["image"], chance["kind_weight"]["image"]
    assert by_chance - 0.02 <= image <= by_chance + 0.10
    if accumulation == 4:
        assert ours["step_token_cv"] <= 0.14
        assert ours["step_sample_cv"] <= 1.5 * chance["step_sample_cv"]


def test_a_longer_look_ahead_balances_better(corpus):
    efficiencies = [
        metrics_of(corpus, "balanced", 16, 1, lookahead=lookahead)["efficiency"] for lookahead in (1, 4, 64)
    ]
    assert efficiencies == sorted(efficiencies)
    assert efficiencies[0] < efficiencies[-1] - 0.1


def test_grouped_by_shape_is_balanced_too(corpus):
    plan = make_plan(corpus, WAN, PAPER, world_size=16, accumulation=4, group_by_shape=True)
    assert (plan.bucket == plan.bucket[:, :1]).all()
    assert plan_metrics(plan)["efficiency"] > 0.98
    with pytest.raises(PlanError, match="max_variants and group_by_shape"):
        make_plan(corpus, WAN, PAPER, world_size=16, group_by_shape=True, max_variants=99)


def test_one_rank_has_nothing_to_wait_for(corpus):
    assert metrics_of(corpus, "balanced", 1, 4)["efficiency"] == 1.0


def test_two_shapes_of_commensurable_cost_share_one_class():
    # S = 10 and 20 cost 100 and 400 a sample: four short ones cost as much as a long one.
    tokens, counts = np.array([10, 20]), np.array([400, 100])
    classes = best_classes(
        tokens, counts, np.array([40, 10]), RELATIVE, windows=1, price=0.0, riders=np.zeros(2, dtype=bool)
    )[0]
    assert classes.information == pytest.approx(0)
    assert (RELATIVE.cost(classes.size, tokens[:, None]) == classes.target).all()
    assert classes.rank_time == pytest.approx(400 * 100 + 100 * 400)


def test_shapes_that_cannot_meet_part_unless_the_window_is_short():
    tokens, counts, largest = np.array([70, 100]), np.array([500, 500]), np.array([1, 1])
    riders = np.zeros(2, dtype=bool)
    apart = best_classes(tokens, counts, largest, RELATIVE, windows=64, price=0.0, riders=riders)[0]
    assert apart.target.tolist() == [4900, 10000]
    assert apart.share == pytest.approx(np.eye(2), abs=1e-6)
    together = best_classes(tokens, counts, largest, RELATIVE, windows=1, price=0.0, riders=riders)[0]
    assert together.target.tolist() == [10000]


def test_micro_batches_come_out_at_whole_steps_by_themselves():
    # Some 349 at will. The next multiple of 64 is 384, of which 1.5 are elsewhere.
    tokens, counts = np.array([10, 30, 70]), np.array([2000, 400, 60])
    numbers = []
    for whole in (1, 64):
        options = {
            "windows": 8,
            "price": 0.05,
            "riders": np.zeros(3, dtype=bool),
            "whole": whole,
            "beside": 1.5,
        }
        classes = best_classes(tokens, counts, counts, RELATIVE, **options)[0]
        numbers.append((counts[:, None] * classes.share / np.maximum(1, classes.size)).sum())
    assert numbers[0] == pytest.approx(349, abs=1)
    assert numbers[1] == pytest.approx(382.5, abs=1)


def test_the_pool_is_cut_anew_at_the_lowest_common_cost():
    # S = 10 and 20 cost 100 and 400 a sample: 3,200 in all, so 800 for each of four is the least there is.
    corpus = corpus_of({10: 16, 20: 4})
    task = Task(corpus, corpus.counts(), RELATIVE, Limits(10_000), 4, 1, PlanOptions(), np.random.PCG64(0))
    columns = ([0, 0, 1, 1], [0, 12, 16, 19], [12, 4, 3, 1], [POOL] * 4)
    pieces, filler = level_pool(task, Pieces(*map(np.array, columns)), np.zeros(4, dtype=bool))
    assert task.costs(pieces).tolist() == [800] * 4
    assert pieces.first.tolist() == [0, 8, 16, 18]
    assert pieces.size.tolist() == [8, 8, 2, 2]
    assert not filler.any()


@pytest.mark.parametrize("accumulation", [1, 4])
def test_an_epoch_of_few_micro_steps_and_many_shapes_is_balanced(accumulation):
    # About as many micro-steps as shapes, most of which fill less than one.
    lengths = np.random.default_rng(1).integers(6000, 50_000, 30).tolist()
    corpus = corpus_of({length: 100 + 20 * place for place, length in enumerate(lengths)})
    assert metrics_of(corpus, "balanced", 256, accumulation, Limits(120_000))["efficiency"] >= 0.97


def floor_task(counts: dict[int, int], world_size: int, **options) -> Task:
    corpus = corpus_of(counts)
    limits = Limits(MIX_MEMORY, LONGEST_ALONE.max_cost)
    return Task(
        corpus, corpus.counts(), WAN, limits, world_size, 1, PlanOptions(**options), np.random.PCG64(0)
    )


def test_the_smallest_buckets_are_set_apart_and_the_next_complete_their_micro_step():
    # The floor, 37.3 ms, holds 6 samples of S = 900 (4.85 ms each, and 3.55) or of S = 1,000 (5.42 ms each).
    task = floor_task({900: 3, 1000: 100, 40_000: 50}, 4)
    apart = set_apart(task)
    assert apart.samples.tolist() == [3, 18, 0]
    assert apart.size.tolist() == [6, 6, 0]
    assert apart.micro_batches == 4
    assert leftover_sizes(task, apart.samples, 4).tolist() == [3, 6, 0]


@pytest.mark.parametrize("counts", [{900: 30, 40_000: 50}, {900: 3, 40_000: 50}], ids=["none", "too few"])
def test_nothing_is_set_apart_where_it_would_not_fill_a_micro_step(counts):
    assert set_apart(floor_task(counts, 8)).micro_batches == 0


@pytest.mark.parametrize("accumulation", [1, 4])
def test_ranks_do_not_wait_for_one_with_a_leftover(accumulation):
    # Two dozen of the shapes are of one picture, and half of them are less than one micro-batch.
    corpus = corpus_of(PUBLIC)
    figures = plan_metrics(
        make_plan(corpus, H200, Limits(MIX_MEMORY), world_size=128, accumulation=accumulation, mixing="free")
    )
    assert figures["imbalance"] <= 0.01
    assert figures["efficiency"] >= 0.99


def test_riders_keep_their_proportion_in_every_class_with_room():
    tokens, counts, largest = np.array([10, 70, 100]), np.array([600, 500, 500]), np.array([5, 1, 1])
    riders = np.array([True, False, False])
    classes = best_classes(tokens, counts, largest, RELATIVE, windows=64, price=0.0, riders=riders)[0]
    assert classes.target.tolist() == [4900, 10000]
    assert classes.share[0] == pytest.approx([0.5, 0.5], abs=1e-6)


def test_surplus_moves_up_where_the_climb_is_short():
    # R = 4. Class 0 has one too many; class 1 lacks one; the step between them is small.
    moves, open_class = moves_up(np.array([5, 7, 8]), np.array([10.0, 11.0, 50.0]), np.full(3, 9.0), 4)
    assert moves.tolist() == [1, 0, 0]
    assert (np.array([5, 7, 8]) - moves + np.array([0, *moves[:-1]])).tolist() == [4, 8, 8]
    assert open_class in (0, 1, 2)


def test_spread_evenly_gives_every_run_its_share():
    group = np.repeat([0, 1], [90, 10])
    order = np.argsort(spread_evenly(group, np.random.PCG64(1)), kind="stable")
    per_ten = group[order].reshape(10, 10).sum(axis=1)
    assert per_ten.sum() == 10
    assert per_ten.max() <= 2


def test_micro_steps_join_to_even_steps():
    # Tokens 1..8, G = 2: each pair can sum to 9.
    amounts = np.array([[1.0], [2], [3], [4], [5], [6], [7], [8]])
    order = order_micro_steps(amounts, np.zeros(8, dtype=np.int64), 2, 8, np.random.PCG64(3))
    assert sorted(order.tolist()) == list(range(8))
    assert amounts[order].reshape(4, 2).sum(axis=1).tolist() == [9, 9, 9, 9]


def test_one_kind_alone_is_balanced():
    corpus = corpus_of({6000 + 100 * step: 40 for step in range(12)})
    plan = make_plan(corpus, RELATIVE, Limits(60_000), world_size=4)
    chance = make_plan(corpus, RELATIVE, Limits(60_000), world_size=4, strategy="dual_constraint")
    assert plan_metrics(plan)["efficiency"] > plan_metrics(chance)["efficiency"]
