"""The engine through the real `deepspeed` launcher: exact gradients, restored positions, refusals, hangs."""

import json
import os
import re
import signal

import numpy as np
import pytest
import torch
from launched import tiny
from launching import ACCELERATOR, LAUNCHED, launch

from al_deepspeed.calibration.setting import read_setting
from al_deepspeed.scheduling.cost import cost_from_dict
from al_deepspeed.telemetry import read_telemetry
from al_deepspeed.watchdog import EXIT_CODE

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """The folder of resumable.py's first life on two ranks, of which one was killed."""
    out = tmp_path_factory.mktemp("resumable")
    script = (LAUNCHED / "resumable.py", str(out), "--first", "--steps", "11")
    with launch(*script, folder=out / "first", time_limit_s=300) as run:
        run.wait_for_line(r"(?s)step 11\n.*step 7\n", rank=1)
        run.rank_processes()[1].send_signal(signal.SIGKILL)
        assert run.wait(expect=None) != 0
    return out


def ran(out, stage) -> list[list[dict]]:
    """What each rank ran, [rank][micro-step]."""
    return [json.loads((out / f"ran{stage}_rank{rank}.json").read_text()) for rank in (0, 1)]


def reference_parameters(steps: list[list[int]]) -> tuple[dict, list[float]]:
    """Plain SGD in one process: each step's gradient is the mean over the step's samples."""
    model, data = tiny.wan_model(), tiny.NumberDataset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for rows in steps:
        optimizer.zero_grad()
        total = 0.0
        for row in rows:
            batch = torch.utils.data.default_collate([data[row]])
            loss = tiny.sample_losses(model, batch).sum() / len(rows)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return dict(model.named_parameters()), losses


def test_five_steps_equal_one_process_at_every_stage(first_run):
    ranks = ran(first_run, 0)
    steps = [
        [row for rank in ranks for batch in rank[first : first + 2] for row in batch["sample_ids"]]
        for first in range(0, 10, 2)
    ]
    assert sorted(row for rows in steps for row in rows) == list(range(len(tiny.ROWS)))
    shapes_differ = [own["shape"] != other["shape"] for own, other in zip(*ranks, strict=True)]
    sizes_differ = [
        len(own["sample_ids"]) != len(other["sample_ids"]) for own, other in zip(*ranks, strict=True)
    ]
    assert any(shapes_differ) and any(sizes_differ)

    expected, losses = reference_parameters(steps)
    before = dict(tiny.wan_model().named_parameters())
    assert max((expected[name] - before[name]).abs().max() for name in expected) > 1e-3  # it did learn
    tolerance = 1e-6 if ACCELERATOR == "cpu" else 1e-5  # the reference runs on the CPU
    for stage in STAGES:
        assert ran(first_run, stage) == ranks
        trained = torch.load(first_run / f"parameters{stage}.pt")
        assert trained.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                trained[name], value, rtol=0, atol=tolerance, msg=f"ZeRO-{stage}: {name}"
            )
        lines = [json.loads(line) for line in (first_run / f"stage{stage}/telemetry.jsonl").open()]
        assert [line["loss"] for line in lines] == pytest.approx(losses, abs=1e-5)


def records(out, name, rank) -> list[dict]:
    return [json.loads(line) for line in (out / f"{name}_rank{rank}.jsonl").open()]


