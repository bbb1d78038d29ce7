"""`al-deepspeed calibrate` from the command line, as a user or a script runs it."""

import json
import sys
from pathlib import Path

import pytest

from al_deepspeed import cli

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no source"),
        (("--from-scan", "s.csv", "--calibration", "c.json"), "--from-scan and --calibration"),
        (("--from-scan", "s.csv", "--predict", "p.csv"), "--predict needs --calibration"),
        (("--calibration", "c.json", "--manifest", "m.csv"), "give both"),
        (("--calibration", "none.json", "--predict", "p.csv"), "none.json does not exist"),
    ],
)
def test_bad_usage_exits_with_2(calibrate, arguments, message):
    code, out, err = calibrate(*arguments)
    assert code == 2 and out == ""
    assert message in err and "Traceback" not in err
