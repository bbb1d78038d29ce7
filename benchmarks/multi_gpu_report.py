"""What the comparison of multi_gpu.sh measured, beside what its calibration predicted: JSON and a picture.

    python benchmarks/multi_gpu_report.py WORK OUT

WORK holds calibration_{eager,fused}.json and {eager,fused}/STRATEGY/telemetry.jsonl. Each figure comes from
the telemetry without a run's first step; `predicted` sums the calibrated cost of the slowest rank over the
same micro-steps and adds the optimizer steps as measured, which no plan bears on.

A process that meets a pair of B and shape for the first time may lose a tenth of a second or two. All runs
share one process a rank, so the errors of prediction are also given for the micro-steps without such a first
time, and `new_pairs` says how far the others went beyond their prediction.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from al_deepspeed.calibration.file import read_calibration
from al_deepspeed.data.files import write_whole
from al_deepspeed.pictures import save_picture
from al_deepspeed.run_figures import efficiency, fit_work, imbalance, read_run, rows
from al_deepspeed.scheduling.cost import CostModel

OPS = ("eager", "fused")
STRATEGIES = ("equal_token", "dual_constraint", "balanced")


def figures(run: Path, cost: CostModel, known: list[set]) -> dict[str, Any]:
    """One run: measured, predicted, and how well its micro-steps were predicted.

    known: a set a rank, of the pairs (B, shape) that it has run; receives this run's.
    """
    first, *lines = read_run(run)
    first_times([first], known)
    sizes, tokens = rows(lines, "batch_size"), rows(lines, "sequence_length")
    clock = np.array([row.max() for row in rows(lines, "measured_ms")])
    work = [cost.cost(b, s) for b, s in zip(sizes, tokens, strict=True)]
    slowest = np.array([row.max() for row in work])
    step_s = np.array([max(line["step_ms"]) for line in lines]) / 1e3
    optimizer_s = np.array([max(line["optimizer_ms"]) for line in lines]) / 1e3
    trained = sum(line["tokens"] for line in lines)
    fitted = fit_work(sizes, tokens, clock)
    new = first_times(lines, known)
    return {
        "micro_steps": len(clock),
        "samples": sum(line["samples"] for line in lines),
        "tokens": trained,
        "measured": {
            "tokens_per_s": trained / step_s.sum(),
            "step_s": _spread(step_s),
            "efficiency": fitted and efficiency(fitted[0]),
            "imbalance": fitted and imbalance(fitted[0]),
            "fit_error": fitted and fitted[1],
            "optimizer_s": float(np.median(optimizer_s)),
            "waiting_for_data_s": float(sum(np.max(row) for row in rows(lines, "wait_ms")) / 1e3),
            "peak_gb": [
                float(x) / 1e9 for x in np.max([line["peak_memory_bytes"] for line in lines], axis=0)
            ],
            "reserved_gb": [
                float(x) / 1e9 for x in np.max([line["peak_reserved_bytes"] for line in lines], axis=0)
            ],
        },
        "predicted": {
            "tokens_per_s": trained / (slowest.sum() / 1e3 + optimizer_s.sum()),
            "efficiency": efficiency(work),
            "imbalance": imbalance(work),
        },
        "prediction_error": _errors(slowest, clock, sizes, tokens),
        "prediction_error_known_pairs": _errors(slowest, clock, sizes, tokens, where=~new),
        "new_pairs": {
            "micro_steps": int(new.sum()),
            "beyond_prediction_s": float((clock - slowest)[new].sum() / 1e3),
        },
    }


def first_times(lines: list[dict], known: list[set]) -> np.ndarray:
    """Micro-steps in which some rank runs a pair (B, shape) that it has never run."""
    new = []
    for line in lines:
        for sizes, shapes in zip(line["batch_size"], line["shape"], strict=True):
            known.extend(set() for _ in range(len(sizes) - len(known)))
            pairs = list(zip(known, zip(sizes, shapes, strict=True), strict=True))
            new.append(any(pair not in mine for mine, pair in pairs))
            for mine, pair in pairs:
                mine.add(pair)
    return np.array(new)


def _errors(
    slowest: np.ndarray, clock: np.ndarray, sizes: list, tokens: list, where: np.ndarray | None = None
) -> dict[str, Any] | None:
    """Of the prediction, over the chosen micro-steps."""
    chosen = np.arange(len(clock)) if where is None else np.flatnonzero(where)
    if not len(chosen):
        return None
    error = slowest / clock - 1
    worst = chosen[np.abs(error[chosen]).argmax()]
    return {
        "micro_steps": len(chosen),
        "median": float(np.median(np.abs(error[chosen]))),
        "percentile_90": float(np.percentile(np.abs(error[chosen]), 90)),
        "largest": {
            "error": float(error[worst]),
            "measured_ms": float(clock[worst]),
            "predicted_ms": float(slowest[worst]),
            "batch_size": sizes[worst].astype(int).tolist(),
            "sequence_length": tokens[worst].astype(int).tolist(),
        },
    }


def _spread(seconds: np.ndarray) -> dict[str, float]:
    quarter, median, three_quarters = np.percentile(seconds, (25, 50, 75))
    return {
        "median": median,
        "quartiles": [quarter, three_quarters],
        "longest": float(seconds.max()),
        "cv": float(seconds.std() / seconds.mean()),
    }


def compare(work: Path) -> dict[str, Any]:
    """All runs that WORK holds, and the gain of each over equal_token with the eager op."""
    runs, known = {}, []
    for op in OPS:
        calibration = work / f"calibration_{op}.json"
        for strategy in STRATEGIES:
            if calibration.is_file() and (work / op / strategy).is_dir():
                runs[f"{strategy} + {op}"] = figures(
                    work / op / strategy, read_calibration(calibration).cost, known
                )
    baseline = runs[f"{STRATEGIES[0]} + {OPS[0]}"]
    for run in runs.values():
        for kind in ("measured", "predicted"):
            run[kind]["gain"] = run[kind]["tokens_per_s"] / baseline[kind]["tokens_per_s"]
    calibration = read_calibration(work / f"calibration_{OPS[0]}.json")
    setting = {key: getattr(calibration.setting, key) for key in ("device", "ranks", "torch", "zero_stage")}
    best = min(calibration.fits, key=lambda fit: fit["median_error"])
    return {**setting, "max_tokens": calibration.max_tokens, "fit": best, "runs": runs}


def draw(result: dict[str, Any], work: Path, out: Path) -> None:
    """Tokens/s measured and predicted; and every micro-step's time against its prediction."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bars, dots) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    names = list(result["runs"])
    place = np.arange(len(names))
    for offset, kind in ((-0.2, "measured"), (0.2, "predicted")):
        speeds = [result["runs"][name][kind]["tokens_per_s"] for name in names]
        drawn = bars.bar(place + offset, speeds, 0.4, label=kind)
        gains = [f"{result['runs'][name][kind]['gain']:.2f}x" for name in names]
        bars.bar_label(drawn, gains, fontsize=8)
    bars.set_xticks(place, [name.replace(" + ", "\n") for name in names], fontsize=8)
    bars.set_ylabel("tokens/s, all ranks")
    bars.legend(fontsize=8)
    for name in names:
        strategy, op = name.split(" + ")
        lines = read_run(work / op / strategy)[1:]
        cost = read_calibration(work / f"calibration_{op}.json").cost
        pairs = zip(rows(lines, "batch_size"), rows(lines, "sequence_length"), strict=True)
        predicted = [cost.cost(*pair).max() for pair in pairs]
        clock = [row.max() for row in rows(lines, "measured_ms")]
        dots.scatter(predicted, clock, s=12, alpha=0.7, label=name)
    ends = [min(dots.get_xlim()[0], dots.get_ylim()[0]), max(dots.get_xlim()[1], dots.get_ylim()[1])]
    dots.axline((ends[1], ends[1]), slope=1, color="grey", linewidth=0.8)
    dots.set_xlabel("predicted ms of a micro-step's slowest rank")
    dots.set_ylabel("measured ms")
    dots.legend(fontsize=8)
    figure.suptitle(f"{result['ranks']} ranks, {result['device']}, ZeRO-{result['zero_stage']}", fontsize=10)
    figure.tight_layout()
    save_picture(figure, out)


def main() -> None:
    work, out = (Path(word) for word in sys.argv[1:])
    result = compare(work)
    write_whole(out / "multi_gpu.json", json.dumps(result, indent=1) + "\n")
    draw(result, work, out / "multi_gpu.png")
    for name, run in result["runs"].items():
        measured, predicted = run["measured"], run["predicted"]
        print(
            f"{name:26} {measured['tokens_per_s']:10,.0f} tokens/s, {measured['gain']:.3f}x (predicted "
            f"{predicted['gain']:.3f}x), efficiency {measured['efficiency'] or float('nan'):.3f} (predicted "
            f"{predicted['efficiency']:.3f}), peak {max(measured['peak_gb']):.1f} GB"
        )


if __name__ == "__main__":
    main()