def test_killed_rank_restarts_as_if_unbroken(first_run):
    out = first_run
    lines_before = [len(records(out, "steps", rank)) for rank in (0, 1)]
    last_saved = int((out / "checkpoints/latest").read_text().removeprefix("global_step"))
    assert 5 < last_saved < 11  # epoch 0 has five steps: in the middle of epoch 1
    script = (LAUNCHED / "resumable.py", str(out), "--steps", "200000")
    with launch(*script, folder=out / "second", time_limit_s=240) as run:
        run.wait_for_line(r"step 11\n")
        os.kill(run.launcher_pid(), signal.SIGTERM)
        run.wait(expect=None)
        stopped = {re.search(r"stopped at (\d+)", run.rank_log(rank)).group(1) for rank in (0, 1)}
    assert len(stopped) == 1  # both after the same step, which they saved
    assert (out / "checkpoints/latest").read_text() == f"global_step{stopped.pop()}"
    for rank in (0, 1):
        lines, unbroken = records(out, "steps", rank), records(out, "unbroken", rank)
        assert lines[lines_before[rank]]["step"] == last_saved + 1
        compared = [line for line in lines if line["step"] <= 11]
        assert compared[-1]["step"] == len(unbroken) == 11
        for line in compared:  # sample ids and losses, to the last bit
            assert line == unbroken[line["step"] - 1]


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    """What engine_checks.py saw: [rank] -> its record, the folder, and [rank] -> its log."""
    out = tmp_path_factory.mktemp("checks")
    with launch(LAUNCHED / "engine_checks.py", str(out), folder=out / "launch", time_limit_s=240) as run:
        assert run.wait(expect=None) == EXIT_CODE, run.logs()  # of its hang, to the launcher's caller
        logs = [run.rank_log(rank) for rank in (0, 1)]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)], out, logs


def test_a_hang_names_rank_micro_step_and_shape(checks):
    logs = checks[2]
    own = {0: "shape video 5x8x8, B=1", 1: "shape image 1x8x8, B=1"}
    if "Rank 0 is in micro-step 0 of epoch 0 (step 1) with shape image" in logs[0]:
        own = {0: own[1], 1: own[0]}
    for rank, log in enumerate(logs):
        assert f"Rank {rank} is in micro-step 0 of epoch 0 (step 1) with {own[rank]}" in log
        assert f"the others run {1 - rank}: {own[1 - rank].removeprefix('shape ')}" in log
        assert "came through" not in log


