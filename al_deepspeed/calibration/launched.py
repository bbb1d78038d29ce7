"""One rank of a scan, from its command line to the calibration that all ranks end up with."""

import argparse
import os
import sys
from dataclasses import dataclass, replace

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import al_deepspeed
from al_deepspeed.agreement import together
from al_deepspeed.build_locks import told_of_build_locks
from al_deepspeed.calibration import assemble, check, file, scan, show
from al_deepspeed.calibration.arguments import parser
from al_deepspeed.calibration.measure import Meter
from al_deepspeed.calibration.points import Point
from al_deepspeed.calibration.setting import current_setting, scan_config
from al_deepspeed.calibration.workload import Shape, load_factory
from al_deepspeed.config import load_config
from al_deepspeed.data.manifest import read_manifest
from al_deepspeed.errors import AdaptiveLoadError, CalibrationError
from al_deepspeed.groups import data_ranks
from al_deepspeed.pictures import check_picture
from al_deepspeed.scheduling.shapes import Corpus, latent_tokens


@dataclass(frozen=True)
class Task:
    """What all ranks have read and agreed on.

    shapes, tokens: to scan; corpus: what they are from, None where they were listed.
    max_tokens: M_mem where it is given, not to be measured.
    calibration: what to check in place of the scan's own. requests: the points to check, () for none.
    """

    config: dict
    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    corpus: Corpus | None
    max_tokens: int | None
    calibration: file.Calibration | None
    requests: tuple[check.Request, ...]


def read_task(arguments: argparse.Namespace) -> Task:
    """The ds_config, the shapes, and what is to be checked.

    A ds_config that states max_tokens beside its calibration overrules the latter's M_mem in the run, so here
    too. A manifest given here takes the place of the ds_config's, for the factory as well.
    """
    config = load_config(arguments.deepspeed_config)
    sampling = config.get("data_efficiency", {}).get("data_sampling", {})
    batching = sampling.get("dual_constraint_batching", {})
    if arguments.manifest and batching:
        batching["manifest"] = str(arguments.manifest)
    arguments.check_out = arguments.check_out or (arguments.check and arguments.check.with_suffix(".json"))
    if arguments.check and arguments.check == arguments.check_out:
        raise CalibrationError(f"--check-out is {arguments.check}, which --check reads; give another file.")
    if arguments.plot:
        check_picture(arguments.plot)
    stated = batching.get("max_tokens") if batching.get("calibration") else None
    corpus, shapes = _scanned(arguments, batching.get("manifest"))
    return Task(
        config=config,
        shapes=shapes,
        tokens=tuple(latent_tokens(*one, patch=arguments.patch) for one in shapes)
        if corpus is None
        else tuple(map(int, corpus.tokens)),
        corpus=corpus,
        max_tokens=arguments.max_tokens or stated,
        calibration=file.read_calibration(arguments.calibration) if arguments.calibration else None,
        requests=check.read_points(arguments.check, arguments.patch) if arguments.check else (),
    )


def _scanned(arguments: argparse.Namespace, named: str | None) -> tuple[Corpus | None, tuple[Shape, ...]]:
    """The shapes to scan, from the list, the manifest given, or the one that ds_config names."""
    if arguments.calibration:
        return None, ()
    if arguments.shapes:
        return None, arguments.shapes
    manifest = arguments.manifest or named
    if not manifest:
        raise CalibrationError(
            "no shapes to scan: give --manifest FILE or --shapes 1x32x32,5x60x104, or a ds_config whose "
            "dual_constraint_batching names a manifest."
        )
    corpus = read_manifest(manifest).corpus()
    return corpus, tuple(tuple(map(int, sides)) for sides in corpus.shapes)


def calibration_of(
    progress: scan.Progress, arguments: argparse.Namespace, setting: file.Setting, task: Task
) -> file.Calibration:
    """The scan's calibration, with M_comp for the corpus where there is one and M_mem is known."""
    result = assemble.calibrate(
        progress.points,
        replace(setting, capacity_gb=progress.capacity_gb),
        form=arguments.form,
        memory_fraction=arguments.memory_fraction,
        max_tokens=task.max_tokens,
    )
    if task.corpus is None or result.max_tokens is None:
        return result
    return assemble.with_budget(result, task.corpus, arguments.world_size, arguments.accumulation)


