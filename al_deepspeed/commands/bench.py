"""al-deepspeed bench adaln: the fused op and its peers against the copy limit of this device."""

import contextlib
import json
import sys
from pathlib import Path

import typer

from al_deepspeed.errors import AdaptiveLoadError

TARGETS = ("adaln",)


def run(
    target: str = typer.Argument(..., help="What to measure: adaln."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object with every measurement."),
    plot: Path | None = typer.Option(None, "--plot", help="Write a roofline picture to this file."),
) -> None:
    """Measure fused AdaLN against eager PyTorch, torch.compile, Apex and Liger on this CUDA device."""
    if target not in TARGETS:
        raise AdaptiveLoadError(f"bench: target is {target!r}; allowed: {', '.join(TARGETS)}")
    from rich.console import Console

    with contextlib.redirect_stdout(sys.stderr):
        from al_deepspeed.ops import benchmark, benchmark_report

        result = benchmark.run(lambda line: print(line, file=sys.stderr, flush=True))
        if plot is not None:
            benchmark_report.plot_roofline(result, plot)
    if as_json:
        print(json.dumps(result))
    else:
        benchmark_report.print_tables(result, Console(width=None if sys.stdout.isatty() else 200))
