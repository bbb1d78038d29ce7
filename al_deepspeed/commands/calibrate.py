"""`al-deepspeed calibrate`: makes a calibration from a scan, a table or a run, and predicts with one."""

import contextlib
import csv
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from al_deepspeed.errors import CalibrationError

if TYPE_CHECKING:
    from al_deepspeed.calibration.file import Calibration

# Options that only some sources of a calibration use -> what to say where another is given.
IN_A_SCAN = (
    *(
        "launcher",
        "budget",
        "shapes",
        "patch",
        "largest_batch",
        "most_repeats",
        "resume",
        "check",
        "check_out",
    ),
    "factory_arguments",
)
NOT_WITH_PREDICT = (
    *(
        "manifest",
        "world_size",
        "accumulation",
        "out",
        "plot",
        "form",
        "memory_fraction",
        "capacity_gb",
        "max_tokens",
    ),
)


def run(
    context: typer.Context,
    factory_arguments: Annotated[
        list[str] | None, typer.Argument(help="After `--`: the factory's own, such as --pretrained NAME.")
    ] = None,
    deepspeed_config: Annotated[
        Path | None,
        typer.Option(
            "--deepspeed-config", "--deepspeed_config", help="Scan in the live engine of this ds_config."
        ),
    ] = None,
    factory: Annotated[
        str | None, typer.Option(help="pkg.mod:function that makes the model and synthetic batches.")
    ] = None,
    launcher: Annotated[
        str, typer.Option(help="Options of the `deepspeed` launcher, in one string: '--num_gpus 8'.")
    ] = "",
    budget: Annotated[str, typer.Option(help="Time for the scan: 90s, 5m, 1h.")] = "5m",
    shapes: Annotated[
        str | None, typer.Option(help="Latent shapes to scan, FxHxW,..., in place of the manifest's.")
    ] = None,
    patch: Annotated[str, typer.Option(help="With --shapes: the model's patch.")] = "1x2x2",
    largest_batch: Annotated[int, typer.Option(min=1, help="B is scanned up to this.")] = 1024,
    most_repeats: Annotated[int, typer.Option(min=1, help="Timed runs of a point, at most.")] = 10,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted scan.")] = False,
    from_scan: Annotated[
        Path | None, typer.Option(help="Fit a table of measured points (CSV: B, S, ms, peak_GB), no engine.")
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(help="Refit --calibration C from this run's telemetry; C is left out to fit anew."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="An existing calibration: to predict with, to check, or to choose M_comp for."),
    ] = None,
    predict: Annotated[
        Path | None, typer.Option(help="With --calibration: add ms and peak_GB to points (CSV: B, S).")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            help="In the live engine: measure these points (CSV: B, shape) and compare with the calibration "
            "given, or else with the scan's."
        ),
    ] = None,
    check_out: Annotated[
        Path | None, typer.Option(help="What --check found (default: its CSV as .json).")
    ] = None,
    manifest: Annotated[Path | None, typer.Option(help="The corpus that M_comp is chosen for.")] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="The data-parallel ranks R that M_comp is chosen for.")
    ] = None,
    accumulation: Annotated[
        int | None,
        typer.Option(help="G that M_comp is for (default: as before, else 1; a scan's is the ds_config's)."),
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
        float | None,
        typer.Option(help="A rank's memory in 10^9 bytes, which gives M_mem (scan: the device's)."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="M_mem in tokens, in place of the measured one.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output.")
    ] = False,
) -> None:
    """Fit step time and memory against (B, S); choose the limits M_mem and M_comp."""
    from rich.console import Console

    from al_deepspeed.calibration import assemble, file, points, show
    from al_deepspeed.data.manifest import read_manifest
    from al_deepspeed.pictures import check_picture

    if not 0 < memory_fraction <= 1:
        raise CalibrationError(f"--memory-fraction is {memory_fraction}; allowed: above 0, at most 1.")
    if capacity_gb is not None and not 0 < capacity_gb < float("inf"):
        raise CalibrationError(f"--capacity-gb is {capacity_gb}; allowed: above 0, in 10^9 bytes.")
    if plot:
        check_picture(plot)
    scans = deepspeed_config is not None or factory is not None
    checks_another = scans and check is not None and calibration is not None
    if scans + bool(from_scan) + bool(from_run or (calibration and not checks_another)) != 1:
        raise CalibrationError(
            "calibrate takes one source: --deepspeed-config and --factory (a scan), --from-scan FILE, "
            "--from-run RUN, or --calibration C; beside the live engine the latter goes with --check alone."
        )
    if check and not scans:
        raise CalibrationError("--check measures in the live engine: give --deepspeed-config and --factory.")
    if predict and (from_run or not calibration):
        raise CalibrationError("--predict needs --calibration C alone, the calibration to predict with.")
    if not scans:
        _refuse(context, IN_A_SCAN, "is for a scan: give --deepspeed-config and --factory, or leave it out.")
    if predict:
        _refuse(context, NOT_WITH_PREDICT, "does not go with --predict; leave it out.")
        _print_predictions(file.read_calibration(calibration), *points.read_requests(predict), as_json)
        return
    if scans:
        _refuse(
            context, ("accumulation",), "is gradient_accumulation_steps of a scan's ds_config; leave it out."
        )
        _launch(
            launcher,
            factory_arguments or [],
            as_json,
            {
                "deepspeed_config": deepspeed_config,
                "factory": factory,
                "budget": budget,
                "shapes": shapes,
                "patch": patch,
                "calibration": calibration,
                "check": check,
                "check-out": check_out,
                "largest-batch": largest_batch,
                "most-repeats": most_repeats,
                "resume": resume,
                "manifest": manifest,
                "world-size": world_size,
                "out": out,
                "plot": plot,
                "form": form,
                "memory-fraction": memory_fraction,
                "capacity-gb": capacity_gb,
                "max-tokens": max_tokens,
            },
        )
        if as_json:
            row = {} if calibration else file.read_calibration(out).to_dict()
            if check:
                row["check"] = json.loads((check_out or check.with_suffix(".json")).read_text("utf-8"))
            print(json.dumps(row))
        return
    if bool(manifest) != bool(world_size):
        raise CalibrationError("M_comp is chosen from --manifest M and --world-size R together; give both.")
    if accumulation is not None and not manifest:
        raise CalibrationError("--accumulation is for choosing M_comp: give --manifest and --world-size too.")
    before = file.read_calibration(calibration) if calibration else None
    of_memory = _given(context, ("memory_fraction", "capacity_gb"))
    if from_scan:
        result = assemble.calibrate(
            points.read_scan(from_scan),
            file.Setting(capacity_gb=capacity_gb),
            form=form,
            memory_fraction=memory_fraction,
        )
    elif from_run:
        _refuse(
            *(context, of_memory),
            "does not go with --from-run: a run's reservations mix all its shapes. Give --max-tokens.",
        )
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to standard output from its import on
            from al_deepspeed.calibration.from_run import read_run, refit
            from al_deepspeed.calibration.setting import read_setting

        run_points, setting = read_run(from_run), read_setting(from_run)
        for reason in before.mismatches(setting) if before else ():
            print(f"warning: {from_run}: {reason}", file=sys.stderr)
        result = refit(run_points, before, form=form, setting=setting)
    else:
        _refuse(context, ("form",), "is for fitting points: with a scan, --from-scan or --from-run.")
        share = memory_fraction if "memory_fraction" in of_memory else before.memory_fraction
        result = assemble.with_capacity(before, capacity_gb, share) if of_memory else before
    result = replace(result, max_tokens=max_tokens or result.max_tokens)
    corpus = read_manifest(manifest).corpus() if manifest else None
    if corpus:
        steps = accumulation or (before and before.accumulation) or 1
        result = assemble.with_budget(result, corpus, world_size, steps)
    file.write_calibration(result, out)
    show.draw(result, plot or out.with_suffix(".png"))
    show.print_calibration(result, Console(stderr=as_json), corpus)
    if as_json:
        print(json.dumps(result.to_dict()))


