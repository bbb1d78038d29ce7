"""Calibrates from what a run measured of itself: its telemetry holds B, S and time of every micro-batch.

In a micro-step the ranks wait for the slowest, so its time belongs to the pair (B, S) that was predicted to
be the slowest; of the others only an upper bound is known. Pairs that the run never showed keep the scan's
points, scaled by how much slower or faster the run was than predicted: a plan that fills its budget well
leaves few short micro-steps to learn the floor from.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from al_deepspeed.calibration.assemble import calibrate
from al_deepspeed.calibration.file import Calibration, Setting
from al_deepspeed.calibration.points import Point, measured
from al_deepspeed.errors import CalibrationError
from al_deepspeed.telemetry import FILE_NAME, read_telemetry

WARM_UP_STEPS = 2
GB = 1e9


def read_run(run_dir: Path) -> list[Point]:
    """The points of a run's telemetry file."""
    if not (run_dir / FILE_NAME).is_file():
        raise CalibrationError(
            f"{run_dir} holds no {FILE_NAME}. Give the folder that dual_constraint_batching.run_dir named."
        )
    try:
        points = run_points(read_telemetry(run_dir))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CalibrationError(
            f"{run_dir / FILE_NAME} is no telemetry of this version ({type(error).__name__}: {error}). "
            "Give another run."
        ) from error
    if not points:
        raise CalibrationError(
            f"{run_dir / FILE_NAME} holds no step after the first {WARM_UP_STEPS}, which warm up. "
            "Train longer."
        )
    return points


def run_points(lines: Iterable[Mapping]) -> list[Point]:
    """The median times and the highest memory of each (B, S); the first steps, which warm up, left out.

    The optimizer's time belongs to a step, not to a pair: each of its pairs has it.
    """
    times, steps, peaks = defaultdict(list), defaultdict(list), defaultdict(list)
    for line in list(lines)[WARM_UP_STEPS:]:
        batch_size, tokens = np.asarray(line["batch_size"]), np.asarray(line["sequence_length"])
        predicted, taken = np.asarray(line["predicted_cost"]), np.asarray(line["measured_ms"])
        for micro_step, rank in enumerate(predicted.argmax(axis=1)):
            pair = (int(batch_size[micro_step, rank]), int(tokens[micro_step, rank]))
            times[pair].append(taken[micro_step].max())
            steps[pair].append(max(line["optimizer_ms"]))
        fullest = (batch_size * tokens).argmax(axis=0)
        for rank, peak in enumerate(line["peak_memory_bytes"]):
            pair = (int(batch_size[fullest[rank], rank]), int(tokens[fullest[rank], rank]))
            peaks[pair].append(peak / GB)
    return [
        Point(
            *pair,
            float(np.median(ms)),
            peak_gb=max(peaks[pair], default=None),
            repeats=len(ms),
            step_ms=float(np.median(steps[pair])),
        )
        for pair, ms in sorted(times.items())
    ]


def refit(
    points: list[Point],
    before: Calibration | None = None,
    *,
    form: str = "auto",
    setting: Setting | None = None,
) -> Calibration:
    """A calibration from a run's points, and from those of an earlier one that the run did not show.

    M_mem stays what it was: a run's reservations mix all its shapes. M_comp is left to be chosen again.
    The setting is the earlier one's; without one, the run's, where it is known.
    """
    if before is None:
        return calibrate(points, setting or Setting(), form=form)
    shown = {(point.batch_size, point.tokens) for point in points}
    kept = [point for point in measured(before.points) if (point.batch_size, point.tokens) not in shown]
    ratio = run_ratio(points, before)
    scaled = [replace(point, ms=point.ms * ratio, step_ms=None, repeat_ms=()) for point in kept]
    after = calibrate([*points, *scaled], before.setting, form=form, memory_fraction=before.memory_fraction)
    return replace(after, max_tokens=before.max_tokens, reserved=before.reserved, spread=before.spread)


def run_ratio(points: list[Point], before: Calibration) -> float:
    """How many times slower the run was than predicted; the median over its points."""
    return float(np.median([point.ms / before.cost.cost(point.batch_size, point.tokens) for point in points]))
