"""The calibration's file, its limits, and the choice of points to measure."""

import argparse
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from al_deepspeed.calibration.arguments import count, fraction, gigabytes, seconds, shapes
from al_deepspeed.calibration.assemble import budget_warnings, calibrate, with_budget
from al_deepspeed.calibration.choice import Allowance, Candidates, candidates, expected_gb, next_candidate
from al_deepspeed.calibration.file import SCHEMA_VERSION, Setting, read_calibration, write_calibration
from al_deepspeed.calibration.from_run import read_run, refit, run_points
from al_deepspeed.calibration.measure import is_certain
from al_deepspeed.calibration.points import OUT_OF_MEMORY, Point, read_scan
from al_deepspeed.calibration.scan import Progress, load_progress
from al_deepspeed.calibration.setting import model_fingerprint
from al_deepspeed.calibration.spread import union_ms
from al_deepspeed.calibration.workload import load_factory
from al_deepspeed.errors import CalibrationError
from al_deepspeed.scheduling.cost import RooflineCost
from al_deepspeed.scheduling.shapes import corpus_from_samples

TRUTH = RooflineCost(intercept=5.0, linear=5e-3, quadratic=3e-7, floor=40.0)
HERE = Setting(
    device="NVIDIA H200",
    capacity_gb=100.0,
    zero_stage=3,
    ranks=2,
    torch="2.9",
    fingerprints={"model": "aa", "ds_config": "bb"},
)


def point(batch_size, tokens, **changes) -> Point:
    """As a device would measure it: 10 GB and 1 MB a token, an optimizer step of 12 GB."""
    passes = 10 + 1e-3 * batch_size * tokens
    ms = float(TRUTH.cost(batch_size, tokens))
    peak = max(12.0, passes)
    return replace(Point(batch_size, tokens, ms, peak, 1.1 * peak, passes), **changes)


@pytest.fixture(scope="module")
def calibration():
    pairs = [
        (1, 256),
        (4, 256),
        (32, 256),
        (1, 1024),
        (8, 1024),
        (32, 1024),
        (1, 4096),
        (8, 4096),
        (1, 16384),
    ]
    points = [point(*pair, rank_ms=(90.0, 100.0)) for pair in pairs]
    failed = point(64, 16384, ms=None, status=OUT_OF_MEMORY, peak_gb=None, reserved_gb=None, pass_gb=None)
    return calibrate([*points, failed], HERE)


def test_limits(calibration):
    """M_mem by what is reserved: 1.1 * (10 + B*S / 1000) = 92, so B*S = 73,636."""
    assert calibration.max_tokens == pytest.approx(73_636, rel=1e-3)
    assert calibration.max_cost is None  # the planner chooses it for its corpus
    assert calibration.cost.cost(2, 16384) == pytest.approx(TRUTH.cost(2, 16384), rel=0.02)
    assert calibration.spread == pytest.approx(0.1)  # (100 - 90) / 100
    assert calibration.paper_max_cost == pytest.approx(16384**calibration.exponent)


def test_a_file_reads_back_as_it_was_written(calibration, tmp_path):
    path = tmp_path / "sub" / "calibration.json"
    write_calibration(calibration, path)
    assert read_calibration(path) == calibration
    row = json.loads(path.read_text())
    assert row["schema_version"] == SCHEMA_VERSION
    assert {"cost", "max_tokens", "max_cost", "exponent", "points", "fits", "fingerprints"} <= set(row)
    assert row["device"] == "NVIDIA H200" and row["zero_stage"] == 3 and row["ranks"] == 2
    assert row["points"][-1]["status"] == "out_of_memory"
    assert [file.name for file in path.parent.iterdir()] == ["calibration.json"]


def test_a_file_from_before_a_steps_own_time_was_kept_is_read(calibration, tmp_path):
    """Not measured is not invented: None, and M_comp is chosen without it."""
    row = calibration.to_dict()
    del row["step_ms"], row["accumulation"]
    for one in row["points"]:
        del one["step_ms"], one["repeat_ms"]
    (tmp_path / "calibration.json").write_text(json.dumps(row))
    assert read_calibration(tmp_path / "calibration.json") == calibration
    assert calibration.step_ms is None


