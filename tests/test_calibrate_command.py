"""`al-deepspeed calibrate` from the command line, as a user or a script runs it.

The last tests scan in a live engine: two CPU ranks at ZeRO-3, through the launcher and, where each rank's own
end is looked at, without it; with what can go wrong.
"""

import json
import os
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from launching import EXTENSIONS, LAUNCHED, Launch, free_port
from small_corpus import make_corpus

from al_deepspeed import cli
from al_deepspeed.calibration.file import Setting, read_calibration
from al_deepspeed.calibration.setting import write_setting
from al_deepspeed.config_sections import DualConstraintBatching
from al_deepspeed.inputs import cost_and_limits

SCAN = Path(__file__).parent / "data" / "h200_wan1.3b_6layer_scan.csv"


@pytest.fixture
def calibrate(monkeypatch, capsys):
    """Runs `al-deepspeed calibrate ARGUMENTS`; returns exit code, standard output, standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["al-deepspeed", "calibrate", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A calibration of the measured scan, made once."""
    out = tmp_path_factory.mktemp("calibration") / "calibration.json"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(sys, "argv", ["al-deepspeed", "calibrate", "--from-scan", str(SCAN), "--out", str(out)])
        cli.main()
    return out


def test_a_scan_becomes_a_calibration_and_a_picture(calibrated):
    row = json.loads(calibrated.read_text())
    chosen = next(fit for fit in row["fits"] if fit["cost"] == row["cost"])
    assert chosen["median_error"] <= 0.025
    assert chosen["p90_error_above_60_ms"] <= 0.06
    assert row["max_tokens"] is None and row["device"] is None  # a table says nothing of the device
    assert len(row["points"]) == 35
    assert calibrated.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


def test_predictions_for_points(calibrated, calibrate, tmp_path):
    """Two of the scan's own points: measured 1925.57 ms and 18.83 GB; 163.39 ms and 3.05 GB."""
    points = tmp_path / "points.csv"
    points.write_text("B,S\n4,32768\n1,16384\n")
    code, out, _ = calibrate("--calibration", calibrated, "--predict", points, "--json")
    rows = json.loads(out)["points"]
    assert code == 0
    assert [(row["B"], row["S"]) for row in rows] == [(4, 32768), (1, 16384)]
    assert [row["ms"] for row in rows] == pytest.approx([1925.57, 163.39], rel=0.03)
    assert [row["peak_GB"] for row in rows] == pytest.approx([18.83, 3.05], rel=0.03)
    code, out, _ = calibrate("--calibration", calibrated, "--predict", points)
    assert code == 0 and out.splitlines()[0] == "B,S,ms,peak_GB" and len(out.splitlines()) == 3


def test_a_scan_without_memory_has_a_picture_too(calibrate, tmp_path):
    (tmp_path / "scan.csv").write_text("B,S,ms\n1,256,40\n1,512,41\n1,1024,80\n1,2048,200\n")
    code, *_ = calibrate("--from-scan", tmp_path / "scan.csv", "--out", tmp_path / "c.json")
    assert code == 0 and json.loads((tmp_path / "c.json").read_text())["memory"] is None
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"


def test_m_mem_for_a_device_of_another_size(calibrated, calibrate, tmp_path):
    """Twice the memory beyond what the empty model takes, by the steeper line, holds twice the tokens."""
    tokens = []
    for capacity_gb in (50, 100):
        out = tmp_path / f"{capacity_gb}.json"
        options = ("--capacity-gb", capacity_gb, "--memory-fraction", 0.5, "--out", out)
        assert calibrate("--calibration", calibrated, *options)[0] == 0
        row = json.loads(out.read_text())
        assert (row["capacity_gb"], row["memory_fraction"]) == (capacity_gb, 0.5)
        tokens.append(row["max_tokens"])
    base = row["memory"]["lines"][1]["m0_gb"]
    assert tokens[1] / tokens[0] == pytest.approx((50 - base) / (25 - base), rel=1e-4)
    code, _, err = calibrate("--calibration", calibrated, "--memory-fraction", 0.5, "--out", out)
    assert code == 2 and "give --capacity-gb too" in err


def test_m_comp_is_chosen_for_a_manifest(calibrated, calibrate, tmp_path):
    manifest = tmp_path / "manifest.csv"
    sizes = ["1,64,64"] * 50 + ["21,60,104"] * 20 + ["21,90,160"] * 5
    manifest.write_text("latent_frames,latent_height,latent_width\n" + "\n".join(sizes) + "\n")
    out = tmp_path / "chosen.json"
    code, stdout, stderr = calibrate(
        *("--calibration", calibrated, "--manifest", manifest, "--world-size", 8, "--max-tokens", 166320),
        *("--out", out, "--json"),
    )
    row = json.loads(stdout)
    assert code == 0 and row == json.loads(out.read_text())
    assert row["world_size"] == 8 and row["max_tokens"] == 166320
    assert [row["max_cost"], max(rate for _, rate in row["curve"])] in row["curve"]
    assert "binding limit" in stderr and "video 21x90x160" in stderr


