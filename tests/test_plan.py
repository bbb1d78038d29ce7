"""Conservation laws of plans: every sample once, equal counts, weights that sum to R*G; tails and fillers."""

import json
import subprocess
import sys

import numpy as np
import pytest
from corpora import RELATIVE, WAN, consumed, corpus_of, mixed_corpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from al_deepspeed.errors import PlanError, TooFewForAStep
from al_deepspeed.scheduling.constraints import Limits
from al_deepspeed.scheduling.cost import RooflineCost
from al_deepspeed.scheduling.curriculum import Schedule
from al_deepspeed.scheduling.options import CHOICES
from al_deepspeed.scheduling.plan import STRATEGIES, make_plan
from al_deepspeed.scheduling.shapes import corpus_from_samples
from al_deepspeed.scheduling.weights import loss_weights, lr_factors

UNLIMITED = Limits(1 << 40, 1e30)
FLOORED = RooflineCost(floor=5000.0, intercept=50.0, linear=10.0, quadratic=0.5)


def assert_conserved(plan, corpus):
    """What holds for every plan without a curriculum, a mixture or a dropped tail."""
    assert np.array_equal(np.sort(consumed(plan)), np.arange(corpus.samples))
    assert_sound(plan, corpus)


def assert_sound(plan, corpus):
    """What holds for every plan; a filler too is a sample of the shape that it is said to be."""
    assert plan.micro_steps == plan.steps * plan.accumulation > 0
    assert (plan.size > 0).all()
    for micro_step, rank in np.ndindex(plan.size.shape):
        expected = np.full(plan.size[micro_step, rank], plan.bucket[micro_step, rank])
        assert np.array_equal(corpus.bucket[plan.sample_ids(micro_step, rank)], expected)
    assert np.allclose(plan.by_step(plan.loss_weight), plan.world_size * plan.accumulation)
    assert (plan.loss_weight[plan.filler] == 0).all()
    assert (plan.loss_weight[~plan.filler] > 0).all()
    assert (plan.step_samples > 0).all()


any_plan = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def any_corpus(draw):
    """1 to 5,000 samples over 1 to 60 shapes of 1 to 1,000 tokens."""
    shapes, samples = draw(st.integers(1, 60)), draw(st.integers(1, 5000))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    sizes = rng.integers([1, 2, 2], [11, 21, 21], size=(shapes, 3))
    return corpus_from_samples(*sizes[rng.integers(0, shapes, samples)].T)


@any_plan
@given(
    corpus=any_corpus(),
    world_size=st.integers(1, 64),
    accumulation=st.integers(1, 8),
    max_tokens=st.integers(1, 20_000),
    strategy=st.sampled_from(CHOICES["strategy"]),
    mixing=st.sampled_from(CHOICES["mixing"]),
    weighting=st.sampled_from(CHOICES["loss_weighting"]),
    grouped=st.booleans(),
    max_variants=st.sampled_from([None, 200]),
    cost=st.sampled_from([RELATIVE, FLOORED]),
    seed=st.integers(0, 1 << 40),
)
def test_nothing_is_lost_whatever_the_corpus(
    corpus,
    world_size,
    accumulation,
    max_tokens,
    strategy,
    mixing,
    weighting,
    grouped,
    max_variants,
    cost,
    seed,
):
    plan = make_plan(
        corpus,
        cost,
        Limits(max_tokens, 40_000.0),
        world_size=world_size,
        accumulation=accumulation,
        seed=seed,
        strategy=strategy,
        mixing=mixing,
        loss_weighting=weighting,
        group_by_shape=grouped,
        max_variants=None if grouped else max_variants,
    )
    assert_conserved(plan, corpus)
    alone = plan.size == 1
    assert ((plan.size * corpus.tokens[plan.bucket] <= max_tokens) | alone).all()
    if grouped:
        assert (plan.bucket == plan.bucket[:, :1]).all()
    else:
        slots = world_size * accumulation
        assert plan.filler.sum() == 0 or corpus.samples < plan.steps * slots
        if max_variants:
            assert len(np.unique(np.stack([plan.size, plan.bucket]).reshape(2, -1), axis=1).T) <= max_variants


