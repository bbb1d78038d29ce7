"""The loader, the position that it keeps, what ranks agree on, and the telemetry file, without a launch."""

import json
import os
import signal

import pytest
from launched import tiny

from al_deepspeed.agreement import StopOnSignal
from al_deepspeed.errors import ConfigError, PlanError
from al_deepspeed.groups import order
from al_deepspeed.loader import Listener, PlannedBatches
from al_deepspeed.scheduling.constraints import Limits
from al_deepspeed.scheduling.cost import PowerCost
from al_deepspeed.scheduling.sampler import PlanSampler
from al_deepspeed.scheduling.shapes import corpus_from_samples
from al_deepspeed.telemetry import TelemetryFile, read_telemetry

FRAMES, HEIGHT, WIDTH = zip(*tiny.ROWS, strict=True)


class Notes(Listener):
    """Remembers the micro-steps that were handed out."""

    def __init__(self) -> None:
        self.handed_out: list[int] = []
        self.closed = 0
        self.micro_steps_done = 0

    def hand_out(self, plan, micro_step, wait_ms) -> None:
        self.handed_out.append(micro_step)

    def close(self) -> None:
        self.closed += 1


def loader_of(rank=0, **options) -> tuple[PlannedBatches, PlanSampler, Notes]:
    sampler = PlanSampler(
        corpus_from_samples(FRAMES, HEIGHT, WIDTH),
        PowerCost(exponent=2.0),
        Limits(160, 6400.0),
        rank=rank,
        world_size=2,
        accumulation=2,
        seed=11,
        strategy="dual_constraint",
    )
    notes = Notes()
    return PlannedBatches(tiny.NumberDataset(), sampler, listener=notes, **options), sampler, notes


def rows(batch) -> list[int]:
    return batch["sample_ids"].tolist()


def test_an_epoch_holds_every_sample_once_and_what_a_batch_says_is_true():
    seen, weights = [], 0.0
    for rank in (0, 1):
        loader, sampler, _ = loader_of(rank)
        assert len(loader) == sampler.plan.micro_steps == 10
        for batch in loader:
            ids = rows(batch)
            assert batch["noisy"].shape == (len(ids), tiny.CHANNELS, *batch["shape"])
            assert {tiny.ROWS[row] for row in ids} == {batch["shape"]}
            assert batch["tokens"] == batch["shape"][0] * batch["shape"][1] * batch["shape"][2] // 4
            seen += [] if batch["filler"] else ids
            weights += float(batch["loss_weight"])
    assert sorted(seen) == list(range(len(tiny.ROWS)))
    assert weights == pytest.approx(10 * 2, rel=1e-6)  # every step's weights sum to R * G


@pytest.mark.parametrize("workers", [0, 2])
def test_a_left_iteration_goes_on_where_training_stands(workers):
    reference = [rows(batch) for batch in loader_of()[0]]
    loader, sampler, notes = loader_of(num_workers=workers)
    drawn = []
    for batch in loader:  # four are drawn, and more by the workers, but only one step of two completed
        drawn.append(rows(batch))
        if len(drawn) == 2:
            sampler.advance(2)
        if len(drawn) == 4:
            break
    assert drawn == reference[:4] and len(loader) == 8 and notes.closed == 1
    notes.micro_steps_done = 1  # the third reached engine.step(), the fourth was dropped
    assert len(loader) == 7
    assert [rows(batch) for batch in loader] == reference[3:]
    assert notes.handed_out == [0, 1, 2, 3, *range(3, 10)]
    notes.micro_steps_done = 0
    sampler.advance(8)
    assert loader.epoch == 1
    second = [rows(batch) for batch in loader]
    assert len(second) == sampler.plan.micro_steps and second != reference


def test_an_iteration_ends_when_the_position_jumps():
    loader, _, _ = loader_of()
    batches = iter(loader)
    next(batches)
    loader.invalidate()
    with pytest.raises(PlanError, match="Start a new one"):
        next(batches)


def test_post_process_sees_batch_and_state():
    loader, sampler, _ = loader_of()
    loader.post_process_func = lambda batch, state: {**batch, "state": state}
    assert next(iter(loader))["state"] == sampler.state_dict()


def test_names_of_ours_are_not_overwritten():
    loader, _, _ = loader_of(collate_fn=lambda samples: {"shape": 1})
    with pytest.raises(ConfigError, match="already has shape"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(0, 2), (1, 2)], (0, 1)),  # data parallel alone
        ([(0, 2), (0, 2), (1, 2), (1, 2)], (0, 0, 1, 1)),  # tensor parallel pairs
        ([(0, 2), (0, 2), (2, 2), (2, 2)], (0, 0, 1, 1)),  # Ulysses: labelled by each group's first rank
        ([(0, 2), (1, 2), (0, 2), (1, 2)], (0, 1, 0, 1)),  # pipeline stages far apart
    ],
)
def test_ranks_that_share_a_batch(answers, expected):
    for rank, own in enumerate(expected):
        places = order(answers, rank)
        assert (places.of_rank, places.own, places.size) == (expected, own, 2)


@pytest.mark.parametrize("answers", [[(0, 2), (0, 2), (1, 2)], [(0, 1), (1, 1)], [(0, 2), (1, 3)]])
def test_places_that_do_not_fit_together_are_refused(answers):
    with pytest.raises(ConfigError, match="data-parallel places"):
        order(answers, 0)


def test_a_stop_signal_is_noted_and_repeats_change_nothing():
    before = signal.getsignal(signal.SIGTERM)
    with StopOnSignal() as stop:
        assert not stop.agreed()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.agreed()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_restart_overrides_the_steps_it_repeats_and_a_cut_line_is_left_out(tmp_path):
    file = TelemetryFile(tmp_path)
    for step in (1, 2, 3, 4):
        file.write({"step": step, "run": "first"})
    with file.path.open("ab") as end:
        end.write(b'{"step":5,"ru')  # killed while writing
    again = TelemetryFile(tmp_path)
    for step in (3, 4):
        again.write({"step": step, "run": "second"})
    lines = read_telemetry(tmp_path)
    assert [(line["step"], line["run"]) for line in lines] == [
        (1, "first"),
        (2, "first"),
        (3, "second"),
        (4, "second"),
    ]
    assert all(json.loads(line) for line in file.path.read_text().splitlines() if line.endswith("}"))