def test_a_steps_own_time_is_the_median_of_the_points_and_counts_in_m_comp():
    """At 1 s a step, six times what the longest sample takes, fewer and larger micro-batches pay."""
    scan = [
        point(b, s, step_ms=t) for b in (1, 2, 4) for s, t in ((256, 900.0), (1024, 1000.0), (4096, None))
    ]
    slow = calibrate([*scan, point(1, 16384, step_ms=5000.0)], HERE, max_tokens=400_000)
    assert slow.step_ms == 1000.0
    corpus = corpus_from_samples(np.repeat([1, 16], 500), np.repeat([32, 64], 500), np.repeat([32, 64], 500))
    chosen = with_budget(slow, corpus, world_size=16, accumulation=2)
    assert (chosen.world_size, chosen.accumulation) == (16, 2)
    free = with_budget(replace(slow, step_ms=None), corpus, world_size=16, accumulation=2)
    assert chosen.max_cost > free.max_cost
    assert chosen.curve[-1][1] < free.curve[-1][1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: {**row, "step_ms": -1.0}, "step_ms is -1.0"),
        (lambda row: {**row, "schema_version": 99}, "schema_version 99; this version reads 2"),
        (lambda row: {key: row[key] for key in row if key != "schema_version"}, "schema_version None"),
        (lambda row: {key: row[key] for key in row if key != "exponent"}, "key 'exponent' is missing"),
        (lambda row: {**row, "cost": {"form": "cubic"}}, "cost form 'cubic' is unknown"),
        (lambda row: {**row, "max_tokens": "many"}, "max_tokens is 'many'"),
        (lambda row: {**row, "max_cost": -1.0}, "max_cost is -1.0"),
        (lambda row: {**row, "exponent": None}, "exponent is None"),
        (lambda row: {**row, "points": []}, "no point was measured"),
        (lambda row: {**row, "memory": {**row["memory"], "lines": []}}, "memory has no lines"),
        (lambda row: [row], "schema_version None"),
    ],
)
def test_a_broken_file_is_refused(calibration, tmp_path, change, message):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(change(calibration.to_dict())))
    with pytest.raises(CalibrationError, match=message):
        read_calibration(path)


def test_no_file_and_no_json_are_refused(tmp_path):
    with pytest.raises(CalibrationError, match="does not exist"):
        read_calibration(tmp_path / "calibration.json")
    (tmp_path / "calibration.json").write_text('{"schema_version": 1')
    with pytest.raises(CalibrationError, match="cannot be read as JSON"):
        read_calibration(tmp_path / "calibration.json")


def test_another_model_device_or_stage_is_a_reason_to_warn(calibration):
    assert calibration.mismatches(HERE) == []
    assert calibration.mismatches(Setting()) == []  # unknown is no difference
    other = replace(HERE, device="NVIDIA H100", zero_stage=2, fingerprints={"model": "cc", "ds_config": "dd"})
    reasons = calibration.mismatches(other)
    assert [reason.split(", ")[0] for reason in reasons] == [
        "calibrated with model fingerprint aa",
        "calibrated with device NVIDIA H200",
        "calibrated with ZeRO stage 3",
    ]


def test_m_comp_for_a_corpus(calibration):
    """Short and long samples: no budget is better, and a long sample alone stays within it."""
    corpus = corpus_from_samples(np.repeat([1, 16], 500), np.repeat([32, 64], 500), np.repeat([32, 64], 500))
    chosen = with_budget(replace(calibration, max_tokens=400_000), corpus, world_size=16)
    budgets, rates = zip(*chosen.curve, strict=True)
    assert rates[budgets.index(chosen.max_cost)] >= 0.999 * max(rates)
    assert chosen.max_cost >= calibration.cost.cost(1, 16384) * 0.999
    assert budget_warnings(chosen, corpus) == []


def test_warnings_about_the_limits(calibration):
    corpus = corpus_from_samples(np.repeat([1, 16], 500), np.repeat([32, 64], 500), np.repeat([32, 64], 500))
    tight = with_budget(replace(calibration, max_tokens=16384), corpus, world_size=1)
    assert any("no M_comp helps" in warning for warning in budget_warnings(tight, corpus))
    low = replace(with_budget(calibration, corpus, world_size=16), max_cost=100.0)
    assert any("exceeds M_comp = 100 ms" in warning for warning in budget_warnings(low, corpus))
    small = with_budget(replace(calibration, max_tokens=8000), corpus, world_size=16)
    assert any("exceeds M_mem = 8000 tokens" in warning for warning in budget_warnings(small, corpus))
    far = corpus_from_samples(
        np.full(9, 21), np.full(9, 90), np.full(9, 160)
    )  # 75,600 tokens, 16,384 scanned
    guess = with_budget(replace(calibration, max_tokens=400_000), far, world_size=16)
    assert any("the longest scanned 16384" in warning for warning in budget_warnings(guess, far))
    with pytest.raises(CalibrationError, match="--capacity-gb, or --max-tokens"):
        with_budget(replace(calibration, max_tokens=None), corpus, world_size=16)