REFUSED = {
    "unknown key": ("ConfigError", "dual_constraint_batching.stratgy: unknown key. Did you mean 'strategy'?"),
    "max_tokens 0": ("ConfigError", "max_tokens is 0; allowed: more than 0"),
    "manifest missing": ("CorpusError", "absent.parquet: no such manifest"),
    "manifest missing on rank 1": ("CorpusError", "rank 1: data_efficiency"),
    "other manifest on rank 1": (
        "ConfigError",
        "rank 1 read other settings, manifest or calibration than rank 0",
    ),
    "empty corpus": ("CorpusError", "no rows"),
    "dataset too short": ("ConfigError", "the dataset has 55 samples, but the manifest"),
    "training_data": ("ConfigError", "training_data was given"),
    "no shards": ("CorpusError", "lists shapes without shards"),
    "calibration missing": ("CalibrationError", "calibration is 'absent.json'"),
    "drop leaves nothing": ("TooFewForAStep", 'Use "split"'),
    "micro-batch 4": ("ConfigError", "train_micro_batch_size_per_gpu is 4"),
    "collate to a list": ("ConfigError", "collate_fn returned a list"),
    "fingerprint changed": ("PlanError", "belongs to manifest fingerprint"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_every_rank_refuses_with_the_same_words(checks, fault):
    ranks = checks[0]
    kind, words = REFUSED[fault]
    first, second = (rank["refused"][fault] for rank in ranks)
    assert first == second
    assert first[0] == kind
    assert words in first[1]


@pytest.mark.parametrize("curriculum", ["plain", "curriculum"])
def test_checkpoint_restores_the_position_and_hands_the_users_state_through(checks, curriculum):
    for number, rank in enumerate(checks[0]):
        record = rank[curriculum]
        assert record["ids"][6:] == record["ids_again"]
        assert record["mine_after"] == {"mine": number}  # the dictionary that was passed in is untouched
        assert record["mine"] == 0  # at ZeRO 0 to 2 DeepSpeed reads rank 0's
        assert not record["ours"]


def test_weights_only_leaves_the_position_alone(checks):
    for rank in checks[0]:
        assert rank["weights only"]["ids"] == rank["weights only"]["first"]


def longest(rank_ids: list[list[list[int]]], micro_steps: slice) -> int:
    """Largest S among micro-batches, over the ranks."""
    sequence_length = {row: shape[0] * shape[1] * shape[2] // 4 for row, shape in enumerate(tiny.ROWS)}
    return max(sequence_length[row] for ids in rank_ids for rows in ids[micro_steps] for row in rows)


def test_curriculum_admits_what_the_schedule_says(checks):
    ids = [rank["curriculum"]["ids"] for rank in checks[0]]  # 24 to step 2, 48 to step 4, then 80
    assert longest(ids, slice(0, 4)) <= 24
    assert longest(ids, slice(4, 8)) <= 48
    custom = [rank["custom"] for rank in checks[0]]  # 24 before step 3, then 80
    assert longest(custom, slice(0, 4)) <= 24
    assert longest(custom, slice(4, 8)) > 24


@pytest.mark.parametrize("how", ["tensor parallel", "sequence parallel"])
def test_ranks_of_one_model_get_the_same_batches(checks, how):
    first, second = (rank[how] for rank in checks[0])
    assert first == second
    assert sorted(row for rows in first for row in rows) == list(range(len(tiny.ROWS)))


def test_telemetry_agrees_with_itself_and_with_the_monitor(checks):
    ranks, out, _ = checks
    assert read_setting(out / "run").device == "cpu"  # what the figures are of, for --from-run
    lines = read_telemetry(out / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    total = 0
    for line in lines:
        sizes, lengths = np.array(line["batch_size"]), np.array(line["sequence_length"])
        assert sizes.shape == (2, 2) == np.shape(line["measured_ms"])
        assert line["samples"] == sizes.sum() and line["tokens"] == (sizes * lengths).sum()
        assert np.allclose(line["predicted_cost"], sizes * lengths.astype(float) ** 2)
        assert np.allclose(line["loss_weight"], sizes * 4 / sizes.sum())
        assert min(line["optimizer_ms"]) > 0 and min(line["peak_memory_bytes"]) > 1 << 20
        total += line["samples"]
        assert line["samples_total"] == total
    assert ranks[0]["deepspeed samples"] == 16  # it counts micro-batches: 4 steps of 2 ranks x 2
    rows = (out / "csv/job/AdaptiveLoad_samples_total.csv").read_text().split()[1:]
    assert [float(row.split(",")[1]) for row in rows] == [line["samples_total"] for line in lines]


def test_learning_rate_scales_with_the_step_and_the_schedule_stays(checks):
    ranks, out, _ = checks
    for line in read_telemetry(out / "run")[2:]:  # WarmupLR is at its 0.01 from step 3 on
        assert line["learning_rate"] == pytest.approx(0.01 * line["lr_factor"])
    factors = [line["lr_factor"] / line["samples"] for line in read_telemetry(out / "run")]
    assert factors == pytest.approx([factors[0]] * 4)
    assert ranks[0]["rates"] == [0.01]


def test_recalibration_changes_the_plan_and_survives_a_resume(checks):
    ranks, out, _ = checks
    for rank in ranks:
        assert rank["recalibrated"]["ids"] == rank["recalibrated"]["ids_again"]
    files = sorted(path.name for path in (out / "recalibrated").glob("calibration-after-epoch-*"))
    assert files == ["calibration-after-epoch-0.json"]
    lines = read_telemetry(out / "recalibrated")
    by_epoch = {line["epoch"]: line for line in lines}
    scan = json.loads((out / "calibration.json").read_text())["cost"]
    refitted = json.loads((out / "recalibrated" / files[0]).read_text())["cost"]
    for epoch, cost in ((0, scan), (1, refitted)):
        line = by_epoch[epoch]
        predicted = cost_from_dict(cost).cost(line["batch_size"], line["sequence_length"])
        assert np.allclose(line["predicted_cost"], predicted)


def test_a_calibration_of_another_stage_warns(checks):
    assert "calibrated with ZeRO stage 0, used with 1" in checks[2][0]
