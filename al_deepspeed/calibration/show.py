"""A calibration on the terminal and as a picture: points, curves, residuals, held-out errors."""

from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table

from al_deepspeed.calibration.assemble import budget_warnings
from al_deepspeed.calibration.file import Calibration
from al_deepspeed.calibration.points import MEASURED, columns
from al_deepspeed.pictures import save_picture
from al_deepspeed.scheduling.constraints import Limits, batch_sizes, binding_limits
from al_deepspeed.scheduling.cost import cost_to_dict
from al_deepspeed.scheduling.shapes import Corpus

CURVES_AT_MOST = 6  # batch sizes drawn as curves; more are hard to tell apart
TABLE_WIDTH = 120


def terminal() -> Console:
    """Standard output; wide enough for every table where it goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=TABLE_WIDTH)


def print_calibration(calibration: Calibration, console: Console, corpus: Corpus | None = None) -> None:
    """Fits, points and limits; with the corpus that M_comp was chosen for, its batch sizes and warnings."""
    console.print(Group(fit_table(calibration), point_table(calibration), limit_table(calibration)))
    if corpus is None:
        return
    console.print(Group(curve_table(calibration), corpus_table(calibration, corpus)))
    for warning in budget_warnings(calibration, corpus):
        console.print(f"warning: {warning}", style="yellow", highlight=False)


def fit_table(calibration: Calibration) -> RenderableType:
    """Held-out relative errors of every variant, the chosen one marked."""
    table = Table(title="fits, by leave-one-out relative error", title_justify="left")
    for name in ("", "fit", "median", "90th", "median > 60 ms", "90th > 60 ms"):
        table.add_column(name, justify="left" if name in ("", "fit") else "right")
    chosen = cost_to_dict(calibration.cost)
    for fit in calibration.fits:
        errors = (
            fit[key]
            for key in ("median_error", "p90_error", "median_error_above_60_ms", "p90_error_above_60_ms")
        )
        mark = "*" if fit["cost"] == chosen else ""
        table.add_row(mark, fit["name"], *("-" if error is None else f"{error:.2%}" for error in errors))
    return table


def point_table(calibration: Calibration) -> RenderableType:
    """Each point beside its prediction."""
    table = Table(title="points", title_justify="left")
    for name in ("B", "S", "ms", "predicted ms", "off", "peak GB", "predicted GB", "rank spread"):
        table.add_column(name, justify="right")
    for point in sorted(calibration.points, key=lambda point: (point.tokens, point.batch_size)):
        predicted = float(calibration.cost.cost(point.batch_size, point.tokens))
        gb = calibration.memory and float(calibration.memory.peak_gb(point.batch_size, point.tokens))
        measured = point.status == MEASURED
        table.add_row(
            str(point.batch_size),
            str(point.tokens),
            f"{point.ms:.2f}" if measured else point.status,
            f"{predicted:.2f}",
            f"{predicted / point.ms - 1:+.1%}" if measured else "-",
            "-" if point.peak_gb is None else f"{point.peak_gb:.2f}",
            "-" if gb is None else f"{gb:.2f}",
            f"{point.spread:.1%}" if len(point.rank_ms) > 1 else "-",
        )
    return table


def limit_table(calibration: Calibration) -> RenderableType:
    """The two limits, the paper's form of the second, and the spread between ranks."""
    table = Table(title="limits", title_justify="left", show_header=False)
    unknown = "unknown: the scan has no device capacity, choose it yourself"
    table.add_row("M_mem (max_tokens)", f"{calibration.max_tokens or unknown}")
    unchosen = "to be chosen for a corpus: --manifest and --world-size here, or by the planner itself"
    world = f"for R = {calibration.world_size}, G = {calibration.accumulation or 1}"
    chosen = calibration.max_cost and f"{calibration.max_cost:.6g} ms, {world}"
    table.add_row("M_comp (max_cost)", chosen or unchosen)
    table.add_row(
        "paper's rule B*S^p <= M_comp",
        f"p = {calibration.exponent:.3f}, M_comp = {calibration.paper_max_cost:.4g}",
    )
    if calibration.step_ms is not None:
        table.add_row("a step beside its micro-batches", f"{calibration.step_ms:.1f} ms")
    if calibration.memory:
        held_out = np.median(calibration.memory.held_out)
        table.add_row("peak memory, held-out median error", f"{held_out:.2%}")
    if calibration.spread is not None:
        table.add_row("rank-to-rank spread", f"{calibration.spread:.1%}: balancing cannot win this back")
    return table


def corpus_table(calibration: Calibration, corpus: Corpus) -> RenderableType:
    """B of each shape under the two limits, and which of them binds."""
    limits = Limits(calibration.max_tokens, calibration.max_cost)
    sizes = batch_sizes(corpus.tokens, calibration.cost, limits)
    binding = binding_limits(corpus.tokens, calibration.cost, limits)
    table = Table(title="batch sizes", title_justify="left")
    for name in ("shape", "S", "samples", "B", "ms", "binding limit"):
        table.add_column(name, justify="left" if name in ("shape", "binding limit") else "right")
    costs = calibration.cost.cost(sizes, corpus.tokens)
    for bucket, samples in enumerate(corpus.counts()):
        figures = (str(corpus.tokens[bucket]), str(samples), str(sizes[bucket]), f"{costs[bucket]:.1f}")
        table.add_row(corpus.bucket_name(bucket), *figures, binding[bucket])
    return table


