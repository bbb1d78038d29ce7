"""Pictures of plans."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from al_deepspeed.pictures import save_picture
from al_deepspeed.scheduling.layout import Plan
from al_deepspeed.scheduling.metrics import efficiency

MICRO_STEPS_SHOWN = 96


def plot_costs(plans: Mapping[str, Plan], path: Path) -> None:
    """Cost of every rank over the first micro-steps, a panel a plan: what is below the line is waiting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        len(plans), 1, figsize=(10, 0.6 + 2.2 * len(plans)), sharex=True, sharey=True, squeeze=False
    )
    for axis, (name, plan) in zip(axes[:, 0], plans.items(), strict=True):
        cost = plan.cost[:MICRO_STEPS_SHOWN]
        micro_step = np.arange(len(cost))
        mean, slowest = cost.mean(axis=1), cost.max(axis=1)
        axis.fill_between(micro_step, mean, slowest, step="mid", alpha=0.25, label="waiting (mean rank)")
        axis.step(micro_step, slowest, where="mid", linewidth=1, label="slowest rank")
        axis.plot(micro_step, cost, ".", color="black", markersize=1.5, alpha=0.5)
        axis.set_title(f"{name}: efficiency {efficiency(plan.cost):.3f} (predicted)", loc="left", fontsize=10)
        axis.set_ylabel("cost of a rank")
        axis.set_ylim(bottom=0)
    axes[0, 0].legend(loc="lower right", fontsize=8)
    axes[-1, 0].set_xlabel("micro-step; a dot is a rank")
    figure.tight_layout()
    save_picture(figure, path)