@any_plan
@given(
    corpus=any_corpus(),
    world_size=st.integers(1, 16),
    accumulation=st.integers(1, 4),
    strategy=st.sampled_from(CHOICES["strategy"]),
    mixing=st.sampled_from(CHOICES["mixing"]),
    tail=st.sampled_from(CHOICES["tail"]),
    grouped=st.booleans(),
    lookahead=st.sampled_from([1, 8, 64]),
    lowest=st.floats(0, 1),
    steps=st.integers(1, 100),
    first_step=st.integers(0, 20),
)
def test_a_curriculum_loses_nothing_that_it_admits(
    corpus, world_size, accumulation, strategy, mixing, tail, grouped, lookahead, lowest, steps, first_step
):
    """Difficulty rises from a quantile of the lengths to the longest within so many steps."""
    tokens = corpus.tokens[corpus.bucket]
    least, most = np.quantile(tokens, lowest), tokens.max()
    curriculum = {"seqlen": Schedule(lambda step: least + (most - least) * min(1, step / steps))}
    options = {
        "world_size": world_size,
        "accumulation": accumulation,
        "strategy": strategy,
        "mixing": mixing,
        "tail": tail,
        "group_by_shape": grouped,
        "lookahead": lookahead,
    }
    limits = Limits(5000, 40_000.0)
    try:
        plan = make_plan(corpus, RELATIVE, limits, curriculum=curriculum, first_step=first_step, **options)
    except TooFewForAStep:
        with pytest.raises(TooFewForAStep):
            make_plan(corpus, RELATIVE, limits, **options)
        return
    assert_sound(plan, corpus)
    ids = consumed(plan)
    assert len(np.unique(ids)) == len(ids) == corpus.samples - plan.waiting - plan.dropped
    assert tail == "drop" or plan.dropped == 0
    hardest = corpus.tokens[plan.bucket].reshape(plan.steps, -1).max(axis=1)
    progress = np.minimum(1, (first_step + 1 + np.arange(plan.steps)) / steps)
    assert (hardest <= least + (most - least) * progress).all()


# What broke bucket samplers elsewhere, a small input of each kind.


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("lengths", "budget", "ranks"),
    [
        ([1, 1, 1, 1], 2, 1),  # the last sample was never reached
        ([7], 2, 1),
        ([1, 1, 1, 9, 9, 9, 1, 1, 1], 10, 1),  # one bad group ended the epoch
        ([1, 9, 9, 9], 9, 2),  # ranks disagreed on the number of micro-steps
        ([4, 4, 4], 4, 2),  # three micro-batches for two ranks
        ([4], 4, 4),  # one for four
    ],
)
def test_every_sample_once_and_equal_counts(lengths, budget, ranks, strategy):
    corpus = corpus_of({length: lengths.count(length) for length in set(lengths)})
    plan = make_plan(corpus, RELATIVE, Limits(budget, 1e9), world_size=ranks, strategy=strategy)
    assert_conserved(plan, corpus)
    assert plan.filler.sum() == max(0, ranks * plan.micro_steps - len(lengths))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_small_buckets_do_not_vanish(strategy):
    # 16 samples over 7 shapes, B up to 45
    corpus = corpus_of(dict(zip(range(10, 17), [1, 2, 3, 1, 5, 2, 2], strict=True)))
    plan = make_plan(corpus, RELATIVE, Limits(450, 1e9), world_size=3, strategy=strategy)
    assert_conserved(plan, corpus)
    assert len(consumed(plan)) == 16


def test_a_corpus_below_one_step_is_a_warning_with_fillers():
    plan = make_plan(corpus_of({4: 3}), RELATIVE, Limits(100, 1e9), world_size=4, accumulation=2)
    assert plan.steps == 1
    assert plan.filler.sum() == 5
    assert any("3 samples are fewer than the 8 micro-batches" in warning for warning in plan.warnings)


def test_halving_completes_a_step_before_any_filler_does():
    # Eight samples fit one micro-batch; four ranks take two each.
    plan = make_plan(corpus_of({4: 8}), RELATIVE, Limits(1000, 1e9), world_size=4, strategy="dual_constraint")
    assert plan.size.tolist() == [[2, 2, 2, 2]]
    assert (plan.splits, plan.filler.sum()) == (3, 0)


