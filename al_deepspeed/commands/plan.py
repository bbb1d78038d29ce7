"""`al-deepspeed plan`: batch sizes, and how well an epoch would load the ranks, without training."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from al_deepspeed.errors import PlanError

if TYPE_CHECKING:
    from al_deepspeed.scheduling.constraints import Limits
    from al_deepspeed.scheduling.cost import CostModel


def run(
    manifest: Annotated[Path, typer.Option(help="Manifest (.parquet or .csv).", show_default=False)],
    calibration: Annotated[Path | None, typer.Option(help="Calibration: cost model and limits.")] = None,
    world_size: Annotated[int, typer.Option(help="R, data-parallel ranks.")] = 1,
    accumulation: Annotated[int, typer.Option(help="G, micro-steps a step.")] = 1,
    strategy: Annotated[str, typer.Option(help="equal_token, dual_constraint or balanced.")] = "balanced",
    compare: Annotated[bool, typer.Option("--compare", help="All strategies side by side.")] = False,
    mixing: Annotated[
        str, typer.Option(help="balanced: keep the corpus's mix, or be free of it.")
    ] = "corpus",
    lookahead: Annotated[int, typer.Option(help="balanced: micro-steps of a window.")] = 64,
    max_tokens: Annotated[int | None, typer.Option(help="M_mem: B*S that a rank's memory holds.")] = None,
    max_cost: Annotated[
        float | None, typer.Option(help="M_comp: ms, or B*S^p with --exponent or without --calibration.")
    ] = None,
    exponent: Annotated[float | None, typer.Option(help="p: limit B*S^p to --max-cost.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the shuffle.")] = 1234,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw cost a rank over micro-steps, before and after.")
    ] = None,
    dump: Annotated[Path | None, typer.Option(help="Write the plan, a row a micro-batch (.parquet).")] = None,
) -> None:
    """Plan an epoch, and print what it would be: efficiency, mix, and the bucket table with binding limits.

    Without a calibration, costs are B*S^p in relative units (p = 2 unless --exponent says otherwise), and a
    --max-cost that is left out is chosen for the corpus. A calibration's limits hold where none are given
    here.
    """
    from al_deepspeed.data.manifest import read_manifest
    from al_deepspeed.pictures import check_picture
    from al_deepspeed.scheduling.metrics import bucket_table, plan_metrics
    from al_deepspeed.scheduling.options import CHOICES
    from al_deepspeed.scheduling.plan import make_plan

    if plot is not None:
        check_picture(plot)
    if dump is not None and dump.suffix != ".parquet":
        raise PlanError(f"the dump is to be {dump}; its name must end in .parquet.")
    corpus = read_manifest(manifest).corpus()
    cost, limits = _cost_and_limits(calibration, max_tokens, max_cost, exponent)

    def plan_by(name: str):
        return make_plan(
            corpus,
            cost,
            limits,
            world_size=world_size,
            accumulation=accumulation,
            seed=seed,
            strategy=name,
            mixing=mixing,
            lookahead=lookahead,
        )

    before = "equal_token"
    names = list(CHOICES["strategy"]) if compare else [strategy]
    plans = {name: plan_by(name) for name in names}
    chosen = plans[names[-1]]
    for warning in dict.fromkeys(warning for plan in plans.values() for warning in plan.warnings):
        print(f"warning: {warning}", file=sys.stderr)
    if dump is not None:
        _dump(chosen, dump)
    if plot is not None:
        from al_deepspeed.scheduling.plots import plot_costs

        plot_costs({before: plan_by(before)} | plans, plot)
    figures = [plan_metrics(plan) for plan in plans.values()]
    if as_json:
        print(json.dumps({"strategies": figures} if compare else figures[0]))
        return
    memory_only = chosen.options.strategy == "equal_token"
    _print_tables(bucket_table(corpus, cost, chosen.limits, memory_only=memory_only), figures)


def _cost_and_limits(
    calibration: Path | None, max_tokens: int | None, max_cost: float | None, exponent: float | None
) -> tuple["CostModel", "Limits"]:
    """What the command line says, over what the calibration says."""
    from al_deepspeed.calibration.file import read_calibration
    from al_deepspeed.scheduling.constraints import Limits
    from al_deepspeed.scheduling.cost import PowerCost

    step_cost = 0.0
    if calibration is None:
        if exponent is not None and not 0 < exponent <= 8:
            raise PlanError(f"--exponent is {exponent}; it must lie in (0, 8]; the paper fits about 2.")
        cost, exponent = PowerCost() if exponent is None else PowerCost(exponent=exponent), None
    else:
        found = read_calibration(calibration)
        cost, step_cost = found.cost, found.step_ms or 0.0
        max_tokens = found.max_tokens if max_tokens is None else max_tokens
        max_cost = found.max_cost if max_cost is None and exponent is None else max_cost
    if max_tokens is None:
        why = "No calibration is given" if calibration is None else f"{calibration} knows no memory capacity"
        raise PlanError(f"--max-tokens is missing. {why}; give M_mem, the B*S that a rank's memory holds.")
    return cost, Limits(max_tokens, max_cost, exponent, step_cost)


def _dump(plan, path: Path) -> None:
    """A row a micro-batch; a filler repeats a sample at weight 0."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from al_deepspeed.data.files import atomic_path

    micro_step, rank = np.indices(plan.size.shape)
    size, first = plan.size.reshape(-1), plan.first.reshape(-1)
    ends = np.cumsum(size)
    places = np.repeat(first - (ends - size), size) + np.arange(ends[-1])
    table = pa.table(
        {
            "step": (micro_step // plan.accumulation).reshape(-1),
            "micro_step": micro_step.reshape(-1),
            "rank": rank.reshape(-1),
            "batch_size": size,
            "tokens": plan.corpus.tokens[plan.bucket].reshape(-1),
            "cost_ms": plan.cost.reshape(-1),
            "loss_weight": plan.loss_weight.reshape(-1),
            "sample_ids": pa.LargeListArray.from_arrays(
                np.concatenate([[0], ends]), plan.sample_order[places].astype(np.int64)
            ),
        }
    )
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary)


def _print_tables(buckets: list[dict], figures: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="buckets", title_justify="left")
    for name in buckets[0]:
        table.add_column(name.replace("_", " "), justify="left" if name in ("kind", "binding") else "right")
    for row in buckets:
        table.add_row(*map(_text, row.values()))
    summary = Table(title="plan (predicted)", title_justify="left", show_header=len(figures) > 1)
    summary.add_column("")
    for column in figures:
        summary.add_column(column["strategy"], justify="right")
    for name in figures[0]:
        summary.add_row(name.replace("_", " "), *(_text(column[name]) for column in figures))
    console = Console()
    console.print(table)
    console.print(summary)


def _text(value) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {_text(part)}" for name, part in value.items())
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
