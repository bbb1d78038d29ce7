"""Windows from streams: every sample once, all ranks agree, and balance near a plan's."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from corpora import MIX, MIX_MEMORY, WAN, mixed_corpus

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


def stream(rank: int, samples: int):
    """Pairs of shape and a name, of this rank alone."""
    weights = np.array([row[3] for row in MIX])
    drawn = np.random.default_rng(rank).choice(len(MIX), samples, p=weights / weights.sum())
    for number, row in enumerate(drawn.tolist()):
        frames, height, width, _ = MIX[row]
        yield ("image" if frames == 1 else "video", frames, height, width), (rank, number)


def run_ranks(world_size: int, samples: list[int], **options):
    """All ranks in threads: what each yields, and the plans of its windows."""
    barrier, reports = threading.Barrier(world_size), [None] * world_size
    yielded, plans = [[] for _ in range(world_size)], [[] for _ in range(world_size)]

    def rank_main(rank: int) -> None:
        def gather(report):
            reports[rank] = report
            barrier.wait()
            everyone = list(reports)
            barrier.wait()
            return everyone

        world = {"rank": rank, "world_size": world_size, "gather": gather}
        sampler = StreamSampler(stream(rank, samples[rank]), WAN, LIMITS, **world, **options)
        try:
            for batch, names in sampler:
                if not plans[rank] or plans[rank][-1] is not sampler.plan:
                    plans[rank].append(sampler.plan)
                yielded[rank].append((batch, names))
        except BaseException:
            barrier.abort()  # or the others would wait for ever
            raise

    with ThreadPoolExecutor(world_size) as ranks:
        errors = [done.exception() for done in [ranks.submit(rank_main, rank) for rank in range(world_size)]]
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return yielded, plans


def test_every_sample_of_every_stream_once_and_equal_counts():
    samples = [300, 80, 151]
    yielded, plans = run_ranks(3, samples, accumulation=2, lookahead=8)
    assert len({len(batches) for batches in yielded}) == 1
    for rank, batches in enumerate(yielded):
        names = [name for batch, run in batches if not batch.filler for name in run]
        assert sorted(names) == [(rank, number) for number in range(samples[rank])]
        assert all(len(run) == len(batch.sample_ids) > 0 for batch, run in batches)
    for ours, theirs in zip(plans[0], plans[1], strict=True):
        assert ours.digest() == theirs.digest()
        assert np.allclose(ours.by_step(ours.loss_weight), 3 * 2)
        assert set(plan_metrics(ours)) >= {"efficiency", "kind_weight"}


def test_a_batch_is_of_the_shape_that_it_says():
    for batch, names in run_ranks(1, [200], lookahead=4)[0][0]:
        shapes = dict(enumerate(shape for shape, _ in stream(0, 200)))
        assert {shapes[number][1:] for _, number in names} == {batch.shape}


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


def test_a_rank_without_any_sample_is_an_error():
    sampler = StreamSampler(iter(()), WAN, LIMITS, rank=1, world_size=2, gather=lambda report: [full, report])
    full = StreamSampler(stream(0, 5), WAN, LIMITS, rank=0, world_size=2, gather=list)
    full._fill()
    full = full._report()
    with pytest.raises(PlanError, match="rank 1 has read no sample"):
        list(sampler)


def test_a_stream_says_that_it_cannot_be_resumed():
    sampler = StreamSampler(stream(0, 5), WAN, LIMITS, rank=0, world_size=1, gather=lambda report: [report])
    with pytest.raises(PlanError, match="no position to go back to"):
        sampler.load_state_dict(sampler.state_dict())
