"""One rank's sampler: consumed positions, resuming, other worlds, states that do not belong."""

import json
import pickle
import random
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from corpora import RELATIVE, WAN, corpus_of, mixed_corpus
from torch.utils.data import DataLoader, Dataset

from al_deepspeed.errors import PlanError
from al_deepspeed.scheduling.constraints import Limits
from al_deepspeed.scheduling.sampler import PlanSampler

LIMITS = Limits(166_320, 2100.0)
CORPUS = mixed_corpus(900)


def samplers(world_size: int, accumulation: int = 1, corpus=CORPUS, cost=WAN, limits=LIMITS, **options):
    """The samplers of all ranks."""
    return [
        PlanSampler(
            corpus,
            cost,
            limits,
            rank=rank,
            world_size=world_size,
            accumulation=accumulation,
            seed=5,
            **options,
        )
        for rank in range(world_size)
    ]


def train(world: list[PlanSampler], micro_steps: int) -> list[int]:
    """Consume micro-steps on all ranks, over ends of epochs; ids of the samples that count."""
    ids = []
    while micro_steps:
        stretch = min(micro_steps, len(world[0]))
        for sampler in world:
            batches = [batch for _, batch in zip(range(stretch), sampler.upcoming(), strict=False)]
            ids += [int(i) for _, batch in batches if not batch.filler for i in batch.sample_ids]
        for sampler in world:
            sampler.advance(stretch)
        micro_steps -= stretch
    return ids


def saved(world: list[PlanSampler]) -> dict:
    """The state after a round trip, the same on every rank."""
    states = [json.dumps(sampler.state_dict()) for sampler in world]
    assert len(set(states)) == 1
    assert len(pickle.dumps(world[0].state_dict())) < 1000
    return json.loads(states[0])


def resumed(state: dict, world_size: int, accumulation: int, **options) -> list[PlanSampler]:
    world = samplers(world_size, accumulation, **options)
    for sampler in world:
        sampler.load_state_dict(state)
    return world


def test_length_is_what_iteration_yields():
    for sampler in samplers(3):
        assert len(list(sampler)) == len(sampler) == sampler.plan.micro_steps


def test_resuming_gives_the_sequence_of_a_run_without_a_stop_over_two_epochs():
    whole, stopped = samplers(2, 2), samplers(2, 2)
    first, second = ([train(whole, 1) for _ in range(len(whole[0]))] for _ in range(2))
    before = [train(stopped, 1) for _ in range(8)]
    world = resumed(saved(stopped), 2, 2)
    after = [train(world, 1) for _ in range(len(first) + len(second) - 8)]
    assert before + after == first + second
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(900))
    assert first != second


def test_an_unfinished_step_runs_again():
    world = samplers(2, 4)
    train(world, 6)
    assert resumed(saved(world), 2, 4)[0].position == 4


@pytest.mark.parametrize("strategy", ["dual_constraint", "balanced"])
def test_other_worlds_in_one_epoch_lose_nothing_and_repeat_nothing(strategy):
    first = samplers(8, 2, strategy=strategy)
    seen = train(first, 2 * 3)
    second = resumed(saved(first), 6, 3, strategy=strategy)
    seen += train(second, 3 * 2)
    third = resumed(saved(second), 3, 1, strategy=strategy)
    seen += train(third, len(third[0]))
    assert sorted(seen) == list(range(900))
    assert third[0].epoch == 1


def test_a_second_stop_in_the_new_world_resumes_there():
    first = samplers(4)
    train(first, 3)
    second = resumed(saved(first), 2, 2)
    train(second, 4)
    again = resumed(saved(second), 2, 2)
    assert again[0].position == 4
    assert train(again, 6) == train(second, 6)


def test_a_state_of_the_very_beginning_or_end_names_no_part():
    world = samplers(4)
    assert resumed(saved(world), 2, 1)[0]._earlier_parts == []
    train(world, len(world[0]))
    state = saved(world)
    assert (state["epoch"], state["parts"]) == (1, [[4, 1, 0]])


def test_fillers_do_not_come_back_as_samples():
    corpus = corpus_of({10: 5})
    first = samplers(2, corpus=corpus, cost=RELATIVE, limits=Limits(10, 1e9))
    seen = train(first, 1)
    second = resumed(saved(first), 4, 1, corpus=corpus, cost=RELATIVE, limits=Limits(10, 1e9))
    assert sorted(seen + train(second, len(second[0]))) == list(range(5))


def test_a_changed_manifest_is_an_error_with_both_fingerprints():
    other = mixed_corpus(901)
    state = saved(samplers(2))
    with pytest.raises(PlanError, match=f"{CORPUS.fingerprint}, but this run has {other.fingerprint}"):
        resumed(state, 2, 1, corpus=other)


def test_changed_planning_is_an_error_with_both_fingerprints():
    world = samplers(2)
    other = samplers(2, lookahead=8)[0].planning_fingerprint
    with pytest.raises(PlanError, match=f"{world[0].planning_fingerprint}, but this run has {other}"):
        resumed(saved(world), 2, 1, lookahead=8)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"version": 99}, "has version 99; this release reads a whole one of version 1"),
        ({"version": 1, "epoch": 0, "parts": []}, "lacks manifest, planning, seed, steps_before_epoch;"),
        ({"streaming": True, "epoch": 0, "windows": 3}, "is a stream's, which names no samples"),
    ],
)
def test_a_state_that_is_no_position_of_ours_is_an_error(state, words):
    with pytest.raises(PlanError, match=words):
        resumed(state, 2, 1)