def test_a_sample_over_the_budget_is_trained_alone_and_named():
    corpus = corpus_of({100: 5, 513: 1})
    plan = make_plan(corpus, RELATIVE, Limits(512, 1e9), world_size=1)
    row = int(np.flatnonzero(corpus.tokens[corpus.bucket] == 513)[0])
    assert plan.size[corpus.tokens[plan.bucket] == 513].tolist() == [1]
    assert any(f"row {row} has 513 tokens" in warning for warning in plan.warnings)
    assert_conserved(plan, corpus)


def test_a_sample_over_the_budget_can_be_skipped_or_refused():
    corpus = corpus_of({100: 5, 513: 1})
    plan = make_plan(corpus, RELATIVE, Limits(512, 1e9), world_size=1, on_oversize="skip")
    assert (plan.dropped, len(consumed(plan))) == (1, 5)
    with pytest.raises(PlanError, match=r"max_tokens is 512, but row \d+ has 513 tokens"):
        make_plan(corpus, RELATIVE, Limits(512, 1e9), world_size=1, on_oversize="error")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_dropped_tail_is_counted(strategy):
    corpus = corpus_of({10: 100, 20: 30})
    plan = make_plan(corpus, RELATIVE, Limits(100, 1e9), world_size=3, strategy=strategy, tail="drop")
    ids = consumed(plan)
    assert plan.filler.sum() == plan.splits == 0
    assert len(np.unique(ids)) == len(ids) == corpus.samples - plan.dropped
    assert 0 < plan.dropped < 3 * 10
    with pytest.raises(PlanError, match="do not fill one step of 64"):
        make_plan(
            corpus_of({10: 5}), RELATIVE, Limits(100, 1e9), world_size=64, tail="drop", strategy=strategy
        )


def test_an_empty_corpus_is_an_error():
    corpus = corpus_of({10: 1})
    empty = type(corpus)(corpus.shapes, corpus.tokens, corpus.kinds, corpus.bucket[:0], "none")
    with pytest.raises(PlanError, match="no sample"):
        make_plan(empty, RELATIVE, UNLIMITED, world_size=1)


@pytest.mark.parametrize("option", sorted(CHOICES))
def test_an_unknown_choice_is_refused_by_name(option):
    with pytest.raises(PlanError, match=f"{option} is 'odd'; allowed are"):
        make_plan(corpus_of({10: 1}), RELATIVE, UNLIMITED, world_size=1, **{option: "odd"})


# Weights.


def test_weights_by_hand():
    # One step of R = 2, G = 2: n = 3, 1, 2 and a filler; S = 10, 40, 10, 10.
    size, tokens = np.array([[3, 1], [2, 1]]), np.array([[10, 40], [10, 10]])
    filler = np.array([[False, False], [False, True]])
    by_sample = loss_weights(size, tokens, filler, 2, "sample", "step")
    assert by_sample == pytest.approx(np.array([[3, 1], [2, 0]]) * 4 / 6)
    by_token = loss_weights(size, tokens, filler, 2, "token", "step")
    assert by_token == pytest.approx(np.array([[30, 40], [20, 0]]) * 4 / 90)
    by_micro_batch = loss_weights(size, tokens, filler, 2, "micro_batch", "step")
    assert by_micro_batch == pytest.approx(np.array([[1, 1], [1, 0]]) * 4 / 3)


def test_normalised_by_epoch_every_sample_weighs_the_same_all_epoch():
    plan = make_plan(
        mixed_corpus(400), WAN, Limits(166_320, 2100.0), world_size=4, accumulation=2, normalise_by="epoch"
    )
    per_sample = plan.loss_weight / plan.size
    assert per_sample == pytest.approx(np.full(plan.size.shape, per_sample[0, 0]))
    assert plan.loss_weight.sum() == pytest.approx(plan.size.size)


