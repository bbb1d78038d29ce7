"""Reads a result of benchmark.py: the tables a person wants, and the roofline picture."""

from pathlib import Path

from al_deepspeed.pictures import save_picture

KEYS = ("op", "modulation", "rows", "features", "direction")


def by_shape(result: dict) -> dict[tuple, dict[str, dict]]:
    """(op, modulation, rows, features, direction) -> implementation -> measurement."""
    shapes: dict[tuple, dict[str, dict]] = {}
    for row in result["results"]:
        shapes.setdefault(tuple(row[key] for key in KEYS), {})[row["implementation"]] = row
    return shapes


def print_tables(result: dict, console) -> None:
    """Time and fraction of the copy limit, speed-ups, memory and host time on a rich console."""
    from rich.table import Table

    console.print(
        f"{result['device']}, PyTorch {result['torch']}: copy {result['copy_tb_per_s']:.2f} TB/s, "
        f"empty launch {result['empty_launch_us']:.1f} us, kernels in {result['build_or_load_s']:.0f} s"
    )
    shapes = by_shape(result)
    names = list(dict.fromkeys(row["implementation"] for row in result["results"]))
    table = Table("op", "modulation", "rows", "D", "direction", *names, "over compile", "over eager wan")
    for key, found in shapes.items():
        cells = [
            f"{found[name]['us']:.0f} us {found[name]['fraction_of_copy']:.2f}" if name in found else "-"
            for name in names
        ]
        ours = found.get("fused one_pass")
        ratios = [
            f"{found[peer]['us'] / ours['us']:.2f}x" if ours and peer in found else "-"
            for peer in ("torch.compile", "eager wan")
        ]
        table.add_row(*map(str, key), *cells, *ratios)
    console.print(table)
    table = Table("op", "rows", "D", "implementation", "saved, bytes a row", "peak, MB")
    for row in result["memory"]:
        saved, peak = f"{row['saved_bytes_per_row']:.0f}", f"{row['peak_bytes'] / 1e6:.0f}"
        table.add_row(row["op"], str(row["rows"]), str(row["features"]), row["implementation"], saved, peak)
    console.print(table)
    for name, times in result["host"].items():
        console.print(
            f"host time, {name}: forward {times['forward']:.1f} us, backward {times['backward']:.1f} us"
        )
    for row in result["skipped"]:
        console.print(f"skipped: {row}")


def plot_roofline(result: dict, path: Path) -> None:
    """Rate of the fewest bytes against their amount, under two roofs: the copy rate and one launch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np
    from matplotlib.ticker import LogLocator, NullFormatter

    names = list(dict.fromkeys(row["implementation"] for row in result["results"]))
    colours = dict(zip(names, plt.get_cmap("tab10").colors, strict=False))
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for panel, direction in zip(panels, ("forward", "backward"), strict=True):
        rows = [row for row in result["results"] if row["direction"] == direction]
        amounts = np.geomspace(
            0.7 * min(r["fewest_bytes"] for r in rows), 1.4 * max(r["fewest_bytes"] for r in rows)
        )
        copy = result["copy_tb_per_s"] * 1e6  # bytes a microsecond
        panel.axhline(copy / 1e6, color="black", label="copy")
        launch = amounts / (result["empty_launch_us"] + amounts / copy) / 1e6
        panel.plot(amounts / 1e6, launch, color="black", linestyle=":", label="copy + empty launch")
        for name in names:
            points = [
                (r["fewest_bytes"] / 1e6, r["fewest_bytes"] / r["us"] / 1e6)
                for r in rows
                if r["implementation"] == name
            ]
            if points:
                panel.scatter(*zip(*points, strict=True), s=18, color=colours[name], label=name)
        panel.set(xscale="log", yscale="log", title=direction, xlabel="fewest bytes of the call, MB")
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("fewest bytes / time, TB/s")
    panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0].yaxis.set_major_formatter("{x:g}")
    panels[0].yaxis.set_minor_formatter(NullFormatter())
    figure.legend(
        *panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small"
    )
    figure.suptitle(f"AdaLN on {result['device']}: bf16 x, fp32 modulation")
    save_picture(figure, path)
