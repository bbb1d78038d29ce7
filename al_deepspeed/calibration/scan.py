"""The scan: chooses, measures and records one point after another in the live engine.

Rank 0 chooses and tells the others; all ranks measure. After each point rank 0 writes what there is beside
the calibration's own file, so that a scan that was killed goes on with --resume.
"""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from al_deepspeed.calibration.alarm import Alarm, failed_point
from al_deepspeed.calibration.assemble import MEMORY_FRACTION
from al_deepspeed.calibration.choice import Allowance, candidates, next_candidate
from al_deepspeed.calibration.file import Setting, write_json
from al_deepspeed.calibration.measure import Meter
from al_deepspeed.calibration.points import Point, measured
from al_deepspeed.calibration.spread import busy_ms
from al_deepspeed.calibration.workload import Shape
from al_deepspeed.errors import CalibrationError

REPEATS_SHARE = 0.03  # of the budget: when a point has taken so long, it is not repeated again
SPREAD_SHARE = 0.1  # of the budget is kept for telling ranks apart at the end
SPREAD_POINTS = 3
RUNS_A_PROBE = 3.0  # a profiled run, and what lies around it


@dataclass(frozen=True)
class ScanOptions:
    """What to scan.

    shapes, tokens: the latent shapes and the S of each.
    budget_s: time for the whole scan.
    memory_fraction: the share of a rank's memory that a point may be predicted to reserve.
    capacity_gb: a rank's memory; None asks the device.
    """

    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    budget_s: float = 300.0
    largest_batch: int = 1024
    memory_fraction: float = MEMORY_FRACTION
    capacity_gb: float | None = None


@dataclass
class Progress:
    """What is measured so far: the points, the seconds of scan that they took, the least rank's memory."""

    points: list[Point] = field(default_factory=list)
    used_s: float = 0.0
    capacity_gb: float | None = None

    def save(self, setting: Setting, path: Path) -> None:
        rows = [point.to_dict() for point in self.points]
        write_json({"setting": asdict(setting), "used_s": self.used_s, "points": rows}, path)


def load_progress(path: Path, setting: Setting) -> Progress:
    """The progress of an earlier scan; nothing where there is none.

    Raises:
        CalibrationError: it was made with another model, ds_config, device, ZeRO stage or number of ranks.
    """
    if not path.is_file():
        return Progress()
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        then, now = row["setting"], asdict(setting)
        differing = [name for name in now if name != "capacity_gb" and then[name] != now[name]]
        progress = Progress([Point.from_dict(point) for point in row["points"]], row["used_s"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CalibrationError(
            f"--resume: {path} cannot be read ({type(error).__name__}: {error}). Start anew without --resume."
        ) from error
    if differing:
        raise CalibrationError(
            f"--resume: {path} was measured with another {', '.join(differing)}: "
            f"{', '.join(f'{then[name]} then, {now[name]} now' for name in differing)}. "
            "Start anew without --resume."
        )
    return progress


class Scan:
    """One scan on one rank.

    Args:
        meter: measures in the engine.
        progress: points of an earlier scan, the same on every rank.
        record: called on rank 0 with the progress after each point.
        finish: called on rank 0 when an allocation failed and the point was marked; returns the exit code.
    """

    def __init__(
        self,
        meter: Meter,
        options: ScanOptions,
        progress: Progress,
        *,
        record: Callable[[Progress], None],
        finish: Callable[[Progress], int],
    ) -> None:
        self._meter, self._options, self._progress = meter, options, progress
        self._record, self._finish = record, finish
        self._used_before_s = progress.used_s
        self._choices = candidates(options.tokens, options.largest_batch)

    def run(self) -> Progress:
        """Measures until the budget is used or every pair is measured. Collective; equal on every rank."""
        with closing(Alarm(self._end_early)) as alarm:
            batch_size, shape, tokens = self._pair(int(self._choices.load.argmin()))
            with alarm.guards(batch_size, shape, tokens):
                self._meter.prepare(batch_size, shape)
            self._progress.capacity_gb = self._options.capacity_gb or self._meter.capacity_gb()
            while (choice := self._next()) is not None:
                place, deadline_s = choice
                batch_size, shape, tokens = self._pair(place)
                with alarm.guards(batch_size, shape, tokens):
                    point = self._meter.measure(batch_size, shape, tokens, deadline_s)
                self._note(point)
            self._tell_ranks_apart(alarm)
        return self._progress

    def _pair(self, place: int) -> tuple[int, Shape, int]:
        choices = self._choices
        shape = self._options.shapes[choices.shape[place]]
        return int(choices.batch_size[place]), shape, int(choices.tokens[place])

    def _next(self) -> tuple[int, float] | None:
        """Rank 0's choice, and until when it may be repeated; told to all."""
        choice: list[tuple[int, float] | None] = [None]
        if dist.get_rank() == 0:
            kept = SPREAD_SHARE if dist.get_world_size() > 1 else 0.0
            budget_s = (1 - kept) * self._options.budget_s
            left_s = budget_s - self._used_before_s - self._meter.elapsed_s
            limit_gb = self._options.memory_fraction * self._progress.capacity_gb
            points = self._progress.points
            known = all(point.reserved_gb is not None for point in measured(points))
            allowance = Allowance(budget_s, left_s, limit_gb if known else None)
            place = next_candidate(self._choices, points, allowance)
            if place is not None:
                choice = [(place, self._meter.elapsed_s + min(left_s, REPEATS_SHARE * budget_s))]
        dist.broadcast_object_list(choice, src=0)
        return choice[0]

    def _note(self, point: Point) -> None:
        pair = (point.batch_size, point.tokens)
        others = [other for other in self._progress.points if (other.batch_size, other.tokens) != pair]
        self._progress.points = [*others, point]
        self._progress.used_s = self._used_before_s + self._meter.elapsed_s
        if dist.get_rank() == 0:
            self._record(self._progress)

    def _tell_ranks_apart(self, alarm: Alarm) -> None:
        """Profiles the longest points that a share of the budget allows, the shortest one at least."""
        if dist.get_world_size() == 1:
            return
        points = sorted(measured(self._progress.points), key=lambda point: point.ms, reverse=True)
        kept_ms = 1e3 * SPREAD_SHARE * self._options.budget_s
        allowed = [point for point in points if RUNS_A_PROBE * point.ms <= kept_ms] or points[-1:]
        for point in allowed[:SPREAD_POINTS]:
            start_s = self._meter.elapsed_s
            with alarm.guards(point.batch_size, point.shape, point.tokens):
                batch, loss = self._meter.batch(point.batch_size, point.shape)
                self._meter.run(batch, loss)
                rank_ms = busy_ms(partial(self._meter.run, batch, loss), self._meter.device)
            self._note(replace(point, rank_ms=tuple(rank_ms)))
            if not self._has_time_for(self._meter.elapsed_s - start_s):
                return

    def _has_time_for(self, seconds: float) -> bool:
        """Whether so much is left of the budget by rank 0's clock: a profile takes longer than its point."""
        answer = [self._used_before_s + self._meter.elapsed_s + seconds <= self._options.budget_s]
        dist.broadcast_object_list(answer, src=0)
        return answer[0]

    def _end_early(self, failure: dict) -> int:
        self._note(failed_point(failure))
        return self._finish(self._progress)