def _given(context: typer.Context, names: Sequence[str]) -> list[str]:
    """Those of the options that stand on the command line."""
    source = context.get_parameter_source
    return [name for name in names if context.params[name] and source(name).name == "COMMANDLINE"]


def _refuse(context: typer.Context, names: Sequence[str], reason: str) -> None:
    """An error for the first of the options that stands on the command line: it would have no effect."""
    for name in _given(context, names):
        option = "what stands after `--`" if name == "factory_arguments" else f"--{name.replace('_', '-')}"
        raise CalibrationError(f"{option} {reason}")


def _launch(launcher: str, factory_arguments: list[str], as_json: bool, options: dict) -> None:
    """Starts `deepspeed` with the scan and waits for its end; options that were not given are left out."""
    missing = [f"--{name}" for name in ("deepspeed_config", "factory") if options[name] is None]
    if missing:
        raise CalibrationError(f"a scan also needs {missing[0]}; see `al-deepspeed calibrate --help`.")
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *shlex.split(launcher)]
    command += ["--module", "al_deepspeed.calibration"]
    for name, value in options.items():
        if value is True:
            command.append(f"--{name}")
        elif value not in (None, False):
            command += [f"--{name}", str(value)]
    if factory_arguments:
        command += ["--", *factory_arguments]
    scripts = Path(sys.executable).parent  # DeepSpeed compiles its ops by the ninja that lies there
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}
    code = subprocess.run(command, stdout=sys.stderr if as_json else None, env=environment).returncode
    if code:
        if code != 2:
            print(f"the scan ended with exit code {code}; --resume goes on where it stopped", file=sys.stderr)
        raise typer.Exit(2 if code == 2 else 1)


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