def run_of(folder: Path, setting: Setting | None) -> Path:
    """A run of one rank that took what B*S^2 says, at 1 ms for 1000^2."""
    lines = [
        {
            "step": step,
            "batch_size": [[size]],
            "sequence_length": [[tokens]],
            "predicted_cost": [[1.0]],
            "measured_ms": [[1e-6 * size * tokens**2]],
            "optimizer_ms": [7.0],
            "peak_memory_bytes": [10**9],
        }
        for step, (size, tokens) in enumerate(
            [(1, 2000)] * 2 + [(b, s) for b in (1, 2, 4) for s in (2000, 4000, 9000)]
        )
    ]
    folder.mkdir()
    (folder / "telemetry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if setting is not None:
        write_setting(setting, folder)
    return folder


def test_a_run_of_another_model_warns(calibrate, tmp_path):
    """A calibration from a run's telemetry says whose it is; a run of another model's says so."""
    ours, theirs = (
        Setting(device="cpu", zero_stage=3, fingerprints={"model": name}) for name in ("aa", "bb")
    )
    out = tmp_path / "first.json"
    code, _, err = calibrate("--from-run", run_of(tmp_path / "ours", ours), "--out", out)
    assert code == 0 and "warning" not in err
    assert read_calibration(out).setting == ours and read_calibration(out).step_ms == 7.0
    for name, setting, warned in (("same", ours, False), ("theirs", theirs, True), ("old", None, False)):
        run = run_of(tmp_path / name, setting)
        code, _, err = calibrate("--calibration", out, "--from-run", run, "--out", tmp_path / "second.json")
        assert code == 0
        assert ("calibrated with model fingerprint aa, used with bb" in err) is warned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "takes one source"),
        (("--deepspeed-config", "d", "--factory", "p:f", "--calibration", "c.json"), "goes with --check"),
        (("--calibration", "c.json", "--check", "p.csv"), "--check measures in the live engine"),
        (("--from-scan", "s.csv", "--calibration", "c.json"), "takes one source"),
        (("--from-scan", "s.csv", "--predict", "p.csv"), "--predict needs --calibration"),
        (("--factory", "pkg:function"), "also needs --deepspeed_config"),
        (("--from-run", "none"), "none holds no telemetry.jsonl"),
        (("--calibration", "c.json", "--manifest", "m.csv"), "give both"),
        (("--calibration", "none.json", "--predict", "p.csv"), "none.json does not exist"),
        (("--from-scan", SCAN, "--resume"), "--resume is for a scan"),
        (("--from-scan", SCAN, "--", "--preset", "tiny"), "what stands after `--` is for a scan"),
        (("--from-scan", SCAN, "--plot", "c.txt"), "must end in .png"),
        (("--from-scan", SCAN, "--memory-fraction", 92), "allowed: above 0, at most 1"),
        (("--from-scan", SCAN, "--capacity-gb", -1), "allowed: above 0"),
        (("--from-scan", SCAN, "--max-tokens", 0), "--max-tokens"),
        (("--calibration", "c.json", "--predict", "p.csv", "--form", "power"), "does not go with --predict"),
    ],
)
def test_bad_usage_exits_with_2(calibrate, arguments, message):
    code, out, err = calibrate(*arguments)
    assert code == 2 and out == ""
    assert message in err and "Traceback" not in err


DS_CONFIG = {
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # each layer is gathered
    "steps_per_print": 1_000_000,
}
FEW = ("--budget", "1h", "--largest-batch", "2", "--most-repeats", "2")  # ends when all pairs are measured


