"""Peak memory against (B, S): the higher of the optimizer step and the passes.

    peak = max(optimizer, m0 + m1*B*S + m2*B)

m2 is what a sample takes whatever its length, its text tokens above all. A pass can peak in two places (a
block's backward, the output layer), each linear in B*S, so a second line may be added. Both come in only
where held-out points show them. M_mem, the largest B*S below a limit, is the least that any line allows, at
the shortest S, where a token carries most of its sample's text.
"""

from dataclasses import dataclass

import numpy as np

from al_deepspeed.calibration import robust
from al_deepspeed.calibration.robust import FloatArray, Problem

MINIMUM_POINTS = 4
GAIN = 0.9  # a further term must bring the mean held-out error below this share of the simpler fit's
SHAPES = ((1, False), (1, True), (2, False), (2, True))  # lines, and whether a sample has a level of its own


@dataclass(frozen=True)
class MemoryFit:
    """peak_gb = max over lines of base_gb + per_token_gb * B*S, and per_sample_gb * B above it.

    optimizer_gb: the level below which no step's peak falls; 0 where the scan never saw it.
    lines: (m0 in GB, m1 in GB a token), one or two.
    per_sample_gb: m2, GB a sample.
    held_out: leave-one-out relative error of each point.
    """

    optimizer_gb: float
    lines: tuple[tuple[float, float], ...]
    per_sample_gb: float = 0.0
    held_out: tuple[float, ...] = ()

    def peak_gb(self, batch_size, tokens) -> FloatArray:
        batch_size = np.asarray(batch_size, dtype=np.float64)
        load = batch_size * np.asarray(tokens, dtype=np.float64)
        passes = np.max([base + slope * load for base, slope in self.lines], axis=0)
        return np.maximum(self.optimizer_gb, passes + self.per_sample_gb * batch_size)

    def largest_tokens(self, limit_gb: float, shortest: int) -> int:
        """The largest B*S whose predicted peak stays within a limit at any S from `shortest`; 0 for none."""
        if limit_gb < self.optimizer_gb:
            return 0
        lines = [(base, slope + self.per_sample_gb / shortest) for base, slope in self.lines]
        loads = [(limit_gb - base) / slope for base, slope in lines if slope > 0]
        return max(0, int(min(loads))) if loads else 0

    def to_dict(self) -> dict:
        return {
            "optimizer_gb": self.optimizer_gb,
            "lines": [{"m0_gb": base, "m1_gb_per_token": slope} for base, slope in self.lines],
            "m2_gb_per_sample": self.per_sample_gb,
            "held_out": list(self.held_out),
        }

    @classmethod
    def from_dict(cls, row: dict) -> "MemoryFit":
        lines = tuple((line["m0_gb"], line["m1_gb_per_token"]) for line in row["lines"])
        if not lines:
            raise ValueError("memory has no lines")
        return cls(
            optimizer_gb=row["optimizer_gb"],
            lines=lines,
            per_sample_gb=row["m2_gb_per_sample"],
            held_out=tuple(row["held_out"]),
        )


def fit_memory(
    batch_size: FloatArray, tokens: FloatArray, peak_gb: FloatArray, pass_gb: FloatArray | None = None
) -> MemoryFit | None:
    """Fit the points whose memory is known; None where they are too few to hold a line.

    Args:
        batch_size, tokens: B and S a point.
        peak_gb: the peak of the whole step, NaN where unknown.
        pass_gb: the peak without the optimizer step. Given, the optimizer's level is read off, else fitted.
    """
    known = np.isfinite(peak_gb)
    batch_size, tokens, peak_gb = batch_size[known], tokens[known], peak_gb[known]
    loads = len(np.unique(batch_size * tokens))
    if loads < MINIMUM_POINTS:
        return None
    target, optimizer = peak_gb, None
    if pass_gb is not None and np.isfinite(pass_gb[known]).all():
        target = pass_gb[known]
        above = peak_gb > target
        optimizer = float(np.median(peak_gb[above])) if above.any() else 0.0
    shapes = SHAPES if loads >= 2 * MINIMUM_POINTS else SHAPES[:1]
    fits = [_fit_lines(batch_size, tokens, target, *shape, optimizer) for shape in shapes]
    best = min(np.mean(fit.held_out) for fit in fits)
    return next(fit for fit in fits if GAIN * np.mean(fit.held_out) <= best)


def _fit_lines(
    batch_size: FloatArray,
    tokens: FloatArray,
    target: FloatArray,
    count: int,
    text: bool,
    optimizer: float | None,
) -> MemoryFit:
    """Parameters: a base and a slope a line, a level a sample, then a level below all where not known.

    Batch sizes and loads are scaled to 1 for the solver.
    """
    load = batch_size * tokens
    scales = np.array([load.max(), batch_size.max()])
    inputs = np.stack([load, batch_size], axis=1) / scales
    size = 2 * count + text

    def predict(parameters: FloatArray, inputs: FloatArray) -> FloatArray:
        lines = parameters[: 2 * count].reshape(count, 2)
        passes = (lines[:, :1] + lines[:, 1:] * inputs[:, 0]).max(axis=0)
        passes = passes + (parameters[2 * count] * inputs[:, 1] if text else 0.0)
        return np.maximum(passes, parameters[size:].max(initial=0.0))

    def start(level: float) -> FloatArray:
        rows = target > 1.02 * level
        rows = rows if rows.sum() >= 2 * count else slice(None)
        return np.append(_start_lines(inputs[rows, 0], target[rows], count), np.zeros(int(text)))

    if optimizer is None:
        levels = (0.0, target.min(), np.quantile(target, 0.25))
        starts = [np.append(start(level), level) for level in levels]
    else:
        starts = [start(0.0)]
    unbounded = np.full(len(starts[0]), np.inf)
    problem = Problem(predict, inputs, target, lower=np.zeros(len(unbounded)), upper=unbounded)
    solution = robust.fit(problem, starts)
    held_out = robust.leave_one_out(problem, solution)
    fitted = solution.parameters[: 2 * count].reshape(count, 2)
    lines = tuple((float(base), float(slope / scales[0])) for base, slope in fitted)
    per_sample = float(solution.parameters[2 * count] / scales[1]) if text else 0.0
    if optimizer is None:
        level = float(solution.parameters[-1])
        optimizer = level if level > max(base + slope * load.min() for base, slope in lines) else 0.0
    return MemoryFit(optimizer, lines, per_sample, tuple(held_out.tolist()))


def _start_lines(load: FloatArray, peak: FloatArray, count: int) -> FloatArray:
    """One straight line through each of `count` equal parts of the points, by load."""
    lines = []
    for part in np.array_split(np.argsort(load), count):
        design = np.stack([np.ones(len(part)), load[part]], axis=1)
        lines.append(robust.linear_start(design, peak[part]))
    return np.concatenate(lines)
