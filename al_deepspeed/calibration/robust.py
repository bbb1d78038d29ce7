"""Least squares on relative error that a few wild points cannot bend, and the error of held-out points.

A stalled rank or a neighbour on the machine makes single points far too slow. The fit starts with a soft-L1
loss from several starting points, measures the scale of the residuals by their median, and ends with a Cauchy
loss at that scale: at 2.385 standard deviations it keeps 95% of the efficiency of plain least squares.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

FloatArray = NDArray[np.float64]

NOISE_FLOOR = 1e-3  # repeated measurements do not agree better than this
CAUCHY_WIDTH = 2.385
MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True)
class Problem:
    """What to fit: predict(parameters, inputs) near target, relatively, with lower <= parameters <= upper.

    inputs: one row a point. target: above 0, one a point.
    """

    predict: Callable[[FloatArray, FloatArray], FloatArray]
    inputs: FloatArray
    target: FloatArray
    lower: FloatArray
    upper: FloatArray

    def residuals(self, parameters: FloatArray, rows=slice(None)) -> FloatArray:
        return self.predict(parameters, self.inputs[rows]) / self.target[rows] - 1

    def solve(self, start: FloatArray, loss: str, width: float, rows=slice(None), tolerance: float = 1e-8):
        start = np.clip(start, self.lower + 1e-12, self.upper)
        return least_squares(
            lambda parameters: self.residuals(parameters, rows),
            start,
            bounds=(self.lower, self.upper),
            x_scale=np.maximum(np.abs(start), 1e-3),
            loss=loss,
            f_scale=width,
            ftol=tolerance,
            xtol=tolerance,
            max_nfev=200,
        )


@dataclass(frozen=True)
class Solution:
    """parameters: the best found. width: where the Cauchy loss turns, in relative error."""

    parameters: FloatArray
    width: float


def fit(problem: Problem, starts: Sequence[FloatArray]) -> Solution:
    """Every start is tried; the best is polished twice, each time at the scale of its residuals."""
    results = [problem.solve(start, "soft_l1", 0.05) for start in starts]
    best = min(results, key=lambda result: result.cost).x
    width = np.inf
    for _ in range(2):
        sigma = MAD_TO_SIGMA * float(np.median(np.abs(problem.residuals(best))))
        width = CAUCHY_WIDTH * max(NOISE_FLOOR, sigma)
        best = problem.solve(best, "cauchy", width).x
    return Solution(best, width)


def refits_without_each(problem: Problem, solution: Solution) -> list[FloatArray]:
    """The parameters without each point in turn, at the scale of the whole fit."""
    rows = np.arange(len(problem.target))
    start, width = solution.parameters, solution.width
    return [problem.solve(start, "cauchy", width, rows != held_out, 1e-5).x for held_out in rows]


def leave_one_out(problem: Problem, solution: Solution) -> FloatArray:
    """Absolute relative error of each point under a fit to all the others."""
    refits = refits_without_each(problem, solution)
    return np.array([abs(problem.residuals(refit, [row])[0]) for row, refit in enumerate(refits)])


def linear_start(design: FloatArray, target: FloatArray) -> FloatArray:
    """Non-negative coefficients of the design's columns, by least squares on relative error."""
    scale = np.maximum(np.abs(design).max(axis=0), 1e-300)
    coefficients, _ = nnls(design / scale / target[:, None], np.ones(len(target)))
    return coefficients / scale
