"""The figures of a run, from RUN/telemetry.jsonl: what was measured, and what the cost model had predicted.

Efficiency and imbalance are of one rank's work against another's in the same micro-step:

    efficiency = sum over micro-steps of mean_r(work) / sum of max_r(work)
    imbalance  = mean over micro-steps of std_r(work) / mean_r(work)

Predicted, `work` is the cost that the plan gave each micro-batch. Measured, it cannot be read off a clock:
where ranks wait for each other in every layer (ZeRO-3), all clocks of a micro-step show the slowest rank. So
the work of a micro-batch is fitted, from this run alone: with f(B, S) = a + b*B*S + c*B*S^2, the time of a
micro-step is the largest f among its ranks. `fit_error` says how well that explains the measured times.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from al_deepspeed.errors import AdaptiveLoadError
from al_deepspeed.telemetry import FILE_NAME, read_telemetry
from al_deepspeed.training.validation import read_validation

FIT_ROUNDS = 20
Rows = list[np.ndarray]  # one array a micro-step, a value a rank; ranks may change at a restart


def read_run(run: Path) -> list[dict[str, Any]]:
    """The telemetry of a run, a line a step."""
    if not (run / FILE_NAME).is_file():
        raise AdaptiveLoadError(f"{run} holds no {FILE_NAME}. Give the folder that was a run's `run_dir`.")
    lines = read_telemetry(run)
    if not lines:
        raise AdaptiveLoadError(f"{run / FILE_NAME} holds no complete step yet.")
    return lines


def figures(run: Path) -> dict[str, Any]:
    """{"run", "measured": {...}, "predicted": {...}, "shapes": [...]}; shares of one, times in seconds."""
    lines = read_run(run)
    work = rows(lines, "predicted_cost")
    return {
        "run": str(run),
        "measured": {**_counts(lines), **_speed(lines), **_balance(lines), **_loss(lines, run)},
        "predicted": {"efficiency": efficiency(work), "imbalance": imbalance(work)},
        "shapes": shapes(lines),
    }


def rows(lines: list[dict], key: str) -> Rows:
    """A [G][R] entry of every line, one array a micro-step."""
    return [np.asarray(row, dtype=np.float64) for line in lines for row in line[key]]


def efficiency(work: Rows) -> float:
    """The share of ranks' time in which they work."""
    return float(sum(row.mean() for row in work) / sum(row.max() for row in work))


def imbalance(work: Rows) -> float:
    """The relative spread of work within a micro-step (population std)."""
    return float(np.mean([row.std() / row.mean() for row in work]))


def fit_work(batch_size: Rows, tokens: Rows, micro_step_ms: np.ndarray) -> tuple[Rows, float] | None:
    """The work of each micro-batch in ms, and the fit's median relative error.

    Which rank is the slowest depends on f, and f on that: start from S^2, assign, fit by non-negative least
    squares of relative errors, and repeat until the assignment stays.

    Returns:
        (work, error), or None where too few different micro-batches ran to tell three coefficients.
    """
    terms = [np.stack([np.ones_like(b), b * s, b * s**2]) for b, s in zip(batch_size, tokens, strict=True)]
    slowest = [int(np.argmax(row[2])) for row in terms]
    for _ in range(FIT_ROUNDS):
        design = np.stack([row[:, rank] for row, rank in zip(terms, slowest, strict=True)])
        if len(np.unique(design, axis=0)) < 4:
            return None
        scale = design.max(axis=0)
        coefficients = nnls(design / scale / micro_step_ms[:, None], np.ones(len(design)))[0] / scale
        work = [coefficients @ row for row in terms]
        before, slowest = slowest, [int(np.argmax(row)) for row in work]
        if slowest == before:
            break
    largest = np.array([row.max() for row in work])
    return work, float(np.median(np.abs(largest / micro_step_ms - 1)))


def shapes(lines: list[dict]) -> list[dict[str, Any]]:
    """A row a kind and shape, in order of length: micro-batches, samples and the batch sizes that ran."""
    found: dict[tuple, dict] = defaultdict(
        lambda: {"micro_batches": 0, "samples": 0, "fillers": 0, "sizes": set()}
    )
    keys = ("kind", "shape", "sequence_length", "batch_size", "loss_weight")
    for line in lines:
        for kind, shape, tokens, size, weight in zip(*(np.ravel(line[key]) for key in keys), strict=True):
            row = found[int(tokens), str(kind), str(shape)]
            row["micro_batches"] += 1
            row["samples"] += int(size) if weight else 0
            row["fillers"] += not weight
            row["sizes"].add(int(size))
    return [
        {
            "kind": kind,
            "shape": shape,
            "tokens": tokens,
            "micro_batches": row["micro_batches"],
            "samples": row["samples"],
            "fillers": row["fillers"],
            "batch_size": [min(row["sizes"]), max(row["sizes"])],
        }
        for (tokens, kind, shape), row in sorted(found.items())
    ]


def _counts(lines: list[dict]) -> dict[str, Any]:
    return {
        "steps": len(lines),
        "micro_steps": sum(len(line["batch_size"]) for line in lines),
        "ranks": len(lines[-1]["batch_size"][0]),
        "epochs": lines[-1]["epoch"] + 1,
        "samples": sum(line["samples"] for line in lines),
        "tokens": sum(line["tokens"] for line in lines),
        "fillers": sum(line["fillers"] for line in lines),
    }


def _speed(lines: list[dict]) -> dict[str, Any]:
    """Without the first step, which warms up. Waiting for data: a micro-step's longest wait among ranks."""
    warm = lines[1:] or lines
    seconds = np.array([max(line["step_ms"]) for line in warm]) / 1e3
    waited = sum(np.max(row) for line in warm for row in line["wait_ms"]) / 1e3
    return {
        "seconds": float(seconds.sum()),
        "step_seconds": float(np.median(seconds)),
        "tokens_per_second": float(sum(line["tokens"] for line in warm) / seconds.sum()),
        "samples_per_second": float(sum(line["samples"] for line in warm) / seconds.sum()),
        "waiting_for_data": float(waited / seconds.sum()),
        "peak_memory_bytes": max(max(line["peak_memory_bytes"]) for line in lines),
        "peak_reserved_bytes": max(max(line["peak_reserved_bytes"]) for line in lines),
    }


def _balance(lines: list[dict]) -> dict[str, Any]:
    warm = lines[1:] or lines
    micro_step_ms = np.array([row.max() for row in rows(warm, "measured_ms")])
    fit = fit_work(rows(warm, "batch_size"), rows(warm, "sequence_length"), micro_step_ms)
    if fit is None:
        return {"efficiency": None, "imbalance": None, "fit_error": None}
    work, error = fit
    return {"efficiency": efficiency(work), "imbalance": imbalance(work), "fit_error": error}


def _loss(lines: list[dict], run: Path) -> dict[str, Any]:
    training = [line["loss"] for line in lines if line["loss"] is not None]
    validation = [record["loss"]["all"] for record in read_validation(run)]
    return {"training_loss": _quarters(training), "validation_loss": _quarters(validation)}


def _quarters(losses: list[float]) -> list[float] | None:
    """Means of the first and of the last quarter."""
    if not losses:
        return None
    quarter = max(1, len(losses) // 4)
    return [float(np.mean(losses[:quarter])), float(np.mean(losses[-quarter:]))]