def publish(result: file.Calibration, arguments: argparse.Namespace, corpus: Corpus | None) -> None:
    """File, picture and table; on rank 0."""
    file.write_calibration(result, arguments.out)
    show.draw(result, arguments.plot or arguments.out.with_suffix(".png"))
    show.print_calibration(result, show.terminal(), corpus if result.curve else None)
    print(f"calibration written to {arguments.out}")


def run(arguments: argparse.Namespace) -> None:
    """Scans and calibrates, or takes a calibration; then checks it where asked to. Collective."""
    with together():
        task = read_task(arguments)
        factory = load_factory(arguments.factory)
    model, synthetic = factory(arguments.factory_arguments, task.config)
    engine, _, _, _ = al_deepspeed.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config=scan_config(task.config),
    )
    engine.train()
    arguments.world_size = arguments.world_size or data_ranks(engine).size
    arguments.accumulation = engine.gradient_accumulation_steps()
    setting = current_setting(engine, task.config)
    meter = Meter(engine, synthetic, arguments.most_repeats)
    calibration = task.calibration or _scan(meter, arguments, task, setting)
    if task.requests:
        _check(meter, calibration, arguments, task, setting)


def _scan(meter: Meter, arguments: argparse.Namespace, task: Task, setting: file.Setting) -> file.Calibration:
    """The same calibration on every rank."""
    beside = arguments.out.with_name(arguments.out.name + ".scan")
    progress = [scan.Progress()]
    with together():
        if arguments.resume and dist.get_rank() == 0:
            progress = [scan.load_progress(beside, setting)]
    dist.broadcast_object_list(progress, src=0)

    def end_early(partial: scan.Progress) -> int:
        try:
            publish(calibration_of(partial, arguments, setting, task), arguments, task.corpus)
        except AdaptiveLoadError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
        return 0

    options = scan.ScanOptions(
        shapes=task.shapes,
        tokens=task.tokens,
        budget_s=arguments.budget,
        largest_batch=arguments.largest_batch,
        memory_fraction=arguments.memory_fraction,
        capacity_gb=arguments.capacity_gb,
    )

    def record(progress: scan.Progress) -> None:
        progress.save(setting, beside)
        point = progress.points[-1]
        took = point.status if point.ms is None else f"{point.ms:.1f} ms, {_repeats(point)}"
        print(
            f"[{progress.used_s:.0f} of {arguments.budget:.0f} s] {len(progress.points)} points; "
            f"B = {point.batch_size}, S = {point.tokens}: {took}",
            flush=True,
        )

    finished = scan.Scan(meter, options, progress[0], record=record, finish=end_early).run()
    result: list[dict] = [{}]
    with together():
        if dist.get_rank() == 0:
            calibration = calibration_of(finished, arguments, setting, task)
            publish(calibration, arguments, task.corpus)
            beside.unlink(missing_ok=True)
            result = [calibration.to_dict()]
    dist.broadcast_object_list(result, src=0)
    return file.parse_calibration(result[0], str(arguments.out))


def _repeats(point: Point) -> str:
    if len(point.repeat_ms) < 2:
        return f"{point.repeats} repeat(s)"
    return f"{point.repeats} repeats from {min(point.repeat_ms):.1f} to {max(point.repeat_ms):.1f}"


def _check(
    meter: Meter,
    calibration: file.Calibration,
    arguments: argparse.Namespace,
    task: Task,
    setting: file.Setting,
) -> None:
    """Measures the points to be checked; rank 0 writes and prints what came of them."""
    warnings = calibration.mismatches(setting)

    def write(result: check.Result) -> None:
        file.write_json({"warnings": warnings, **check.to_dict(result)}, arguments.check_out)

    def record(result: check.Result) -> None:
        write(result)
        print(f"checked {len(result.rows)} of {len(task.requests)} points", flush=True)

    limit_gb = arguments.memory_fraction * (arguments.capacity_gb or meter.capacity_gb())
    result = check.Check(meter, calibration, limit_gb, record).run(task.requests)
    if dist.get_rank() == 0:
        write(result)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        show.terminal().print(check.table(result))
        print(f"check written to {arguments.check_out}")


def main() -> int:
    """Exit code 0, or 2 after an error that a person can mend."""
    arguments = parser().parse_args()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    with told_of_build_locks():
        deepspeed.init_distributed()
    try:
        run(arguments)
    except AdaptiveLoadError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    dist.destroy_process_group()
    return 0
