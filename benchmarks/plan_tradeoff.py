"""Efficiency against step mix: what keeping steps like the corpus costs, as a picture.

    python benchmarks/plan_tradeoff.py MANIFEST CALIBRATION --max-tokens 166320 --out plan_tradeoff.png

How far a step is from the corpus is the total variation distance between their shares of samples by
shape: half the sum of the differences, 0 for the same mix, 1 for nothing in common. The curve of
`balanced` varies what may be paid for mixing; the sketches order fixed dual-constraint micro-batches by
cost in windows of 64 R, with and without spreading those that memory limits.
"""

import argparse
import json
from pathlib import Path
from unittest.mock import patch

import numpy as np

from al_deepspeed.calibration.file import read_calibration
from al_deepspeed.data.manifest import read_manifest
from al_deepspeed.scheduling import composition
from al_deepspeed.scheduling.constraints import Limits, binding_limits
from al_deepspeed.scheduling.layout import Plan
from al_deepspeed.scheduling.metrics import efficiency
from al_deepspeed.scheduling.plan import make_plan

PRICES = (0.0, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.12)
WINDOW = 64


def distance(plan: Plan, bucket: np.ndarray, size: np.ndarray) -> float:
    """Mean over steps of the total variation distance to the corpus, by samples."""
    slots = plan.world_size * plan.accumulation
    steps = np.arange(bucket.size) // slots
    held = np.zeros((steps[-1] + 1, plan.corpus.buckets))
    np.add.at(held, (steps, bucket.reshape(-1)), size.reshape(-1))
    corpus = plan.corpus.counts() / plan.corpus.samples
    return float(np.abs(held / held.sum(axis=1, keepdims=True) - corpus).sum(axis=1).mean() / 2)


def sketch(plan: Plan, spread: np.ndarray) -> tuple[float, float]:
    """A random deal, its micro-batches sorted by cost in windows; those of `spread` buckets evenly spaced."""
    bucket, size, cost = (grid.reshape(-1).copy() for grid in (plan.bucket, plan.samples, plan.cost))
    ranks, slots = plan.world_size, plan.world_size * plan.accumulation
    order = np.arange(len(cost))
    for start in range(0, len(cost), WINDOW * ranks):
        window = order[start : start + WINDOW * ranks]
        rest = window[~spread[bucket[window]]]
        rest = rest[np.argsort(cost[rest], kind="stable")]
        held = window[spread[bucket[window]]]
        keys = [(np.arange(len(part)) + 0.5) / max(1, len(part)) for part in (rest, held)]
        merged = np.concatenate([rest, held])[np.argsort(np.concatenate(keys), kind="stable")]
        micro_steps = merged.reshape(-1, ranks)
        shuffled = np.random.default_rng(start).permutation(len(micro_steps))
        order[start : start + WINDOW * ranks] = micro_steps[shuffled].reshape(-1)
    whole = len(order) // slots * slots
    order = order[:whole]
    return efficiency(cost[order].reshape(-1, ranks)), distance(plan, bucket[order], size[order])


def curve(corpus, cost, limits, world_size: int, accumulation: int) -> dict[str, list[tuple[float, float]]]:
    world = {"world_size": world_size, "accumulation": accumulation}
    points: dict[str, list[tuple[float, float]]] = {}

    def add(name: str, plan: Plan) -> Plan:
        point = (efficiency(plan.cost), distance(plan, plan.bucket, plan.samples))
        points.setdefault(name, []).append(point)
        return plan

    for strategy in ("equal_token", "dual_constraint"):
        chance = add(strategy, make_plan(corpus, cost, limits, strategy=strategy, **world))
    binding = np.array(binding_limits(corpus.tokens, cost, chance.limits))
    points["sketch: sorted"] = [sketch(chance, np.zeros(corpus.buckets, dtype=bool))]
    points["sketch: memory-limited spread, rest sorted"] = [sketch(chance, binding == "memory")]
    for price in PRICES:
        with patch.dict(composition.MIXING_PRICE, corpus=price):
            add("balanced, corpus", make_plan(corpus, cost, limits, **world))
    add("balanced, corpus (default)", make_plan(corpus, cost, limits, **world))
    add("balanced, free", make_plan(corpus, cost, limits, mixing="free", **world))
    return points


def draw(curves: dict[str, dict], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(curves), figsize=(5.2 * len(curves), 4.6), sharey=True, squeeze=False)
    for axis, (title, points) in zip(axes[0], curves.items(), strict=True):
        for name, pairs in points.items():
            pairs = sorted(pairs)
            style = {"marker": "o", "linestyle": "-" if len(pairs) > 1 else ""}
            if name.endswith("(default)"):
                style = {"marker": "*", "markersize": 14, "linestyle": ""}
            axis.plot(*zip(*pairs, strict=True), label=name, **style)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("efficiency (predicted)")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("distance of a step from the corpus's mix")
    axes[0, 0].set_ylim(0, 1)
    axes[0, 0].legend(fontsize=7, loc="upper left")
    figure.tight_layout()
    figure.savefig(out, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("manifest", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--out", type=Path, default=Path("plan_tradeoff.png"))
    arguments = parser.parse_args()
    corpus = read_manifest(arguments.manifest).corpus()
    calibration = read_calibration(arguments.calibration)
    limits = Limits(arguments.max_tokens, calibration.max_cost)
    curves = {
        f"R = {ranks}, G = {group}": curve(corpus, calibration.cost, limits, ranks, group)
        for ranks, group in ((16, 1), (16, 4), (256, 4))
    }
    draw(curves, arguments.out)
    print(json.dumps(curves, indent=1))


if __name__ == "__main__":
    main()