def test_a_device_too_small_for_the_optimizer_is_refused():
    points = [point(1, 4096 * length) for length in range(1, 9)]
    with pytest.raises(CalibrationError, match=r"above 92% of the device's 11\.00 GB"):
        calibrate(points, replace(HERE, capacity_gb=11.0))


def simulate(tokens, allowance_of) -> list[Point]:
    """A scan without a device: each choice is measured at once."""
    choices, points, used_s = candidates(tokens, 64), [], 0.0
    while (place := next_candidate(choices, points, allowance_of(used_s))) is not None:
        points.append(point(int(choices.batch_size[place]), int(choices.tokens[place])))
        used_s += 3 * points[-1].ms / 1e3
    return points


def test_corners_come_first_and_the_budget_is_kept():
    points = simulate([256, 1024, 4096, 16384, 32768], lambda used: Allowance(60.0, 60.0 - used))
    first = {(p.batch_size, p.tokens) for p in points[:6]}
    assert {(1, 256), (1, 32768), (64, 256)} <= first
    assert sum(3 * p.ms for p in points) <= 60_000
    assert len({(p.batch_size, p.tokens) for p in points}) == len(points)
    found = calibrate(points, HERE)
    assert found.cost.cost(2, 8192) == pytest.approx(TRUTH.cost(2, 8192), rel=0.02)


def test_a_slow_floor_in_a_short_budget_still_leaves_points_to_fit():
    """Every point takes 40 ms, and a tenth of the budget is less than three runs of it and a warm-up."""
    points = simulate([16, 64, 256], lambda used: Allowance(1.2, 1.2 - used, limit_gb=90.0))
    assert len(points) >= 7


def test_a_noisy_floor_in_a_short_budget_still_leaves_points_to_fit():
    """Three points that seem to grow steeply: no other is predicted to fit, yet three are too few."""
    noisy = [point(1, 9, ms=600.0), point(2, 9, ms=690.0), point(4, 9, ms=900.0)]
    choices = candidates([9, 60, 300], 4)
    place = next_candidate(choices, noisy, Allowance(20.0, 1.0, limit_gb=90.0))
    assert (choices.batch_size[place], choices.tokens[place]) == (1, 60)
    assert next_candidate(choices, noisy, Allowance(20.0, -0.1, limit_gb=90.0)) is None


def test_a_floor_does_not_hide_that_longer_samples_are_affordable():
    """9 to 60 tokens, where all takes 0.4 s: B*S^2 would be 44 times as slow, and too slow for the budget."""
    flat = [point(1, 9, ms=400.0), point(2, 9, ms=401.0), point(4, 9, ms=402.0)]
    choices = candidates([9, 60, 300], 4)
    place = next_candidate(choices, flat, Allowance(20.0, 18.0, limit_gb=90.0))
    assert (choices.batch_size[place], choices.tokens[place]) in {(1, 60), (4, 60), (1, 300)}


def test_no_point_is_predicted_to_pass_the_memory_limit():
    """1.1 * (10 + B*S / 1000) GB reserved: 50 GB at 35,454 tokens; near it, not above."""
    points = simulate([256, 1024, 4096, 16384, 65536], lambda used: Allowance(1e4, 1e4 - used, limit_gb=50.0))
    loads = [p.batch_size * p.tokens for p in points]
    assert 16384 <= max(loads) <= 35_454
    assert all(p.reserved_gb <= 50.0 for p in points)
    for place in range(1, len(points)):
        assert loads[place] <= 8 * max(loads[:place])
        assert points[place].batch_size <= 8 * max(p.batch_size for p in points[:place])


def test_memory_is_expected_to_grow_by_the_steepest_slopes_a_token_and_a_sample():
    """1 MB a token up to B*S = 1,000, 2 MB from there, 0.1 GB a sample; 1.25 times the growth is expected.

    One sample of 4,000 after 2,000: the steepest slope seen is 2 MB, so 13.1 + 1.25 * 4 GB. 16 samples of 125
    have the 2,000 tokens of one that took 13.1 GB: + 1.25 * 15 * 0.1, told by four samples of 125. And what
    was measured is expected again.
    """

    def took(batch_size, tokens):
        load = batch_size * tokens
        gb = 10 + max(load, 2 * load - 1000) / 1000 + 0.1 * batch_size
        return Point(batch_size, tokens, 100.0, gb, gb, gb)

    points = [took(1, 125), took(1, 1000), took(1, 2000), took(4, 125)]
    asked = Candidates(np.array([1, 16, 4]), np.array([4000, 125, 125]), np.zeros(3, int))
    np.testing.assert_allclose(expected_gb(asked, points), [13.1 + 5.0, 13.1 + 1.25 * 1.5, 10.9])
    twins = [*points, took(16, 126)]  # 1.6 GB more than one sample of 2,000, and 16 tokens: no slope
    assert expected_gb(asked, twins)[0] == pytest.approx(18.1)


