"""Figures of plans and runs, by hand."""

import numpy as np
import pytest
from corpora import RELATIVE, corpus_of

from al_deepspeed.scheduling.constraints import Limits
from al_deepspeed.scheduling.metrics import (
    bucket_table,
    efficiency,
    imbalance,
    kind_weights,
    plan_metrics,
    variation,
)
from al_deepspeed.scheduling.plan import make_plan

COSTS = np.array([[1.0, 3.0], [2.0, 2.0]])


def test_efficiency_and_imbalance_by_hand():
    assert efficiency(COSTS) == pytest.approx((2 + 2) / (3 + 2))
    assert imbalance(COSTS) == pytest.approx((0.5 + 0.0) / 2)  # std of (1, 3) is 1, mean 2


def test_variation_by_hand():
    assert variation(np.array([1.0, 3.0])) == pytest.approx(0.5)


def test_kind_weights_share_the_gradient():
    shares = kind_weights(("image", "video", "image"), [[0, 1], [2, 1]], np.array([[1.0, 2.0], [0.5, 0.5]]))
    assert shares == {"image": pytest.approx(1.5 / 4), "video": pytest.approx(2.5 / 4)}


def test_metrics_of_a_plan_by_hand():
    # Ten images of S = 10 in two micro-batches of five, and two videos of S = 6000, one a micro-batch.
    plan = make_plan(
        corpus_of({10: 10, 6000: 2}),
        RELATIVE,
        Limits(6000, 500.0),
        world_size=2,
        strategy="dual_constraint",
        seed=1,
    )
    metrics = plan_metrics(plan)
    assert list(metrics) == [
        "strategy", "mixing", "world_size", "accumulation", "efficiency", "imbalance", "tokens_per_s",
        "memory_share", "peak_memory_share", "micro_batches", "splits", "fillers", "dropped", "step_token_cv",
        "step_sample_cv", "steps_without_image", "kind_weight",
    ]  # fmt: skip
    assert metrics["micro_batches"] == 4
    assert metrics["memory_share"] == pytest.approx((2 * 50 + 2 * 6000) / 6000 / 4)
    assert metrics["peak_memory_share"] == 1.0
    assert metrics["tokens_per_s"] == pytest.approx(1000 * 12_100 / plan.cost.max(axis=1).sum())
    per_step = np.where(plan.bucket == 0, plan.size, 0).sum(axis=1) / plan.size.sum(axis=1)
    assert metrics["kind_weight"]["image"] == pytest.approx(per_step.mean())
    assert metrics["steps_without_image"] == (per_step == 0).mean()


def test_fillers_weigh_nothing_but_cost_time():
    plan = make_plan(corpus_of({10: 1}), RELATIVE, Limits(10, 1e9), world_size=4)
    metrics = plan_metrics(plan)
    assert (metrics["fillers"], metrics["micro_batches"]) == (3, 4)
    assert metrics["tokens_per_s"] == pytest.approx(1000 * 10 / 100)
    assert plan.tokens.sum() == 10


def test_bucket_table_names_the_binding_limit():
    corpus, limits = corpus_of({10: 7, 100: 2, 300: 1}), Limits(200, 10_000.0)
    rows = bucket_table(corpus, RELATIVE, limits)
    assert [(row["tokens"], row["samples"], row["batch_size"], row["binding"]) for row in rows] == [
        (10, 7, 20, "memory"),
        (100, 2, 1, "cost"),
        (300, 1, 1, "oversize"),
    ]
    memory = bucket_table(corpus, RELATIVE, limits, memory_only=True)
    assert [(row["batch_size"], row["binding"]) for row in memory] == [
        (20, "memory"),
        (2, "memory"),
        (1, "oversize"),
    ]
