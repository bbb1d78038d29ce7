"""A picture of runs: B and S of the micro-steps, and the predicted cost of each rank beside the clock."""

from pathlib import Path
from typing import Any

import numpy as np

from al_deepspeed.pictures import save_picture
from al_deepspeed.run_figures import read_run, rows

SHOWN = 120  # micro-steps; the last ones of a run
RANKS_AS_LINES = 8
ROOM_FOR_LEGEND = 1.12


def plot(runs: list[Path], out: Path) -> None:
    """Writes a PNG, SVG or PDF with a row of panels for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(runs), 2, figsize=(12, 3.2 * len(runs)), squeeze=False)
    for run, (left, right) in zip(runs, panels, strict=True):
        lines = read_run(run)
        _batches(left, lines)
        _costs(right, lines)
        left.set_title(f"{run.name}: micro-batches", loc="left", fontsize=10)
        right.set_title(f"{run.name}: cost of each rank, and measured time", loc="left", fontsize=10)
    for panel in panels[-1]:
        panel.set_xlabel("micro-step")
    figure.tight_layout()
    save_picture(figure, out, dpi=110)


def _batches(panel: Any, lines: list[dict]) -> None:
    """S up, micro-steps across, a dot a micro-batch, its area the batch size."""
    tokens, sizes = (rows(lines, key)[-SHOWN:] for key in ("sequence_length", "batch_size"))
    first = len(rows(lines, "batch_size")) - len(tokens)
    for index, (lengths, counts) in enumerate(zip(tokens, sizes, strict=True)):
        panel.scatter(
            np.full(len(lengths), first + index),
            lengths,
            s=10 + 8 * counts,
            c=np.arange(len(lengths)),
            cmap="tab10",
            vmin=0,
            vmax=9,
            alpha=0.6,
            linewidths=0,
        )
    panel.set_yscale("log")
    panel.set_ylabel("S (area of a dot: B)")


def _costs(panel: Any, lines: list[dict]) -> None:
    """A line a rank, or the range over ranks where there are many; the clock's time on its own axis."""
    cost = rows(lines, "predicted_cost")[-SHOWN:]
    measured = [row.max() for row in rows(lines, "measured_ms")[-SHOWN:]]
    across = len(rows(lines, "batch_size")) - len(cost) + np.arange(len(cost))
    ranks = max(len(row) for row in cost)
    if ranks <= RANKS_AS_LINES:
        for rank in range(ranks):
            values = [row[rank] if rank < len(row) else np.nan for row in cost]
            panel.plot(across, values, ".-", color=f"C{rank}", linewidth=0.8, label=f"rank {rank}")
    else:
        low, high = ([fold(row) for row in cost] for fold in (np.min, np.max))
        panel.fill_between(across, low, high, step="mid", alpha=0.4, label=f"{ranks} ranks, predicted")
    panel.set_ylabel("predicted cost")
    clock = panel.twinx()
    clock.plot(across, measured, color="black", linewidth=0.8, alpha=0.6, label="measured time")
    clock.set_ylabel("measured ms")
    for axes in (panel, clock):
        axes.set_ylim(0, ROOM_FOR_LEGEND * axes.get_ylim()[1])
    handles = [*panel.get_legend_handles_labels()[0], *clock.get_legend_handles_labels()[0]]
    panel.legend(handles=handles, fontsize=7, loc="upper left", ncols=3)