def curve_table(calibration: Calibration, rows: int = 12) -> RenderableType:
    """Predicted tokens a second against the budget, thinned, the chosen row kept and marked."""
    table = Table(title="M_comp, by predicted tokens/s under dual_constraint", title_justify="left")
    for name in ("", "max_cost, ms", "tokens/s"):
        table.add_column(name, justify="right")
    curve = calibration.curve
    chosen = sum(cost <= calibration.max_cost for cost, _ in curve[1:])
    places = {chosen, *np.linspace(0, len(curve) - 1, min(rows, len(curve))).round().astype(int).tolist()}
    for place in sorted(places):
        cost, rate = curve[place]
        table.add_row("*" if place == chosen else "", f"{cost:.1f}", f"{rate:,.0f}")
    return table


def draw(calibration: Calibration, path: Path) -> None:
    """A PNG: step time and memory with fitted curves and residuals, and what M_comp was chosen from."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = columns(calibration.points)
    panels = [_draw_time]
    if np.isfinite([data.peak_gb, data.reserved_gb]).any():
        panels.append(_draw_memory)
    wide = len(panels) + bool(calibration.curve)
    figure = pyplot.figure(figsize=(5.5 * wide, 7))
    grid = figure.add_gridspec(2, wide, height_ratios=(2, 1))
    for column, draw_points in enumerate(panels):
        upper = figure.add_subplot(grid[0, column])
        draw_points((upper, figure.add_subplot(grid[1, column], sharex=upper)), calibration, data)
    if calibration.curve:
        _draw_curve(figure.add_subplot(grid[:, -1]), calibration)
    figure.tight_layout()
    save_picture(figure, path)


def _draw_curve(axes, calibration: Calibration) -> None:
    costs, rates = zip(*calibration.curve, strict=True)
    axes.plot(costs, rates, lw=1.2, label="predicted")
    chosen = np.interp(calibration.max_cost, costs, rates)
    axes.plot(
        [calibration.max_cost],
        [chosen],
        "o",
        ms=6,
        color="C3",
        label=f"M_comp = {calibration.max_cost:.4g} ms",
    )
    axes.axhline(rates[-1], color="grey", lw=0.8, ls="--", label="no budget: M_mem alone")
    axes.set(
        xlabel="budget of a micro-batch, ms",
        ylabel=f"tokens/s under dual_constraint, R = {calibration.world_size}",
        xlim=(0, 1.05 * max(costs)),
        ylim=(0, 1.08 * max(rates)),
    )
    axes.legend(fontsize=8, loc="lower right")


def _draw_time(axes, calibration: Calibration, data) -> None:
    upper, lower = axes
    sizes = np.unique(data.batch_size)
    drawn = sizes[np.unique(np.linspace(0, len(sizes) - 1, CURVES_AT_MOST).round().astype(int))]
    for batch_size in sizes:
        rows = data.batch_size == batch_size
        (line,) = upper.plot(data.tokens[rows], data.ms[rows], "o", ms=5, label=f"B = {int(batch_size)}")
        residual = calibration.cost.cost(data.batch_size[rows], data.tokens[rows]) / data.ms[rows] - 1
        lower.plot(data.tokens[rows], 100 * residual, "o", ms=5, color=line.get_color())
        if batch_size in drawn:
            tokens = np.geomspace(data.tokens[rows].min() / 1.3, data.tokens[rows].max() * 1.3, 120)
            upper.plot(tokens, calibration.cost.cost(batch_size, tokens), color=line.get_color(), lw=1)
    upper.set(xscale="log", yscale="log", ylabel="ms a micro-batch, measured (dots) and fitted")
    upper.legend(fontsize=8)
    lower.axhline(0, color="grey", lw=0.8)
    lower.set(xlabel="tokens S", ylabel="fit - measured, %")


def _draw_memory(axes, calibration: Calibration, data) -> None:
    upper, lower = axes
    load, known = data.batch_size * data.tokens, np.isfinite(data.peak_gb)
    upper.plot(load[known], data.peak_gb[known], "o", ms=5, label="allocated")
    held = np.isfinite(data.reserved_gb)
    if held.any():
        upper.plot(load[held], data.reserved_gb[held], "x", ms=5, label="reserved by the allocator")
    if calibration.memory:
        loads = np.geomspace(load.min(), load.max(), 120)
        upper.plot(loads, calibration.memory.peak_gb(1, loads), color="grey", lw=1, label="fit at B = 1")
        residual = calibration.memory.peak_gb(data.batch_size, data.tokens)[known] / data.peak_gb[known] - 1
        lower.plot(load[known], 100 * residual, "o", ms=5)
    upper.set(xscale="log", yscale="log", ylabel="peak GB")
    upper.legend(fontsize=8)
    lower.axhline(0, color="grey", lw=0.8)
    lower.set(xlabel="B * S", ylabel="fit - measured, %")