def test_a_scan_table_names_its_bad_row(tmp_path):
    path = tmp_path / "scan.csv"
    path.write_text("B,S,ms\n1,256,40.0\n2,0,41.0\n")
    with pytest.raises(CalibrationError, match="line 3: S is '0'; allowed: a whole number above 0"):
        read_scan(path)
    path.write_text("B,tokens,ms\n1,256,40.0\n")
    with pytest.raises(CalibrationError, match="Missing: S"):
        read_scan(path)
    path.write_text("B,S,ms\n")
    with pytest.raises(CalibrationError, match="no rows"):
        read_scan(path)
    path.write_text("B,S,ms\n1,256,40.0\n\n1,512,-1\n")  # a blank line counts
    with pytest.raises(CalibrationError, match="line 4: ms is '-1'"):
        read_scan(path)
    path.write_text("B,S,ms\n1,256,40.0,7\n")
    with pytest.raises(CalibrationError, match="line 2 has more cells than the header"):
        read_scan(path)
    path.write_text("B,S,S,ms\n1,256,512,40.0\n")
    with pytest.raises(CalibrationError, match="each once"):
        read_scan(path)
    path.write_bytes(b"B,S,ms\n1,256,\xff\n")
    with pytest.raises(CalibrationError, match="cannot be read"):
        read_scan(path)
    with pytest.raises(CalibrationError, match="is no file"):
        read_scan(tmp_path)
    with pytest.raises(CalibrationError, match="does not exist"):
        read_scan(tmp_path / "none.csv")
    path.write_text("B,S,ms,peak_GB\n1,256,40.0,\n")
    assert read_scan(path) == (Point(1, 256, 40.0),)


def telemetry_lines(slower: float, steps: int = 60) -> list[dict]:
    """Two ranks, two micro-steps a step; all wait for the slowest, which takes `slower` times TRUTH."""
    random = np.random.default_rng(0)
    pairs = np.array([(32, 256), (8, 1024), (16, 1024), (2, 4096), (4, 4096), (1, 8192), (1, 16384)])
    lines = []
    for step in range(steps):
        batch_size, tokens = pairs[random.integers(0, len(pairs), size=(2, 2))].transpose(2, 0, 1)
        cost = TRUTH.cost(batch_size, tokens)
        measured = np.broadcast_to(slower * cost.max(axis=1, keepdims=True), (2, 2))
        if step < 2:
            measured = measured * 20  # kernels are compiled, memory is first allocated
        load = (batch_size * tokens).max(axis=0)
        lines.append(
            {
                "step": step + 1,
                "batch_size": batch_size.tolist(),
                "sequence_length": tokens.tolist(),
                "predicted_cost": cost.tolist(),
                "measured_ms": measured.tolist(),
                "optimizer_ms": [40.0, 50.0],
                "peak_memory_bytes": (1e9 * (10 + 1e-3 * load)).astype(int).tolist(),
            }
        )
    return lines


def test_a_run_that_was_slower_moves_the_calibration(calibration):
    """A tenth slower than scanned: pairs that the run showed are refitted, the scan's others follow."""
    points = run_points(telemetry_lines(slower=1.1))
    by_pair = {(p.batch_size, p.tokens): p for p in points}
    assert by_pair[1, 16384].ms == pytest.approx(1.1 * float(TRUTH.cost(1, 16384)))
    assert by_pair[1, 16384].peak_gb == pytest.approx(26.384)
    after = refit(points, calibration)
    assert after.cost.cost([1, 4], [16384, 4096]) == pytest.approx(
        1.1 * TRUTH.cost([1, 4], [16384, 4096]), rel=0.01
    )
    assert after.cost.cost(1, 256) == pytest.approx(1.1 * TRUTH.floor, rel=0.02)  # only the scan showed it
    assert after.max_tokens == calibration.max_tokens
    assert after.max_cost is None
    assert after.step_ms == 50.0  # the run's, not the scan's: the slowest rank's optimizer step
    assert after.setting == calibration.setting