def test_more_than_is_left_cannot_be_consumed():
    sampler = samplers(2)[0]
    with pytest.raises(PlanError, match="cannot be consumed"):
        sampler.advance(len(sampler) + 1)


def test_a_rank_outside_the_world_is_an_error():
    with pytest.raises(PlanError, match="rank is 2"):
        PlanSampler(CORPUS, WAN, LIMITS, rank=2, world_size=2)


def test_ranks_with_other_global_seeds_still_share_the_samples_out():
    seen = []
    for rank in range(3):
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        sampler = PlanSampler(CORPUS, WAN, LIMITS, rank=rank, world_size=3)
        batches = [batch for _, batch in sampler.upcoming() if not batch.filler]
        seen += [int(i) for batch in batches for i in batch.sample_ids]
    assert sorted(seen) == list(range(900))


class Rows(Dataset):
    def __getitem__(self, row: int) -> int:
        return row

    def __len__(self) -> int:
        return 900


def test_workers_that_run_ahead_do_not_move_the_position():
    sampler = samplers(2)[0]
    batches = iter(DataLoader(Rows(), batch_sampler=sampler, num_workers=2, prefetch_factor=4))
    seen = []
    for _ in range(3):
        seen += next(batches).tolist()
        sampler.advance()
    state = sampler.state_dict()
    assert state["parts"] == [[2, 1, 3]]
    del batches
    again = resumed(state, 2, 1)[0]
    assert [*seen, *chain(*again)] == list(chain(*samplers(2)[0]))


LINEAR = {
    "min_difficulty": 256,
    "max_difficulty": 75_600,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 40, "difficulty_step": 8},
}


def test_deepspeeds_schedule_moves_over_epochs_and_resumes():
    world = samplers(2, curriculum={"seqlen": LINEAR}, lookahead=4)
    step = 0
    for _ in range(3):
        epoch = world[0].epoch
        while world[0].epoch == epoch:
            limit = 256 + (75_600 - 256) * min(1.0, (step + 1) / 40)
            assert CORPUS.tokens[CORPUS.bucket[train(world, 1)]].max() <= limit
            step += 1
    state = saved(world)
    assert state["steps_before_epoch"] == step
    again = resumed(state, 2, 1, curriculum={"seqlen": LINEAR}, lookahead=4)
    assert train(again, 3) == train(world, 3)


def test_a_custom_schedule_is_asked_for_and_used():
    sampler = samplers(1, curriculum={"seqlen": LINEAR | {"schedule_type": "custom"}})[0]
    with pytest.raises(PlanError, match="set_custom_curriculum_learning_schedule"):
        len(sampler)
    sampler.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 4096, "other": None})
    assert CORPUS.tokens[CORPUS.bucket[list(chain(*sampler))]].max() == 4096


def test_deepspeeds_percentiles_of_a_column_and_a_value_at_once():
    score = np.random.default_rng(0).permutation(CORPUS.samples)
    corpus = replace(CORPUS, metrics={"score": score})
    by_score = {
        "difficulty_type": "percentile",
        "min_difficulty": 20,
        "max_difficulty": 100,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [20, 100], "max_step": [3]},
    }
    by_length = {
        "min_difficulty": 4096,
        "max_difficulty": 75_600,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [4096, 75_600], "max_step": [5]},
    }
    curriculum = {"score": by_score, "seqlen": by_length}
    world = samplers(2, corpus=corpus, curriculum=curriculum, lookahead=1)
    for step in range(8):  # a fifth of 900 samples is 180; steps count from 1 in the schedules
        ids = train(world, 1)
        if step < 3:
            assert score[ids].max() < 180
        if step < 5:
            assert corpus.tokens[corpus.bucket[ids]].max() <= 4096


def test_a_metric_without_a_number_is_refused_by_row():
    corpus = replace(CORPUS, metrics={"score": np.where(np.arange(CORPUS.samples) == 7, np.nan, 1.0)})
    sampler = samplers(1, corpus=corpus, curriculum={"score": LINEAR})[0]
    with pytest.raises(PlanError, match="'score' is absent or NaN for 1 samples, the first of them row 7"):
        len(sampler)


def test_with_tail_drop_a_new_world_drops_what_fills_no_step_of_its_own():
    """60 pictures, one a micro-batch: 30 micro-steps of two ranks; four are left where eight are needed."""
    corpus = corpus_of({16: 60})
    options = {"corpus": corpus, "cost": RELATIVE, "limits": Limits(16, 1e4), "tail": "drop"}
    two = samplers(2, **options)
    assert len(two[0]) == 30
    train(two, 28)
    eight = samplers(8, **options)
    for sampler in eight:
        sampler.load_state_dict(saved(two))
    assert [(sampler.epoch, len(sampler)) for sampler in eight] == [(1, 7)] * 8
    assert len(set(train(eight, 7))) == 56
