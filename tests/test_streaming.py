"""Windows from streams: every sample once, all ranks agree, and balance near a plan's."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from corpora import MIX, MIX_MEMORY, WAN, corpus_of, mixed_corpus

from al_deepspeed.errors import PlanError
from al_deepspeed.scheduling.arrangement import Task
from al_deepspeed.scheduling.constraints import Limits
from al_deepspeed.scheduling.metrics import efficiency, plan_metrics
from al_deepspeed.scheduling.options import PlanOptions
from al_deepspeed.scheduling.pieces import random_stream
from al_deepspeed.scheduling.plan import make_plan
from al_deepspeed.scheduling.streaming import StreamSampler
from al_deepspeed.scheduling.windows import plan_window

LIMITS = Limits(MIX_MEMORY, float(WAN.cost(1, 75600)))


class Stream:
    """Pairs of shape and a name, of one rank alone; another permutation each time it is iterated over."""

    def __init__(self, rank: int, samples: int, failing_at: int | None = None) -> None:
        weights = np.array([row[3] for row in MIX])
        self.drawn = np.random.default_rng(rank).choice(len(MIX), samples, p=weights / weights.sum())
        self.rank, self.failing_at = rank, failing_at

    def shape(self, number: int) -> tuple[str, int, int, int]:
        frames, height, width, _ = MIX[self.drawn[number]]
        return ("image" if frames == 1 else "video", frames, height, width)

    def __iter__(self):
        for number in range(len(self.drawn)):
            if number == self.failing_at:
                raise OSError("the tar ends early")
            yield self.shape(number), (self.rank, number)


def run_ranks(streams: list, epochs: int = 1, take=None, limits: Limits = LIMITS, **options):
    """All ranks in threads: what each yields a epoch, the plans of its windows, and errors."""
    world_size = len(streams)
    barrier, reports = threading.Barrier(world_size), [None] * world_size
    yielded, plans = [[] for _ in range(world_size)], [[] for _ in range(world_size)]

    def rank_main(rank: int) -> None:
        def gather(report):
            reports[rank] = report
            barrier.wait(30)
            everyone = list(reports)
            barrier.wait(30)
            return everyone

        world = {"rank": rank, "world_size": world_size, "gather": gather}
        sampler = StreamSampler(streams[rank], WAN, limits, **world, **options)
        while sampler.epoch < epochs:
            for plan, micro_step, batch, names in sampler.upcoming():
                if micro_step == 0:
                    plans[rank].append(plan)
                yielded[rank].append((sampler.epoch, batch, names))
                sampler.advance()
                if take is not None and len(yielded[rank]) % take == 0:
                    break  # as training loops do; the next iteration goes on

    with ThreadPoolExecutor(world_size) as ranks:
        errors = [done.exception() for done in [ranks.submit(rank_main, rank) for rank in range(world_size)]]
    return yielded, plans, errors


@pytest.mark.parametrize("take", [None, 7])
def test_every_sample_of_every_stream_once_an_epoch_and_equal_counts(take):
    samples = [300, 80, 151]
    streams = [Stream(rank, number) for rank, number in enumerate(samples)]
    yielded, plans, errors = run_ranks(streams, epochs=2, take=take, accumulation=2, lookahead=8)
    assert errors == [None] * 3
    for epoch in (0, 1):  # all ranks end it together
        assert len({sum(mine == epoch for mine, *_ in batches) for batches in yielded}) == 1
    for rank, batches in enumerate(yielded):
        for epoch in (0, 1):
            names = [
                name for mine, batch, run in batches if mine == epoch and not batch.filler for name in run
            ]
            assert sorted(names) == [(rank, number) for number in range(samples[rank])]
        assert all(len(run) == len(batch.sample_ids) > 0 for _, batch, run in batches)
    for ours, theirs in zip(plans[0], plans[1], strict=True):
        assert ours.digest() == theirs.digest()
        assert np.allclose(ours.by_step(ours.loss_weight), 3 * 2)
        assert set(plan_metrics(ours)) >= {"efficiency", "kind_weight"}


def test_a_batch_is_of_the_shape_that_it_says():
    stream = Stream(0, 200)
    yielded, _, errors = run_ranks([stream], lookahead=4)
    assert errors == [None]
    for _, batch, names in yielded[0]:
        assert {stream.shape(number)[1:] for _, number in names} == {batch.shape}


def test_windows_come_near_the_manifest_plan():
    world_size, lookahead = 16, 64
    corpus = mixed_corpus(40_000)
    chances, rng = corpus.counts() / corpus.samples, np.random.default_rng(0)
    held = np.zeros((world_size, corpus.buckets), dtype=np.int64)
    seen, costs = held.sum(axis=0), []
    for window in range(5):
        for rank in range(world_size):  # each rank reads what its buffer has room for
            room = lookahead * MIX_MEMORY - held[rank] @ corpus.tokens
            read = rng.multinomial(max(0, room) // int(chances @ corpus.tokens), chances)
            held[rank] += read
            seen = seen + read
        options = PlanOptions(lookahead=lookahead)
        task = Task(corpus, seen, WAN, LIMITS, world_size, 1, options, random_stream(0, window))
        never, idle = np.zeros(held.shape, dtype=bool), np.zeros(world_size, dtype=np.int64)
        grid = plan_window(task, held, lookahead, never, idle)
        assert not grid.filler.any()
        for bucket, size in zip(grid.bucket, grid.size, strict=True):
            held[np.arange(world_size), bucket] -= size
        assert (held >= 0).all()
        costs.append(WAN.cost(grid.size, corpus.tokens[grid.bucket]))
    planned = make_plan(corpus, WAN, LIMITS, world_size=world_size)
    assert efficiency(np.concatenate(costs)) >= efficiency(planned.cost) - 0.02


def test_what_stops_one_rank_stops_all_of_them_with_the_same_words():
    _, _, errors = run_ranks([Stream(0, 50), Stream(1, 50, failing_at=20), Stream(2, 50)])
    assert [type(error) for error in errors] == [PlanError] * 3
    message = "rank 1 could not read its stream: OSError: the tar ends early"
    assert all(message in str(error) for error in errors)


def test_a_rank_that_reads_nothing_is_lent_a_sample():
    yielded, _, errors = run_ranks([[], Stream(1, 30), []], epochs=2, lookahead=4)
    assert errors == [None] * 3
    for rank, batches in enumerate(yielded):
        assert len(batches) == len(yielded[1]) > 0
        if rank != 1:
            assert all(batch.filler and batch.loss_weight == 0 for _, batch, _ in batches)
            ((lender, _),) = {name for _, _, names in batches for name in names}
            assert lender == 1
            assert {tuple(batch.sample_ids.tolist()) for _, batch, _ in batches} == {(-1,)}
    for epoch in (0, 1):
        names = [
            name for mine, batch, run in yielded[1] if mine == epoch and not batch.filler for name in run
        ]
        assert sorted(names) == [(1, number) for number in range(30)]


def test_a_sample_larger_than_the_budget_is_trained_alone_with_a_warning():
    streams = [[(("image", 1, 4, 4), rank)] * 20 + [(("video", 5, 32, 32), rank)] * 2 for rank in (0, 1)]
    yielded, plans, errors = run_ranks(streams, limits=Limits(1000, 1e6))
    assert errors == [None] * 2
    alone = [names for _, batch, names in yielded[0] if batch.shape == (5, 32, 32) and not batch.filler]
    assert alone == [[0], [0]]
    (warning,) = {warning for plan in plans[0] for warning in plan.warnings}
    assert "max_tokens is 1000, but the stream has samples of 1280 tokens (video 5x32x32)" in warning


def test_what_fits_none_of_the_turns_is_run_nevertheless():
    # One micro-step, whose turn is the short samples' class; but what is left is one long sample.
    corpus = corpus_of({100: 1000, 20_000: 1})
    limits = Limits(40_000, float(WAN.cost(1, 20_000)))
    task = Task(corpus, corpus.counts(), WAN, limits, 2, 1, PlanOptions(), random_stream(0))
    held = np.array([[0, 1], [0, 0]])
    window = plan_window(task, held, 1, held > 0, np.array([0, 0]))
    assert window.bucket.tolist() == [[1, 0]]
    assert window.filler.tolist() == [[False, True]]


def test_a_generator_has_no_second_epoch():
    _, _, errors = run_ranks([iter(Stream(rank, 30)) for rank in range(2)], epochs=2)
    assert all("gave no sample in epoch 1" in str(error) for error in errors)


def test_batches_that_are_drawn_but_not_trained_on_are_an_error():
    sampler = StreamSampler(Stream(0, 30), WAN, LIMITS, rank=0, world_size=1, gather=lambda report: [report])
    with pytest.raises(PlanError, match="not trained on"):
        list(sampler.upcoming())


def test_a_stream_says_that_it_cannot_be_resumed_and_begins_its_epoch_again():
    def start() -> StreamSampler:
        one = {"rank": 0, "world_size": 1, "gather": lambda report: [report], "lookahead": 4}
        return StreamSampler(Stream(0, 90), WAN, LIMITS, **one)

    sampler = start()
    while sampler.epoch < 1:
        for _ in sampler.upcoming():
            sampler.advance()
    for _, micro_step, *_ in sampler.upcoming():
        sampler.advance()
        if micro_step == 2:
            break
    state = sampler.state_dict()
    for again in (start(), sampler):  # afresh, or in the middle of an epoch
        assert "no position to go back to: epoch 1 begins again" in again.load_state_dict(state)
        names = []
        for _, _, batch, run in again.upcoming():
            names += [] if batch.filler else run
            again.advance()
        assert sorted(names) == [(0, number) for number in range(90)] and again.epoch == 2
