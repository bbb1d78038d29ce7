"""Measures given (B, shape) in the live engine and holds them against a calibration's predictions.

A calibration's own errors are of points that its scan chose. Here the user chooses: pairs that were not
scanned, shapes that the corpus does not have. A point that is predicted not to fit into memory is not tried.

A machine's own pace drifts, above all the host's, which sets the time of small micro-batches. So the scan's
smallest point is measured again before these points and after them: what it is off by, no form could predict.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch.distributed as dist
from rich.console import RenderableType
from rich.table import Table

from al_deepspeed.calibration.alarm import Alarm, failed_point
from al_deepspeed.calibration.file import Calibration
from al_deepspeed.calibration.measure import Meter
from al_deepspeed.calibration.points import MEASURED, Point, measured, read_csv, whole_number
from al_deepspeed.calibration.workload import Shape, read_shape
from al_deepspeed.errors import CalibrationError
from al_deepspeed.scheduling.shapes import latent_tokens

TOO_LARGE = "not tried: predicted not to fit"
SECONDS_A_POINT = 8.0  # no further repeat of a point after these


@dataclass(frozen=True)
class Request:
    """A point that a user wants to know about."""

    batch_size: int
    shape: Shape
    tokens: int


def read_points(path: Path, patch: Shape) -> tuple[Request, ...]:
    """A CSV with columns B and shape (latent frames x height x width)."""
    requests = []
    for line, row in read_csv(path, ("B", "shape")):
        shape = read_shape((row["shape"] or "").strip())
        if shape is None:
            raise CalibrationError(
                f"{path} line {line}: shape is {row['shape']!r}; allowed: frames x height x width of the "
                "latent, as 5x60x104. Mend the row."
            )
        batch_size = whole_number(path, line, row, "B")
        requests.append(Request(batch_size, shape, latent_tokens(*shape, patch=patch)))
    return tuple(requests)


@dataclass(frozen=True)
class Checked:
    """A point as measured and as predicted. errors: predicted over measured, less 1; None where unknown."""

    B: int
    S: int
    shape: Shape
    status: str
    scanned: bool
    repeats: int
    repeat_ms: tuple[float, ...]
    ms: float | None
    predicted_ms: float
    ms_error: float | None
    peak_GB: float | None
    predicted_peak_GB: float | None
    peak_error: float | None
    reserved_GB: float | None
    predicted_reserved_GB: float | None
    reserved_error: float | None


@dataclass(frozen=True)
class Drift:
    """A scanned point, and what it took again before a check's points and after them; None until then."""

    B: int
    S: int
    shape: Shape
    scan_ms: float
    before_ms: float | None = None
    after_ms: float | None = None


def smallest_scanned(calibration: Calibration) -> Drift | None:
    """The least load of a scan, whose time is the host's; None where the scan's shapes are unknown."""
    points = [point for point in measured(calibration.points) if point.shape is not None]
    if not points:
        return None
    least = min(points, key=lambda point: point.batch_size * point.tokens)
    return Drift(least.batch_size, least.tokens, least.shape, least.ms)


@dataclass(frozen=True)
class Result:
    """rows: a point each, in the order asked for. drift: of the machine since the scan."""

    rows: tuple[Checked, ...] = ()
    drift: Drift | None = None


def checked(point: Point, calibration: Calibration) -> Checked:
    """A measured point beside its prediction."""
    pair = (point.batch_size, point.tokens)
    ms = float(calibration.cost.cost(*pair))
    peak = calibration.memory and float(calibration.memory.peak_gb(*pair))
    reserved = calibration.reserved and float(calibration.reserved.peak_gb(*pair))
    return Checked(
        B=point.batch_size,
        S=point.tokens,
        shape=point.shape,
        status=point.status,
        scanned=pair in {(other.batch_size, other.tokens) for other in calibration.points},
        repeats=point.repeats if point.status == MEASURED else 0,
        repeat_ms=point.repeat_ms,
        ms=point.ms,
        predicted_ms=ms,
        ms_error=_error(ms, point.ms),
        peak_GB=point.peak_gb,
        predicted_peak_GB=peak,
        peak_error=_error(peak, point.peak_gb),
        reserved_GB=point.reserved_gb,
        predicted_reserved_GB=reserved,
        reserved_error=_error(reserved, point.reserved_gb),
    )


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1


def summary(rows: Sequence[Checked]) -> dict:
    """Errors over the measured points that the scan did not have; null where there are none."""
    unseen = [row for row in rows if row.status == MEASURED and not row.scanned]
    times, peaks, reserved = (
        np.abs([getattr(row, name) for row in unseen if getattr(row, name) is not None])
        for name in ("ms_error", "peak_error", "reserved_error")
    )
    return {
        "points": len(unseen),
        "median_ms_error": float(np.median(times)) if len(times) else None,
        "p90_ms_error": float(np.quantile(times, 0.9)) if len(times) else None,
        "worst_ms_error": float(times.max()) if len(times) else None,
        "worst_peak_error": float(peaks.max()) if len(peaks) else None,
        "worst_reserved_error": float(reserved.max()) if len(reserved) else None,
    }


