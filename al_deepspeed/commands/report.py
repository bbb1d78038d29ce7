"""`al-deepspeed report`: what a run did, or several runs side by side; measured and predicted told apart."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def run(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders that hold telemetry.jsonl.")],
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Picture: .png, .svg or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Print what runs did: speed, balance, batches a shape, memory, losses."""
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to standard output from its import on
        from al_deepspeed.run_figures import figures

        results = [figures(folder) for folder in runs]
    if plot is not None:
        from al_deepspeed.run_plot import plot as draw

        draw(runs, plot)
    if as_json:
        print(json.dumps({"runs": results}))
        return
    _print(results)
    if plot is not None:
        print(f"Picture: {plot}")


def _share(value: float | None) -> str:
    return "too few shapes" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "too few shapes" if value is None else f"{value:.3f}"


def _gigabytes(value: int) -> str:
    return f"{value / 1e9:.2f} GB"


def _two_losses(value: list[float] | None) -> str:
    if value is None:
        return "not recorded"
    first, last = value
    return f"{first:.4f} to {last:.4f} ({last / first - 1:+.1%})"


# Row of the table -> (where its figure stands, how it is written).
ROWS: dict[str, tuple[str, str, Any]] = {
    "optimizer steps": ("measured", "steps", "{:,}".format),
    "micro-steps": ("measured", "micro_steps", "{:,}".format),
    "ranks": ("measured", "ranks", str),
    "epochs begun": ("measured", "epochs", str),
    "samples": ("measured", "samples", "{:,}".format),
    "tokens": ("measured", "tokens", "{:,}".format),
    "filler micro-batches": ("measured", "fillers", "{:,}".format),
    "training time": ("measured", "seconds", "{:,.1f} s".format),
    "median step": ("measured", "step_seconds", "{:.3f} s".format),
    "tokens/s": ("measured", "tokens_per_second", "{:,.0f}".format),
    "samples/s": ("measured", "samples_per_second", "{:.2f}".format),
    "waiting for data": ("measured", "waiting_for_data", _share),
    "efficiency, fitted to times": ("measured", "efficiency", _share),
    "imbalance, fitted to times": ("measured", "imbalance", _number),
    "median error of that fit": ("measured", "fit_error", _share),
    "efficiency": ("predicted", "efficiency", _share),
    "imbalance": ("predicted", "imbalance", _number),
    "peak memory of a rank": ("measured", "peak_memory_bytes", _gigabytes),
    "reserved by the allocator": ("measured", "peak_reserved_bytes", _gigabytes),
    "training loss, first and last quarter": ("measured", "training_loss", _two_losses),
    "fixed-noise validation loss, likewise": ("measured", "validation_loss", _two_losses),
}


def _print(results: list[dict]) -> None:
    """The batches of each run, then the runs side by side."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    names = _short_names([result["run"] for result in results])
    for name, result in zip(names, results, strict=True):
        console.print(_shapes(name, result["shapes"]))
    console.print(_comparison(names, results))


def _comparison(names: list[str], results: list[dict]) -> Any:
    from rich.table import Table

    table = Table("", "", *names)
    for column in table.columns[2:]:
        column.justify = "right"
    for title, (source, key, write) in ROWS.items():
        table.add_row(title, source, *(write(result[source][key]) for result in results))
    return table


def _shapes(name: str, rows: list[dict]) -> Any:
    from rich.table import Table

    table = Table(title=f"{name}: batches a shape (measured)", title_justify="left")
    for column in ("kind", "shape", "S", "micro-batches", "samples", "fillers", "B"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for row in rows:
        low, high = row["batch_size"]
        cells = (row[key] for key in ("kind", "shape", "tokens", "micro_batches", "samples", "fillers"))
        table.add_row(*map(str, cells), str(low) if low == high else f"{low} to {high}")
    return table


def _short_names(runs: list[str]) -> list[str]:
    """Folder names, or paths where two runs' folders have one name."""
    names = [Path(run).name for run in runs]
    return names if len(set(names)) == len(names) else runs
