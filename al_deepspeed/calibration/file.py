"""calibration.json: what a scan measured, what was fitted, and the two limits that the planner uses.

Top level: `schema_version`, `cost` (the chosen form), `max_tokens` (M_mem, null when the capacity is
unknown), `max_cost` (ms a micro-batch may take, null until chosen for a corpus), `exponent` (p of the paper's
form), and below them everything they came from. The file appears whole or not at all.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from al_deepspeed.calibration.memory import MemoryFit
from al_deepspeed.calibration.points import Point
from al_deepspeed.data.files import atomic_path
from al_deepspeed.errors import AdaptiveLoadError, CalibrationError
from al_deepspeed.scheduling.cost import CostModel, PowerCost, cost_from_dict, cost_to_dict

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Setting:
    """Where a scan ran; None where unknown, as in a scan given as a CSV.

    fingerprints: `model` (parameter names and shapes) and `ds_config`.
    capacity_gb: the device's memory, None on CPUs.
    """

    device: str | None = None
    capacity_gb: float | None = None
    zero_stage: int | None = None
    ranks: int | None = None
    torch: str | None = None
    fingerprints: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Calibration:
    """A calibration as it stands in its file.

    fits: every fitted variant with its held-out errors, as plain dictionaries.
    max_cost: None until chosen for a corpus and `world_size` ranks; the planner then chooses it itself.
    paper: the fit of the paper's form, which gives p and its M_comp.
    spread: median over points of the rank-to-rank spread; None with one rank.
    step_ms: median over points of what a step takes beside its micro-batches, its optimizer step above all;
        None where that was not measured. world_size, accumulation: R and G that max_cost was chosen for.
    curve: (max_cost, predicted tokens a second) pairs that max_cost was chosen from; empty before.
    """

    cost: CostModel
    max_tokens: int | None
    max_cost: float | None
    exponent: float
    paper: PowerCost
    memory: MemoryFit | None
    reserved: MemoryFit | None
    memory_fraction: float
    spread: float | None
    setting: Setting
    fits: tuple[Mapping, ...]
    points: tuple[Point, ...]
    step_ms: float | None = None
    world_size: int | None = None
    accumulation: int | None = None
    curve: tuple[tuple[float, float], ...] = ()

    @property
    def paper_max_cost(self) -> float:
        """M_comp of the paper's rule B*S^p <= M_comp, in tokens^p.

        What max_cost buys by the paper's form; before max_cost is chosen, the longest scanned sample alone.
        """
        if self.max_cost is None:
            return float(max(point.tokens for point in self.points) ** self.exponent)
        return max(0.0, self.max_cost - self.paper.intercept) / self.paper.scale

    def to_dict(self) -> dict:
        return {
            "schema_version": SCHEMA_VERSION,
            "cost": cost_to_dict(self.cost),
            "max_tokens": self.max_tokens,
            "max_cost": self.max_cost,
            "exponent": self.exponent,
            "paper": {"cost": cost_to_dict(self.paper), "max_cost": self.paper_max_cost},
            "memory": self.memory and self.memory.to_dict(),
            "reserved": self.reserved and self.reserved.to_dict(),
            "memory_fraction": self.memory_fraction,
            "spread": self.spread,
            "step_ms": self.step_ms,
            **{field.name: getattr(self.setting, field.name) for field in fields(Setting)},
            "fits": [dict(fit) for fit in self.fits],
            "points": [point.to_dict() for point in self.points],
            "world_size": self.world_size,
            "accumulation": self.accumulation,
            "curve": [list(pair) for pair in self.curve],
        }

    @classmethod
    def from_dict(cls, row: Mapping) -> "Calibration":
        return cls(
            cost=cost_from_dict(row["cost"]),
            max_tokens=row["max_tokens"],
            max_cost=row["max_cost"],
            exponent=row["exponent"],
            paper=cost_from_dict(row["paper"]["cost"]),
            memory=row["memory"] and MemoryFit.from_dict(row["memory"]),
            reserved=row["reserved"] and MemoryFit.from_dict(row["reserved"]),
            memory_fraction=row["memory_fraction"],
            spread=row["spread"],
            setting=Setting(**{field.name: row[field.name] for field in fields(Setting)}),
            fits=tuple(row["fits"]),
            points=tuple(Point.from_dict(point) for point in row["points"]),
            step_ms=row.get("step_ms"),  # files made before these were kept hold neither
            world_size=row["world_size"],
            accumulation=row.get("accumulation"),
            curve=tuple((cost, rate) for cost, rate in row["curve"]),
        )

    def mismatches(self, setting: Setting) -> list[str]:
        """What differs between the scan's setting and another, where both are known: reasons to warn."""
        ours, theirs = self.setting.fingerprints or {}, setting.fingerprints or {}
        compared = {
            "model fingerprint": (ours.get("model"), theirs.get("model")),
            "device": (self.setting.device, setting.device),
            "ZeRO stage": (self.setting.zero_stage, setting.zero_stage),
        }
        return [
            f"calibrated with {name} {scanned}, used with {used}; step times may be mispredicted, "
            "run `al-deepspeed calibrate` again"
            for name, (scanned, used) in compared.items()
            if None not in (scanned, used) and scanned != used
        ]


def read_calibration(path: Path | str) -> Calibration:
    """The calibration in a file; CalibrationError when there is none, or of another schema, or broken."""
    path = Path(path)
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CalibrationError(f"{path} does not exist. Make it with `al-deepspeed calibrate`.") from None
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path} cannot be read as JSON: {error}. Calibrate again.") from error
    return parse_calibration(row, str(path))


def parse_calibration(row: object, source: str) -> Calibration:
    """A calibration from its dictionary; `source` names it in errors."""
    version = row.get("schema_version") if isinstance(row, dict) else None
    if version != SCHEMA_VERSION:
        raise CalibrationError(
            f"{source} has schema_version {version!r}; this version reads {SCHEMA_VERSION}. "
            "Calibrate again with `al-deepspeed calibrate`."
        )
    for name in ("max_tokens", "max_cost"):
        value = row.get(name)
        if value is not None and not _is_positive(value):
            raise CalibrationError(f"{source}: {name} is {value!r}; allowed: a number above 0, or null.")
    try:
        calibration = Calibration.from_dict(row)
        if not _is_positive(calibration.exponent):
            raise ValueError(f"exponent is {calibration.exponent!r}")
        if calibration.step_ms is not None and not calibration.step_ms >= 0:
            raise ValueError(f"step_ms is {calibration.step_ms!r}")
        if not any(point.ms for point in calibration.points):
            raise ValueError("no point was measured")
    except (KeyError, TypeError, ValueError, AttributeError, AdaptiveLoadError) as error:
        detail = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        detail = detail.removesuffix(" Calibrate again.").removesuffix(".")
        raise CalibrationError(
            f"{source} is not a complete calibration: {detail}. Calibrate again."
        ) from error
    return calibration


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def write_calibration(calibration: Calibration, path: Path | str) -> None:
    """Atomically, so that a reader or an interrupted writer never leaves half a file."""
    write_json(calibration.to_dict(), Path(path))


def write_json(row: Mapping, path: Path) -> None:
    """A JSON file that appears whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(row, indent=1, allow_nan=False) + "\n", encoding="utf-8")