def test_a_run_without_telemetry_is_refused(tmp_path):
    with pytest.raises(CalibrationError, match=r"holds no telemetry\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "telemetry.jsonl").write_text("")
    with pytest.raises(CalibrationError, match="no step after the first 2"):
        read_run(tmp_path)
    (tmp_path / "telemetry.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    with pytest.raises(CalibrationError, match="no telemetry of this version"):
        read_run(tmp_path)


def test_a_refit_from_a_run_alone():
    after = refit(run_points(telemetry_lines(slower=1.0)))
    assert after.cost.cost(2, 8192) == pytest.approx(TRUTH.cost(2, 8192), rel=0.02)
    assert after.max_tokens is None


def test_the_median_is_certain_when_repeats_agree():
    """Two repeats 0.2% apart: half a width of 12.7 * 1.25 * 0.1% = 1.6%; 1% apart: 8%."""
    assert not is_certain([100.0])
    assert is_certain([100.0, 100.2])
    assert not is_certain([100.0, 101.0])
    assert is_certain([100.0, 101.0] * 5)


def test_time_inside_collectives_is_counted_once():
    """Prefetched all-gathers overlap: 0 to 3 ms and 5 to 6 ms are four."""
    assert union_ms([(0, 2000), (1000, 3000), (5000, 6000), (1500, 1600)]) == 4.0
    assert union_ms([]) == 0.0


def test_the_next_point_stays_below_a_failed_allocation():
    choices = candidates([256, 1024, 4096], 16)
    failed = point(4, 1024, ms=None, status=OUT_OF_MEMORY, peak_gb=None, reserved_gb=None, pass_gb=None)
    points = [point(1, 256), point(2, 256), failed]
    while (place := next_candidate(choices, points, Allowance(1e4, 1e4, limit_gb=1e3))) is not None:
        points.append(point(int(choices.batch_size[place]), int(choices.tokens[place])))
    assert max(p.batch_size * p.tokens for p in points if p is not failed) == 2048


def test_a_scan_of_another_model_does_not_resume(tmp_path):
    path = tmp_path / "calibration.json.scan"
    assert load_progress(path, HERE) == Progress()
    Progress([point(1, 256, shape=(1, 32, 32))], used_s=12.5).save(HERE, path)
    assert load_progress(path, replace(HERE, capacity_gb=90.0)) == Progress(
        [point(1, 256, shape=(1, 32, 32))], used_s=12.5
    )
    with pytest.raises(CalibrationError, match="another zero_stage, fingerprints: 3 then, 2 now"):
        load_progress(path, replace(HERE, zero_stage=2, fingerprints={"model": "cc"}))
    path.write_text('{"setting": {}, "points": []}')
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_progress(path, HERE)


def test_a_model_is_known_by_its_parameters():
    small, large = torch.nn.Linear(4, 4), torch.nn.Linear(4, 5)
    assert model_fingerprint(small) == model_fingerprint(torch.nn.Linear(4, 4))  # whatever the weights
    assert model_fingerprint(small) != model_fingerprint(large)
    frozen = torch.nn.Linear(4, 4).requires_grad_(False)
    assert model_fingerprint(small) != model_fingerprint(frozen)  # no gradients, another step time
    checkpointed = torch.nn.Linear(4, 4)
    checkpointed.gradient_checkpointing = False
    assert model_fingerprint(small) == model_fingerprint(checkpointed)
    checkpointed.gradient_checkpointing = True
    assert model_fingerprint(small) != model_fingerprint(checkpointed)


def test_times_and_shapes_of_the_command_line():
    assert [seconds(text) for text in ("90", "90s", "5m", "1h")] == [90, 90, 300, 3600]
    assert shapes("1x32x32,5x60x104") == ((1, 32, 32), (5, 60, 104))
    assert (count("8"), gigabytes("140.5"), fraction("0.9")) == (8, 140.5, 0.9)
    bad = [
        (seconds, "-5m"),
        (seconds, "soon"),
        (shapes, "32x32"),
        (shapes, "1x0x4"),
        (count, "0"),
        (count, "x"),
    ]
    for parse, text in [*bad, (gigabytes, "-1"), (gigabytes, "inf"), (fraction, "92"), (fraction, "nan")]:
        with pytest.raises(argparse.ArgumentTypeError, match="allowed:"):
            parse(text)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("al_deepspeed.errors", "allowed: pkg.mod:function"),
        ("no_such_package.x:f", "cannot be imported"),
        ("al_deepspeed.errors:nothing", "has no function nothing"),
    ],
)
def test_a_factory_that_is_not_there(name, message):
    with pytest.raises(CalibrationError, match=message):
        load_factory(name)
