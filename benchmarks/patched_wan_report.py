"""What patched_wan.py measured: a table, a picture, a summary in OUT/patched_wan.json, and a verdict.

    python benchmarks/patched_wan_report.py OUT

Exit code 1 when the patched curve lies further from the unpatched one than twice the noise, when nothing was
rewritten or learned, or when a figure is missing. A case that does not fit the device's memory is a result.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from al_deepspeed.data.files import write_whole
from al_deepspeed.pictures import save_picture

UNPATCHED, NOISE, PATCHED = "unpatched", "other attention", "patched"
MOST_NOISE = 2.0  # a second run of equal code may drift twice as far as the first by chance
LEARNED = 0.9  # the last tenth of the losses over the first tenth, at most


def curve_figures(record: dict[str, Any]) -> dict[str, Any]:
    """Distances of the curves from the unpatched one, and how far that one fell."""
    curves = {name: np.array(losses) for name, losses in record["curves"].items() if losses}
    tenth = max(1, record["steps"] // 10)
    figures: dict[str, Any] = {"steps": {name: len(losses) for name, losses in curves.items()}}
    for name, losses in curves.items():
        figures[f"first and last tenth, {name}"] = [losses[:tenth].mean(), losses[-tenth:].mean()]
    for name in (NOISE, PATCHED):
        if {name, UNPATCHED} <= set(curves):
            away = difference(curves, name)
            figures[name] = {
                "rms": float(np.sqrt((away**2).mean())),
                "max": float(np.abs(away).max()),
                "relative_rms": float(np.sqrt((away**2).mean()) / curves[UNPATCHED].mean()),
                "mean": float(away.mean()),
            }
    return figures


def difference(curves: dict[str, Any], name: str) -> np.ndarray:
    steps = min(len(curves[name]), len(curves[UNPATCHED]))
    return np.array(curves[name][:steps]) - np.array(curves[UNPATCHED][:steps])


def case_figures(case: dict[str, Any]) -> dict[str, Any]:
    """Median and quartiles of the times; memory above what weights and optimizer hold."""
    figures: dict[str, Any] = {key: case[key] for key in ("tokens", "checkpointing", "layers")}
    for version, measured in case["versions"].items():
        figures[version] = {"status": measured.get("status", "cut off")}
        if not measured["forward_backward_ms"]:
            continue
        figures[version] |= {
            "micro_steps": len(measured["forward_backward_ms"]),
            "forward_backward_ms": np.percentile(measured["forward_backward_ms"], (50, 25, 75)).tolist(),
            "optimizer_ms": np.percentile(measured["optimizer_ms"], (50, 25, 75)).tolist(),
            "held_gb": measured["held_gb"],
            "peak_above_gb": measured["peak_gb"] - measured["held_gb"],
            "reserved_above_gb": measured["reserved_gb"] - measured["held_gb"],
        }
    before, after = figures[UNPATCHED], figures[PATCHED]
    if "micro_steps" in before and "micro_steps" in after:
        figures["time_ratio"] = after["forward_backward_ms"][0] / before["forward_backward_ms"][0]
        figures["memory_ratio"] = ratio(after["peak_above_gb"], before["peak_above_gb"])
    return figures


def ratio(after: float, before: float) -> float | None:
    """None where nothing can be told, as on CPUs, which count resident pages."""
    return after / before if before > 0 else None


def failures(record: dict[str, Any], curves: dict[str, Any], cases: list[dict[str, Any]]) -> list[str]:
    """What keeps the comparison from holding; empty when it does."""
    found = []
    for name in (UNPATCHED, NOISE, PATCHED):
        done = curves["steps"].get(name, 0)
        if done < record["steps"]:
            found.append(f"the {name} curve has {done} of {record['steps']} steps")
        elif not np.isfinite(record["curves"][name]).all():
            found.append(f"the {name} curve is not finite")
        else:
            first, last = curves[f"first and last tenth, {name}"]
            if last > LEARNED * first:
                found.append(f"the {name} run learned nothing: {first:.3f} became {last:.3f}")
    for measure in ("rms", "max"):
        patched, noise = (curves.get(name, {}).get(measure, np.nan) for name in (PATCHED, NOISE))
        if not noise > 0:
            found.append(f"there is no noise to compare with: {measure} {noise}")
        elif not patched <= MOST_NOISE * noise:
            found.append(f"the patched curve is {patched:.2e} away ({measure}), noise alone {noise:.2e}")
    if not sum(map(len, record.get("sites", {}).values())):
        found.append("no site was rewritten")
    calls = record.get("op_calls_a_forward", {})
    if not (calls.get(PATCHED, 0) > 0 and calls.get(UNPATCHED) == 0):
        found.append(f"calls of the op in a forward pass are {calls}")
    if len(cases) < record["planned_cases"]:
        found.append(f"{len(cases)} of {record['planned_cases']} cases were begun")
    for case in cases:
        for version in (UNPATCHED, PATCHED):
            if case[version]["status"] not in ("measured", "out of memory"):
                found.append(f"{title(case)}, {version}: {case[version]['status']}")
    return found


def title(case: dict[str, Any]) -> str:
    kind = "checkpointing" if case["checkpointing"] else "no checkpointing"
    return f"S = {case['tokens']:,}, {kind}, {case['layers']} layers"


def table(record: dict[str, Any], curves: dict[str, Any], cases: list[dict[str, Any]]) -> list[str]:
    """For the terminal."""
    versions = (f"{name} {record[name]}" for name in ("torch", "deepspeed", "diffusers"))
    lines = [f"{record['device']}, {', '.join(versions)}"]
    for name, sites in record.get("sites", {}).items():
        lines.append(f"rewritten in memory, {len(sites)} in {name}: {'; '.join(sites)}")
    lines.append(f"calls of the op in one forward pass: {record.get('op_calls_a_forward')}")
    for name, steps in curves["steps"].items():
        first, last = curves[f"first and last tenth, {name}"]
        away = curves.get(name)
        told = f"; from unpatched: rms {away['rms']:.2e}, max {away['max']:.2e}" if away else ""
        lines.append(f"loss, {name}: {first:.4f} -> {last:.4f} in {steps} steps{told}")
    for case in cases:
        lines.append(title(case))
        for version in (UNPATCHED, PATCHED):
            lines.append(f"  {version:10} {_row(case[version])}")
        if "time_ratio" in case:
            memory = case["memory_ratio"]
            lines.append(
                f"  patched/unpatched: forward + backward {case['time_ratio']:.3f}"
                + (f", peak memory {memory:.3f}" if memory else "")
            )
    return lines


def _row(one: dict[str, Any]) -> str:
    if "micro_steps" not in one:
        return one["status"]
    median, low, high = one["forward_backward_ms"]
    return (
        f"forward + backward {median:8.1f} ms ({low:.1f} to {high:.1f}, n = {one['micro_steps']}), optimizer "
        f"{one['optimizer_ms'][0]:6.1f} ms, above the {one['held_gb']:.1f} GB held: peak "
        f"{one['peak_above_gb']:6.2f} GB, reserved {one['reserved_above_gb']:6.2f} GB"
    )


def draw(record: dict[str, Any], cases: list[dict[str, Any]], out: Path) -> None:
    """The curves, their distances, and time and memory as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((losses, away), (times, memory)) = pyplot.subplots(2, 2, figsize=(12, 8))
    curves = record["curves"]
    for name, style in {UNPATCHED: "C0-", NOISE: "C2--", PATCHED: "C1:"}.items():
        values = curves.get(name, [])
        losses.plot(np.arange(1, 1 + len(values)), values, style, label=name)
        if name != UNPATCHED and values:
            apart = np.abs(difference(curves, name))
            away.plot(np.arange(1, 1 + len(apart)), apart, style[:2], label=f"|{name} - {UNPATCHED}|")
    away.set_yscale("log")
    for axes, label in ((losses, "loss"), (away, "distance of the losses")):
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.legend(fontsize=8)
    place = np.arange(len(cases))
    names = [title(case).replace(", ", "\n") for case in cases]
    for offset, version in ((-0.2, UNPATCHED), (0.2, PATCHED)):
        for axes, key in ((times, "forward_backward_ms"), (memory, "peak_above_gb")):
            heights = [np.atleast_1d(case[version].get(key, np.nan))[0] for case in cases]
            bars = axes.bar(place + offset, heights, 0.4, label=version)
            labels = [
                case[version]["status"] if np.isnan(h) else f"{h:.4g}"
                for case, h in zip(cases, heights, strict=True)
            ]
            axes.bar_label(bars, labels, fontsize=7)
    for axes, label in ((times, "forward + backward, ms"), (memory, "peak above weights and optimizer, GB")):
        axes.set_xticks(place, names, fontsize=7)
        axes.set_ylabel(label)
        axes.legend(fontsize=8)
    figure.suptitle(
        f"Wan {record['size']} of diffusers {record['diffusers']}, {record['device']}", fontsize=10
    )
    figure.tight_layout()
    save_picture(figure, out)


def main() -> None:
    out = Path(sys.argv[1])
    file = out / "patched_wan.json"
    if not file.is_file():
        sys.exit(f"{file} is missing: the run ended before its first curve; see its log.")
    record = json.loads(file.read_text(encoding="utf-8"))
    curves = curve_figures(record)
    cases = [case_figures(case) for case in record["cases"]]
    found = failures(record, curves, cases)
    record["summary"] = {"curves": curves, "cases": cases, "failures": found}
    write_whole(file, json.dumps(record, indent=1) + "\n")
    print("\n".join(table(record, curves, cases)))
    draw(record, cases, out / "patched_wan.png")
    print("\n".join(f"FAILED: {line}" for line in found) if found else "all within the limits")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