def test_gradient_of_weighted_means_is_the_mean_over_the_step():
    # DeepSpeed divides the sum over ranks and micro-steps by R*G.
    plan = make_plan(mixed_corpus(300), WAN, Limits(166_320, 2100.0), world_size=4, accumulation=2)
    loss = np.random.default_rng(0).normal(size=300)
    step_loss = np.zeros(plan.steps)
    for micro_step, rank in np.ndindex(plan.size.shape):
        batch = plan.micro_batch(micro_step, rank)
        step_loss[micro_step // 2] += batch.loss_weight * loss[batch.sample_ids].mean() / (4 * 2)
    for step in range(plan.steps):
        assert step_loss[step] == pytest.approx(loss[consumed(plan, 2 * step, 2 * step + 2)].mean())


def test_lr_factors_by_hand():
    assert lr_factors(np.array([10, 40]), "none").tolist() == [1, 1]
    assert lr_factors(np.array([10, 40]), "linear").tolist() == [0.4, 1.6]
    assert lr_factors(np.array([9, 16, 5]), "sqrt") == pytest.approx([0.9**0.5, 1.6**0.5, 0.5**0.5])
    with pytest.raises(PlanError, match="lr_scaling is 'cubic'"):
        lr_factors(np.array([1]), "cubic")


# Chance.


def test_a_plan_depends_on_seed_and_epoch_alone():
    corpus = mixed_corpus(500)
    digests = {
        (seed, epoch): make_plan(
            corpus, WAN, Limits(166_320, 2100.0), world_size=4, seed=seed, epoch=epoch
        ).digest()
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert len(set(digests.values())) == 4
    np.random.seed(1)
    assert (
        make_plan(corpus, WAN, Limits(166_320, 2100.0), world_size=4, seed=2, epoch=1).digest()
        == digests[2, 1]
    )


def test_processes_with_other_global_seeds_make_the_same_plan():
    script = (
        "import sys, json, random, numpy as np; random.seed(sys.argv[1]); np.random.seed(int(sys.argv[1]))\n"
        "from corpora import WAN, mixed_corpus\n"
        "from al_deepspeed.scheduling.plan import make_plan\n"
        "from al_deepspeed.scheduling.constraints import Limits\n"
        "print(json.dumps(make_plan(mixed_corpus(700), WAN, Limits(166320), world_size=6, seed=3).digest()))"
    )
    digests = {
        json.loads(
            subprocess.run(
                [sys.executable, "-c", script, seed],
                cwd=__file__.rsplit("/", 1)[0],
                env={"PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for seed in ("1", "2")
    }
    assert len(digests) == 1


# Mixture and curriculum.


def test_a_mixture_gives_each_kind_its_share_of_the_draws():
    corpus = corpus_of({100: 90, 6000: 10})
    plans = [
        make_plan(corpus, RELATIVE, UNLIMITED, world_size=2, epoch=e, mixture={"image": 0.3, "video": 0.7})
        for e in range(3)
    ]
    draws = [np.bincount(consumed(plan), minlength=100) for plan in plans]
    video = corpus.tokens[corpus.bucket] == 6000
    for drawn in draws:
        assert drawn[video].tolist() == [7] * 10
        assert drawn[~video].sum() == 30
        assert drawn[~video].max() == 1
    assert sum(draws)[~video].tolist() == [1] * 90  # who is left out goes round


def test_a_mixture_may_name_shapes_and_must_name_what_there_is():
    corpus = corpus_of({100: 50, 200: 50})
    shapes = {corpus.bucket_name(0): 1.0, corpus.bucket_name(1): 3.0}
    plan = make_plan(corpus, RELATIVE, UNLIMITED, world_size=1, mixture=shapes)
    assert np.bincount(corpus.bucket[consumed(plan)]).tolist() == [25, 75]
    with pytest.raises(PlanError, match=r"mixture names \['audio'\]"):
        make_plan(corpus, RELATIVE, UNLIMITED, world_size=1, mixture={"audio": 1.0})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_curriculum_admits_nothing_above_its_difficulty(strategy):
    corpus = corpus_of(dict.fromkeys((10, 20, 30, 40, 50), 200))
    metrics = {"motion": np.random.default_rng(0).integers(0, 100, corpus.samples)}
    corpus = type(corpus)(corpus.shapes, corpus.tokens, corpus.kinds, corpus.bucket, "f", metrics)
    schedules = {"seqlen": Schedule(lambda step: 10 + 2 * step), "motion": Schedule(lambda step: 60 + step)}
    plan = make_plan(
        corpus,
        RELATIVE,
        Limits(100, 1e9),
        world_size=2,
        accumulation=2,
        strategy=strategy,
        curriculum=schedules,
        first_step=5,
        lookahead=8,
    )
    for step in range(plan.steps):
        ids = consumed(plan, 2 * step, 2 * step + 2)
        assert corpus.tokens[corpus.bucket[ids]].max() <= 10 + 2 * (5 + step + 1)
        assert metrics["motion"][ids].max() <= 60 + (5 + step + 1)
    ids = consumed(plan)
    assert len(np.unique(ids)) == len(ids) == corpus.samples - plan.waiting
    assert np.allclose(plan.by_step(plan.loss_weight), 4)
    assert len(np.unique(corpus.bucket[ids])) == 5


def test_an_epoch_ends_early_when_admitted_samples_run_out():
    corpus = corpus_of({10: 30, 50: 70})
    plan = make_plan(
        corpus, RELATIVE, Limits(100, 1e9), world_size=2, curriculum={"seqlen": Schedule(lambda step: 20)}
    )
    assert (plan.waiting, plan.dropped) == (70, 0)
    assert corpus.tokens[corpus.bucket[np.sort(consumed(plan))]].tolist() == [10] * 30
    assert any("holds 70 samples back" in warning for warning in plan.warnings)
    assert len(plan.left_after(plan.micro_steps)) == 70


def test_samples_that_wait_for_the_next_step_take_the_places_of_fillers():
    # Step 1 has four places for the seven samples that it admits; two steps of them would hold a filler.
    corpus = corpus_of({10: 7, 20: 6})
    plan = make_plan(
        corpus,
        RELATIVE,
        Limits(1, 1e9),
        world_size=2,
        accumulation=2,
        lookahead=1,
        curriculum={"seqlen": Schedule(lambda step: 10 if step == 1 else 20)},
    )
    assert_conserved(plan, corpus)
    assert plan.step_samples[0] == 4
    assert (plan.steps, plan.filler.sum()) == (4, 3)  # 13 samples, 16 places


def test_before_the_epochs_end_a_tail_joins_the_next_stretch():
    # Five micro-batches of ten for two ranks: one waits, and with the five of length 20 makes three steps.
    corpus = corpus_of({10: 50, 20: 25})
    plan = make_plan(
        corpus,
        RELATIVE,
        Limits(100, 1e9),
        world_size=2,
        strategy="dual_constraint",
        tail="drop",
        curriculum={"seqlen": Schedule(lambda step: 10 if step <= 2 else 20)},
    )
    assert_conserved(plan, corpus)
    assert (plan.steps, plan.dropped, plan.splits) == (5, 0, 0)


def test_a_tail_that_holds_the_curriculum_up_is_split():
    # Three micro-batches of ten for four ranks, and nothing else is admitted at step 1.
    corpus = corpus_of({10: 30, 20: 105})
    plan = make_plan(
        corpus,
        RELATIVE,
        Limits(100, 1e9),
        world_size=4,
        strategy="dual_constraint",
        tail="drop",
        curriculum={"seqlen": Schedule(lambda step: 10 if step == 1 else 20)},
    )
    assert np.sort(plan.size[0]).tolist() == [5, 5, 10, 10]
    assert (plan.steps, plan.dropped, plan.waiting) == (1 + 21 // 4, 5, 0)


def test_a_curriculum_that_admits_all_drops_a_tail_as_without_one():
    everything = {"seqlen": Schedule(lambda step: 100)}
    with pytest.raises(PlanError, match="5 micro-batches do not fill one step of 64"):
        make_plan(
            corpus_of({10: 5}), RELATIVE, Limits(1, 1e9), world_size=64, tail="drop", curriculum=everything
        )


def test_percentiles_count_parts_of_the_corpus():
    corpus = corpus_of({10: 100})
    score = np.arange(100)[::-1].copy()
    corpus = type(corpus)(corpus.shapes, corpus.tokens, corpus.kinds, corpus.bucket, "f", {"score": score})
    plan = make_plan(
        corpus, RELATIVE, Limits(100, 1e9), world_size=1, curriculum={"score": Schedule(lambda step: 3, 10)}
    )
    assert np.sort(score[consumed(plan)]).tolist() == list(range(30))


def test_a_curriculum_that_admits_nothing_or_names_nothing_is_an_error():
    corpus = corpus_of({10: 5})
    with pytest.raises(PlanError, match=r"admits too few samples at global step 1: .*'seqlen': 5"):
        make_plan(corpus, RELATIVE, UNLIMITED, world_size=1, curriculum={"seqlen": Schedule(lambda step: 5)})
    with pytest.raises(PlanError, match="'aesthetic' is no numeric column; the manifest has seqlen"):
        make_plan(
            corpus, RELATIVE, UNLIMITED, world_size=1, curriculum={"aesthetic": Schedule(lambda step: 5)}
        )
