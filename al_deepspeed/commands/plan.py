"""`al-deepspeed plan`: batch sizes, and how well an epoch would load the ranks, without training."""

import json
from pathlib import Path
from typing import Annotated

import typer

from al_deepspeed.errors import PlanError


def run(
    manifest: Annotated[Path, typer.Option(help="Manifest (.parquet or .csv).", show_default=False)],
    max_tokens: Annotated[int | None, typer.Option(help="M_mem: B*S that a rank's memory holds.")] = None,
    max_cost: Annotated[float | None, typer.Option(help="M_comp. Left out, it is chosen.")] = None,
    exponent: Annotated[float, typer.Option(help="p of B*S^p <= max_cost.")] = 2.0,
    world_size: Annotated[int, typer.Option(help="Data-parallel ranks R.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Print the bucket table: shape, S, samples, B, and which limit binds."""
    from al_deepspeed.data.manifest import read_manifest
    from al_deepspeed.scheduling.budget import best_max_cost
    from al_deepspeed.scheduling.constraints import Limits
    from al_deepspeed.scheduling.cost import PowerCost
    from al_deepspeed.scheduling.metrics import bucket_table

    if max_tokens is None:
        raise PlanError("--max-tokens is missing. Give M_mem, the B*S that a rank's memory holds.")
    corpus = read_manifest(manifest).corpus()
    cost = PowerCost(exponent=exponent)
    if max_cost is None:
        max_cost = best_max_cost(corpus, cost, max_tokens, world_size)[0]
    rows = bucket_table(corpus, cost, Limits(max_tokens, max_cost))
    if as_json:
        print(json.dumps({"max_tokens": max_tokens, "max_cost": max_cost, "buckets": rows}))
    else:
        _print_table(rows)


def _print_table(rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="left" if name in ("kind", "binding") else "right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
