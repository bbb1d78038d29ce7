"""A scan: what was measured at each (batch size, tokens).

Memory is in GB of 10^9 bytes throughout, as in the column `peak_GB` of a scan's CSV.
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from al_deepspeed.errors import CalibrationError

FloatArray = NDArray[np.float64]

MEASURED = "measured"
OUT_OF_MEMORY = "out_of_memory"
IN_FILE = {
    "batch_size": "B",
    "tokens": "S",
    "peak_gb": "peak_GB",
    "reserved_gb": "reserved_GB",
    "pass_gb": "pass_GB",
}


@dataclass(frozen=True)
class Point:
    """One (B, S) and what it took.

    ms: the median over repeats of the slowest rank's time; None where an allocation failed.
    peak_gb, reserved_gb: the largest of any rank, allocated and held by the allocator; None where unknown.
    pass_gb: the peak of forward and backward without the optimizer step; None where not told apart.
    rank_ms: each rank's own median. shape: latent frames, height, width.
    step_ms: what the step that ended here took beside its micro-batches; None where none ended, or not kept.
    repeat_ms: the slowest rank's time in each repeat, in order; ms is their median. Empty where not kept.
    """

    batch_size: int
    tokens: int
    ms: float | None
    peak_gb: float | None = None
    reserved_gb: float | None = None
    pass_gb: float | None = None
    shape: tuple[int, int, int] | None = None
    rank_ms: tuple[float, ...] = ()
    repeats: int = 1
    status: str = MEASURED
    step_ms: float | None = None
    repeat_ms: tuple[float, ...] = ()

    @property
    def spread(self) -> float:
        """(slowest - fastest) / slowest rank; 0 with one rank."""
        return (max(self.rank_ms) - min(self.rank_ms)) / max(self.rank_ms) if len(self.rank_ms) > 1 else 0.0

    def to_dict(self) -> dict:
        """As JSON takes it, B, S and memory named as in a scan's CSV."""
        return {IN_FILE.get(name, name): value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, row: Mapping) -> "Point":
        row = {"step_ms": None, "repeat_ms": (), **row}  # scans of earlier versions kept neither
        values = {field.name: row[IN_FILE.get(field.name, field.name)] for field in fields(cls)}
        values |= {name: tuple(values[name]) for name in ("rank_ms", "repeat_ms")}
        return cls(**{**values, "shape": values["shape"] and tuple(values["shape"])})


@dataclass(frozen=True)
class Columns:
    """The measured points as arrays; memory is NaN where unknown."""

    batch_size: FloatArray
    tokens: FloatArray
    ms: FloatArray
    peak_gb: FloatArray
    reserved_gb: FloatArray
    pass_gb: FloatArray

    def __len__(self) -> int:
        return len(self.ms)


def measured(points: Iterable[Point]) -> list[Point]:
    """The points without those where an allocation failed."""
    return [point for point in points if point.status == MEASURED]


def columns(points: Iterable[Point]) -> Columns:
    """Arrays over the measured points."""
    rows = [
        (p.batch_size, p.tokens, p.ms, *map(_or_nan, (p.peak_gb, p.reserved_gb, p.pass_gb)))
        for p in measured(points)
    ]
    table = np.array(rows, dtype=np.float64).reshape(len(rows), 6)
    return Columns(*table.T)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def read_scan(path: Path) -> tuple[Point, ...]:
    """A scan's CSV: columns B, S, ms and, where memory was measured, peak_GB."""
    return tuple(
        Point(
            batch_size=whole_number(path, line, row, "B"),
            tokens=whole_number(path, line, row, "S"),
            ms=_number(path, line, row, "ms", float),
            peak_gb=_number(path, line, row, "peak_GB", float) if row.get("peak_GB") else None,
        )
        for line, row in read_csv(path, ("B", "S", "ms"))
    )


def read_requests(path: Path) -> tuple[list[int], list[int]]:
    """Columns B and S of a CSV of points to predict."""
    numbered = read_csv(path, ("B", "S"))
    return (
        [whole_number(path, line, row, "B") for line, row in numbered],
        [whole_number(path, line, row, "S") for line, row in numbered],
    )


def read_csv(path: Path, required: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Rows of a CSV that has at least the required columns and one row, each with its line in the file."""
    wanted = f"a CSV with columns {', '.join(required)}"
    if not path.is_file():
        raise CalibrationError(
            f"{path} {'is no file' if path.exists() else 'does not exist'}. Give {wanted}."
        )
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
            _check_columns(path, reader.fieldnames, required)
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CalibrationError(f"{path} cannot be read: {error}. Give {wanted}, in UTF-8.") from error
    if not rows:
        raise CalibrationError(f"{path} has a header and no rows. Give at least one point.")
    for line, row in rows:
        if None in row:
            raise CalibrationError(f"{path} line {line} has more cells than the header. Mend the row.")
    return rows


def _check_columns(path: Path, names: Sequence[str], required: Sequence[str]) -> None:
    needed = f"{path} has columns {', '.join(names) or 'none'}; needed: {', '.join(required)}"
    missing = [name for name in required if name not in names]
    if missing:
        raise CalibrationError(f"{needed}. Missing: {', '.join(missing)}.")
    if len(set(names)) < len(names):
        raise CalibrationError(f"{needed}, each once. Rename the doubled ones.")


def whole_number(path: Path, line: int, row: Mapping[str, str], name: str) -> int:
    """A cell of a CSV that must be a whole number above 0."""
    return _number(path, line, row, name, int)


def _number(path: Path, line: int, row: Mapping[str, str], name: str, kind: type) -> float:
    text = (row[name] or "").strip()
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0 and (kind is float or value == int(value))):
        allowed = "a whole number above 0" if kind is int else "a number above 0"
        raise CalibrationError(f"{path} line {line}: {name} is {text!r}; allowed: {allowed}. Mend the row.")
    return kind(value)
