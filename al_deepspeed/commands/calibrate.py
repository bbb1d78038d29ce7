"""`al-deepspeed calibrate`: makes a calibration from a scan, a table or a run, and predicts with one."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from al_deepspeed.errors import CalibrationError

if TYPE_CHECKING:
    from al_deepspeed.calibration.file import Calibration


def run(
    from_scan: Annotated[
        Path | None, typer.Option(help="Fit a table of measured points (CSV: B, S, ms, peak_GB), no engine.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="An existing calibration, to predict with or to choose M_comp for.")
    ] = None,
    predict: Annotated[
        Path | None, typer.Option(help="With --calibration: add ms and peak_GB to points (CSV: B, S).")
    ] = None,
    manifest: Annotated[Path | None, typer.Option(help="The corpus that M_comp is chosen for.")] = None,
    world_size: Annotated[
        int | None, typer.Option(help="The data-parallel ranks R that M_comp is chosen for.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The calibration to write.")] = Path("calibration.json"),
    plot: Annotated[Path | None, typer.Option(help="The picture to write (default: OUT as .png).")] = None,
    form: Annotated[
        str, typer.Option(help="power, two_term or roofline; auto: the least held-out error.")
    ] = "auto",
    memory_fraction: Annotated[
        float, typer.Option(help="Share of the device's memory that M_mem may fill.")
    ] = 0.92,
    capacity_gb: Annotated[
        float | None, typer.Option(help="The device's memory in 10^9 bytes, which gives M_mem.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="M_mem in tokens, in place of the measured one.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output.")
    ] = False,
) -> None:
    """Fit step time and memory against (B, S); choose the limits M_mem and M_comp."""
    from rich.console import Console

    from al_deepspeed.calibration import assemble, file, points, show
    from al_deepspeed.data.manifest import read_manifest

    sources = {"--from-scan": from_scan, "--calibration": calibration}
    given = [name for name, value in sources.items() if value]
    if len(given) != 1:
        raise CalibrationError(
            f"calibrate got {' and '.join(given) or 'no source'}; allowed: one of {', '.join(sources)}."
        )
    if bool(manifest) != bool(world_size):
        raise CalibrationError("M_comp is chosen from --manifest M and --world-size R together; give both.")
    if predict:
        if not calibration:
            raise CalibrationError("--predict needs --calibration C, the calibration to predict with.")
        _print_predictions(file.read_calibration(calibration), *points.read_requests(predict), as_json)
        return
    if from_scan:
        result = assemble.calibrate(
            points.read_scan(from_scan),
            file.Setting(capacity_gb=capacity_gb),
            form=form,
            memory_fraction=memory_fraction,
            max_tokens=max_tokens,
        )
    else:
        result = file.read_calibration(calibration)
        result = replace(result, max_tokens=max_tokens or result.max_tokens)
    corpus = read_manifest(manifest).corpus() if manifest else None
    if corpus:
        result = assemble.with_budget(result, corpus, world_size)
    file.write_calibration(result, out)
    show.draw(result, plot or out.with_suffix(".png"))
    show.print_calibration(result, Console(stderr=as_json), corpus)
    if as_json:
        print(json.dumps(result.to_dict()))


def _print_predictions(
    calibration: "Calibration", batch_sizes: list[int], tokens: list[int], as_json: bool
) -> None:
    """The points with predicted ms and peak_GB, as CSV or as {"points": [...]}; unknown memory is null."""
    ms = calibration.cost.cost(batch_sizes, tokens)
    memory = calibration.memory
    peaks = memory.peak_gb(batch_sizes, tokens) if memory else [None] * len(tokens)
    rows = [
        {"B": size, "S": length, "ms": float(time), "peak_GB": None if peak is None else float(peak)}
        for size, length, time, peak in zip(batch_sizes, tokens, ms, peaks, strict=True)
    ]
    if as_json:
        print(json.dumps({"points": rows}))
        return
    writer = csv.DictWriter(sys.stdout, fieldnames=("B", "S", "ms", "peak_GB"), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