class Check:
    """One check on one rank.

    Args:
        limit_gb: what a point may be predicted to reserve; None where the capacity is unknown.
        record: called on rank 0 with the result so far after each point.
    """

    def __init__(
        self,
        meter: Meter,
        calibration: Calibration,
        limit_gb: float | None,
        record: Callable[[Result], None],
    ) -> None:
        self._meter, self._calibration, self._limit_gb, self._record = meter, calibration, limit_gb, record
        self._result = Result(drift=smallest_scanned(calibration))

    def run(self, requests: Sequence[Request]) -> Result:
        """Measures every point that fits. Collective."""
        with closing(Alarm(self._end_early)) as alarm:
            smallest = min(requests, key=lambda request: request.batch_size * request.tokens)
            if not self._meter.prepared:  # a scan in the same launch has done so
                with alarm.guards(smallest.batch_size, smallest.shape, smallest.tokens):
                    self._meter.prepare(smallest.batch_size, smallest.shape)
            self._look_at_drift("before_ms", alarm)
            for request in requests:
                self._note(self._point(request, alarm))
            self._look_at_drift("after_ms", alarm)
        return self._result

    def _look_at_drift(self, when: str, alarm: Alarm) -> None:
        drift = self._result.drift
        if drift is not None:
            point = self._point(Request(drift.B, drift.shape, drift.S), alarm)
            self._result = replace(self._result, drift=replace(drift, **{when: point.ms}))

    def _point(self, request: Request, alarm: Alarm) -> Point:
        pair = (request.batch_size, request.tokens)
        if not self.fits(request):
            return Point(*pair, None, shape=request.shape, status=TOO_LARGE)
        with alarm.guards(request.batch_size, request.shape, request.tokens):
            deadline_s = self._meter.elapsed_s + SECONDS_A_POINT
            return self._meter.measure(request.batch_size, request.shape, request.tokens, deadline_s)

    def fits(self, request: Request) -> bool:
        """Whether the point is predicted to reserve no more than the limit; unknown memory fits."""
        memory = self._calibration.reserved or self._calibration.memory
        if memory is None or self._limit_gb is None:
            return True
        return bool(memory.peak_gb(request.batch_size, request.tokens) <= self._limit_gb)

    def _note(self, point: Point) -> None:
        rows = (*self._result.rows, checked(point, self._calibration))
        self._result = replace(self._result, rows=rows)
        if dist.get_rank() == 0:
            self._record(self._result)

    def _end_early(self, failure: dict) -> int:
        self._note(failed_point(failure))
        return 1


def to_dict(result: Result) -> dict:
    """The result as JSON takes it."""
    drift = result.drift and asdict(result.drift)
    return {**summary(result.rows), "drift": drift, "checked": [asdict(row) for row in result.rows]}


def table(result: Result) -> RenderableType:
    """Measured beside predicted, and the errors in one line."""
    shown = Table(title="check: measured against predicted", title_justify="left", caption=_caption(result))
    for name in ("B", "shape", "S", "ms", "predicted", "off", "peak GB", "predicted", "off", "reserved off"):
        shown.add_column(name, justify="right")
    for row in result.rows:
        shown.add_row(
            *(str(row.B), "x".join(map(str, row.shape)), str(row.S)),
            *(row.status if row.ms is None else f"{row.ms:.2f}", f"{row.predicted_ms:.2f}"),
            *(_percent(row.ms_error), _gb(row.peak_GB), _gb(row.predicted_peak_GB)),
            *(_percent(row.peak_error), _percent(row.reserved_error)),
        )
    return shown


def _caption(result: Result) -> str:
    figures = summary(result.rows)
    named = {
        "time: median": "median_ms_error",
        "90th": "p90_ms_error",
        "worst": "worst_ms_error",
        "peak memory: worst": "worst_peak_error",
        "reserved: worst": "worst_reserved_error",
    }
    errors = (f"{name} {figures[key]:.2%}" for name, key in named.items() if figures[key] is not None)
    line = f"{figures['points']} points that were not scanned; errors: {', '.join(errors)}"
    return line if result.drift is None else f"{line}\n{_drift_line(result.drift)}"


def _drift_line(drift: Drift) -> str:
    again = {"before these points": drift.before_ms, "after them": drift.after_ms}
    taken = (
        f"{ms:.1f} ms {when} ({_percent(ms / drift.scan_ms - 1)})"
        for when, ms in again.items()
        if ms is not None
    )
    pair = f"B = {drift.B}, S = {drift.S}"
    return f"the machine: {pair} took {drift.scan_ms:.1f} ms in the scan, {', '.join(taken)}"


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"


def _gb(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
