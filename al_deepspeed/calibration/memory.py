"""Peak memory against B*S: the higher of the optimizer step and the passes.

    peak = max(optimizer, m0 + m1*B*S)

A pass can peak in two places (a block's backward, the output layer), each linear in B*S, so a second line is
added where held-out points show it. The maximum of the lines is convex: M_mem, the largest B*S below a limit,
is the least that any line allows.
"""

from dataclasses import dataclass

import numpy as np

from al_deepspeed.calibration import robust
from al_deepspeed.calibration.robust import FloatArray, Problem

MINIMUM_POINTS = 4
GAIN = 0.9  # a further line must bring the mean held-out error below this share of the simpler fit's


@dataclass(frozen=True)
class MemoryFit:
    """peak_gb = max over lines of base_gb + per_token_gb * B*S.

    optimizer_gb: the level below which no step's peak falls; 0 where the scan never saw it.
    lines: (m0 in GB, m1 in GB a token), one or two.
    held_out: leave-one-out relative error of each point.
    """

    optimizer_gb: float
    lines: tuple[tuple[float, float], ...]
    held_out: tuple[float, ...] = ()

    def peak_gb(self, batch_size, tokens) -> FloatArray:
        load = np.asarray(batch_size, dtype=np.float64) * np.asarray(tokens, dtype=np.float64)
        passes = np.max([base + slope * load for base, slope in self.lines], axis=0)
        return np.maximum(self.optimizer_gb, passes)

    def largest_tokens(self, limit_gb: float) -> int:
        """The largest B*S whose predicted peak stays at or below the limit; 0 where nothing does."""
        if limit_gb < self.optimizer_gb:
            return 0
        loads = [(limit_gb - base) / slope for base, slope in self.lines if slope > 0]
        return max(0, int(min(loads))) if loads else 0

    def to_dict(self) -> dict:
        return {
            "optimizer_gb": self.optimizer_gb,
            "lines": [{"m0_gb": base, "m1_gb_per_token": slope} for base, slope in self.lines],
            "held_out": list(self.held_out),
        }

    @classmethod
    def from_dict(cls, row: dict) -> "MemoryFit":
        lines = tuple((line["m0_gb"], line["m1_gb_per_token"]) for line in row["lines"])
        return cls(optimizer_gb=row["optimizer_gb"], lines=lines, held_out=tuple(row["held_out"]))


def fit_memory(load: FloatArray, peak_gb: FloatArray, pass_gb: FloatArray | None = None) -> MemoryFit | None:
    """Fit the points whose memory is known; None where they are too few to hold a line.

    Args:
        load: B*S a point.
        peak_gb: the peak of the whole step, NaN where unknown.
        pass_gb: the peak without the optimizer step. Given, the optimizer's level is read off, else fitted.
    """
    known = np.isfinite(peak_gb)
    load, peak_gb = load[known], peak_gb[known]
    if len(np.unique(load)) < MINIMUM_POINTS:
        return None
    target, optimizer = peak_gb, None
    if pass_gb is not None and np.isfinite(pass_gb[known]).all():
        target = pass_gb[known]
        above = peak_gb > target
        optimizer = float(np.median(peak_gb[above])) if above.any() else 0.0
    best = _fit_lines(load, target, 1, optimizer)
    if len(np.unique(load)) >= 2 * MINIMUM_POINTS:
        second = _fit_lines(load, target, 2, optimizer)
        if np.mean(second.held_out) < GAIN * np.mean(best.held_out):
            best = second
    return best


def _fit_lines(load: FloatArray, target: FloatArray, count: int, optimizer: float | None) -> MemoryFit:
    """Parameters: a base and a slope a line, then a level below all where the optimizer's is not known.

    Loads are scaled to 1 for the solver.
    """
    scale = load.max()
    inputs = (load / scale)[:, None]

    def predict(parameters: FloatArray, inputs: FloatArray) -> FloatArray:
        lines = parameters[: 2 * count].reshape(count, 2)
        passes = (lines[:, :1] + lines[:, 1:] * inputs[:, 0]).max(axis=0)
        return np.maximum(passes, parameters[2 * count :].max(initial=0.0))

    def start(level: float) -> FloatArray:
        rows = target > 1.02 * level
        rows = rows if rows.sum() >= 2 * count else slice(None)
        return _start_lines(inputs[rows, 0], target[rows], count)

    if optimizer is None:
        levels = (0.0, target.min(), np.quantile(target, 0.25))
        starts = [np.append(start(level), level) for level in levels]
    else:
        starts = [start(0.0)]
    size = len(starts[0])
    problem = Problem(predict, inputs, target, lower=np.zeros(size), upper=np.full(size, np.inf))
    solution = robust.fit(problem, starts)
    held_out = robust.leave_one_out(problem, solution)
    fitted = solution.parameters[: 2 * count].reshape(count, 2)
    lines = tuple((float(base), float(slope / scale)) for base, slope in fitted)
    if optimizer is None:
        level = float(solution.parameters[-1])
        optimizer = level if level > max(base + slope * load.min() for base, slope in lines) else 0.0
    return MemoryFit(optimizer, lines, tuple(held_out.tolist()))


def _start_lines(load: FloatArray, peak: FloatArray, count: int) -> FloatArray:
    """One straight line through each of `count` equal parts of the points, by load."""
    lines = []
    for part in np.array_split(np.argsort(load), count):
        design = np.stack([np.ones(len(part)), load[part]], axis=1)
        lines.append(robust.linear_start(design, peak[part]))
    return np.concatenate(lines)
