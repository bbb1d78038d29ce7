"""`calibrate --check`: measured beside predicted. Its launch is in test_calibrate_command.py."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
from rich.console import Console

from al_deepspeed.calibration import check as checks
from al_deepspeed.calibration.check import Check, Drift, Request, Result, checked, read_points, summary, table
from al_deepspeed.calibration.file import Calibration, Setting
from al_deepspeed.calibration.memory import MemoryFit
from al_deepspeed.calibration.points import OUT_OF_MEMORY, Point
from al_deepspeed.errors import CalibrationError
from al_deepspeed.scheduling.cost import PowerCost, TwoTermCost

# 10 ms and 1 ms for 100 tokens; 2 GB and 1 GB for 1000 tokens, and a tenth more reserved.
CALIBRATION = Calibration(
    cost=TwoTermCost(intercept=10.0, linear=0.01, quadratic=0.0),
    max_tokens=None,
    max_cost=None,
    exponent=1.0,
    paper=PowerCost(intercept=10.0, scale=0.01, exponent=1.0),
    memory=MemoryFit(0.0, ((2.0, 1e-3),)),
    reserved=MemoryFit(0.0, ((2.2, 1.1e-3),)),
    memory_fraction=0.9,
    spread=None,
    setting=Setting(),
    fits=(),
    points=(Point(1, 1000, 20.0),),
)


def test_errors_are_of_points_that_were_measured_and_not_scanned():
    """3 x 1000 tokens: 40 ms and 5 GB predicted. 2 x 500: 20 ms and 3 GB."""
    slow = checked(Point(3, 1000, 50.0, peak_gb=4.0, reserved_gb=5.5, shape=(1, 2, 3)), CALIBRATION)
    assert (slow.predicted_ms, slow.predicted_peak_GB) == pytest.approx((40.0, 5.0))
    assert slow.ms_error == pytest.approx(-0.2)
    assert slow.peak_error == pytest.approx(0.25)
    assert slow.reserved_error == pytest.approx(0.0)
    right = checked(Point(2, 500, 20.0, shape=(1, 2, 3)), CALIBRATION)
    assert right.ms_error == pytest.approx(0.0) and right.peak_error is None
    scanned = checked(Point(1, 1000, 90.0, shape=(1, 2, 3)), CALIBRATION)
    failed = checked(Point(9, 1000, None, shape=(1, 2, 3), status=OUT_OF_MEMORY), CALIBRATION)
    assert scanned.scanned and failed.ms_error is None and failed.repeats == 0
    found = summary([slow, right, scanned, failed])
    assert found["points"] == 2
    assert found["median_ms_error"] == pytest.approx(0.1)
    assert found["worst_ms_error"] == pytest.approx(0.2)
    assert found["worst_peak_error"] == pytest.approx(0.25)
    assert summary([scanned])["median_ms_error"] is None


def test_a_point_is_tried_up_to_the_predicted_limit():
    """2.2 GB and 1.1 GB for 1000 tokens: 7.7 GB hold 5000."""
    check = Check(meter=None, calibration=CALIBRATION, limit_gb=7.71, record=print)
    assert check.fits(Request(5, (1, 2, 3), 1000)) and not check.fits(Request(6, (1, 2, 3), 1000))
    unknown = replace(CALIBRATION, memory=None, reserved=None)
    assert Check(meter=None, calibration=unknown, limit_gb=7.71, record=print).fits(
        Request(99, (1, 2, 3), 1000)
    )


class Pace:
    """A meter whose times are given, in the order that it is asked for them."""

    prepared = True
    elapsed_s = 0.0

    def __init__(self, *times: float) -> None:
        self.times, self.asked = list(times), []

    def measure(self, batch_size, shape, tokens, deadline_s) -> Point:
        self.asked.append((batch_size, tokens))
        return Point(batch_size, tokens, self.times.pop(0), shape=shape)


@pytest.fixture
def one_process(monkeypatch):
    """No process group, no store."""
    monkeypatch.setattr(checks, "Alarm", lambda finish: nullcontext(Quiet()))
    monkeypatch.setattr(checks, "closing", lambda alarm: alarm)
    monkeypatch.setattr(checks.dist, "get_rank", lambda: 0)


class Quiet:
    def guards(self, *point):
        return nullcontext()


def test_the_smallest_scanned_point_is_measured_again_before_and_after(one_process):
    """Scanned in 10 ms, it takes 12 before the points and 11 after them."""
    scanned = (Point(2, 1000, 40.0, shape=(1, 4, 5)), Point(3, 16, 10.0, shape=(1, 8, 8)), Point(1, 1, 5.0))
    calibration = replace(CALIBRATION, points=scanned)
    pace, recorded = Pace(12.0, 21.0, 11.0), []
    result = Check(pace, calibration, None, recorded.append).run([Request(2, (1, 2, 3), 500)])
    assert pace.asked == [(3, 16), (2, 500), (3, 16)]
    assert result.drift == Drift(3, 16, (1, 8, 8), scan_ms=10.0, before_ms=12.0, after_ms=11.0)
    assert recorded[0].drift.after_ms is None and [row.ms for row in result.rows] == [21.0]
    console = Console(width=150, record=True)
    console.print(table(result))
    line = "B = 3, S = 16 took 10.0 ms in the scan, 12.0 ms before these points (+20.0%), 11.0 ms after them"
    assert line in " ".join(console.export_text().split())


def test_a_table_of_points_without_shapes_has_no_drift():
    assert Check(None, CALIBRATION, None, print)._result == Result()


def test_points_are_read_with_their_tokens(tmp_path):
    """Patches of 1x2x2: 5x60x104 are 5 * 30 * 52 tokens."""
    path = tmp_path / "points.csv"
    path.write_text("B,shape\n3,5x60x104\n1,1x32x32\n")
    assert read_points(path, (1, 2, 2)) == (Request(3, (5, 60, 104), 7800), Request(1, (1, 32, 32), 256))
    for row, message in (("3,60x104", "line 2: shape is '60x104'"), ("0,1x2x2", "line 2: B is '0'")):
        path.write_text(f"B,shape\n{row}\n")
        with pytest.raises(CalibrationError, match=message):
            read_points(path, (1, 2, 2))