@pytest.fixture
def scan_options(tmp_path):
    """A ds_config that names a corpus, the factory, and an environment that finds it and compiles nothing."""
    manifest = make_corpus(tmp_path / "corpus")
    batching = {"enabled": True, "manifest": str(manifest), "calibration": "calibration.json"}
    sampling = {"enabled": True, "dual_constraint_batching": batching}
    config = {**DS_CONFIG, "data_efficiency": {"enabled": True, "data_sampling": sampling}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    repository = Path(__file__).parent.parent
    return {
        "arguments": ("--deepspeed_config", "ds.json", "--factory", "calibrate_factory:factory", *FEW),
        "environment": {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join([str(LAUNCHED), str(repository)]),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
            "TORCHDYNAMO_DISABLE": "1",  # else DeepSpeed loads Inductor, seconds a rank
        },
        "manifest": manifest,
    }


def test_a_scan_of_the_trainers_model_on_two_ranks_and_a_slow_one_shows_as_spread(scan_options, tmp_path):
    """The second rank sleeps 0.15 s in each forward: all wait, and it is told apart.

    Then two points are checked, one of a shape that the corpus does not have.
    """
    (tmp_path / "points.csv").write_text("B,shape\n1,3x8x8\n2,5x8x8\n")
    port = free_port()
    words = [str(Path(sys.executable).parent / "al-deepspeed"), "calibrate", *scan_options["arguments"]]
    words += ["--launcher", f"--num_accelerators 2 --master_port {port}", "--json", "--check", "points.csv"]
    words += ["--", "--slow", "0.15", "--trainer=--preset tiny --layers 1"]
    command = ["sh", "-c", f"exec {shlex.join(words)} > stdout.json"]
    with Launch(command, tmp_path, port, 280, scan_options["environment"]) as run:
        run.wait()
    row = json.loads((tmp_path / "stdout.json").read_text())  # one JSON object, and nothing beside it
    check = row.pop("check")
    assert row == json.loads((tmp_path / "calibration.json").read_text())
    assert (row["zero_stage"], row["ranks"], row["device"]) == (3, 2, "cpu")
    assert set(row["fingerprints"]) == {"model", "ds_config"}
    pairs = {(point["B"], point["S"]) for point in row["points"]}
    assert {(1, 4), (1, 80), (2, 4), (2, 80)} <= pairs  # the corners
    assert all(point["ms"] >= 150 for point in row["points"])
    assert 0 < row["step_ms"] < 150  # the optimizer's, which nothing slows
    assert row["accumulation"] == DS_CONFIG["gradient_accumulation_steps"]
    lags = [point["rank_ms"][1] - point["rank_ms"][0] for point in row["points"] if point["rank_ms"]]
    assert lags and np.median(lags) > 90
    assert row["spread"] > 0.1
    assert not (tmp_path / "calibration.json.scan").exists()

    assert check == json.loads((tmp_path / "points.json").read_text())
    assert check["points"] == 1 and check["warnings"] == []
    assert [(point["S"], point["scanned"]) for point in check["checked"]] == [(48, False), (80, True)]
    for point in check["checked"]:
        assert point["ms"] >= 150
        assert point["ms_error"] == pytest.approx(point["predicted_ms"] / point["ms"] - 1)
    assert check["worst_ms_error"] == abs(check["checked"][0]["ms_error"])
    assert (check["drift"]["B"], check["drift"]["S"]) == (1, 4)
    assert min(check["drift"][name] for name in ("scan_ms", "before_ms", "after_ms")) >= 150

    calibration = read_calibration(tmp_path / "calibration.json")
    batching = DualConstraintBatching(
        manifest=str(scan_options["manifest"]), calibration=str(tmp_path / "calibration.json")
    )
    cost, limits = cost_and_limits(batching, calibration)
    assert cost == calibration.cost
    assert limits.max_tokens == row["max_tokens"] > 0
    assert limits.max_cost == row["max_cost"] > 0  # chosen for the manifest that the config names


def scan(scan_options, folder, *arguments) -> tuple[list[int], str]:
    """The same scan by its two ranks themselves; their exit codes, and what the first one printed."""
    port = free_port()
    ranks = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "al_deepspeed.calibration", *scan_options["arguments"], *arguments]
    command = ["sh", "-c", f"cd {shlex.quote(str(folder))}; exec {shlex.join(command)}"]
    with ExitStack() as stack:
        runs = []
        for rank in ("0", "1"):
            environment = {**scan_options["environment"], **ranks, "RANK": rank, "LOCAL_RANK": rank}
            (folder / rank).mkdir(exist_ok=True)
            runs.append(stack.enter_context(Launch(command, folder / rank, port, 240, environment)))
        codes = [run.wait(expect=None) for run in runs]
        return codes, runs[0].log_path.read_text(errors="replace")


def test_a_killed_scan_resumes_and_a_failed_allocation_ends_it_in_order(scan_options, tmp_path):
    """Both ranks die after 12 forwards, amid the third point. Resumed, the second rank alone cannot allocate
    B*S = 160: the first is then inside an all-gather of ZeRO-3 that the other never joins."""
    codes, log = scan(scan_options, tmp_path, "--", "--die-after", "12")
    assert 9 in codes and 0 not in codes, log
    before = json.loads((tmp_path / "calibration.json.scan").read_text())["points"]
    assert len(before) >= 2
    assert not (tmp_path / "calibration.json").exists()

    codes, log = scan(scan_options, tmp_path, "--resume", "--", "--fail-above", "150")
    assert codes == [0, 0], log
    assert "rank 1 could not allocate memory" in log
    points = json.loads((tmp_path / "calibration.json").read_text())["points"]
    assert points[: len(before)] == before
    failed = [point for point in points if point["status"] == "out_of_memory"]
    assert [point["ms"] for point in failed] == [None]
    assert failed[0]["B"] * failed[0]["S"] > 150
    assert all(point["B"] * point["S"] <= 150 for point in points if point not in failed)
    assert len(points) > len(before) + 1
