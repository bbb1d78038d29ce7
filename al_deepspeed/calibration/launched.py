"""One rank of a scan, from its command line to the calibration that all ranks end up with."""

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import al_deepspeed
from al_deepspeed.agreement import together
from al_deepspeed.calibration import assemble, file, scan, show
from al_deepspeed.calibration.measure import Meter
from al_deepspeed.calibration.setting import current_setting, scan_config
from al_deepspeed.calibration.workload import Shape, load_factory
from al_deepspeed.config import load_config
from al_deepspeed.data.manifest import read_manifest
from al_deepspeed.errors import AdaptiveLoadError, CalibrationError
from al_deepspeed.groups import data_ranks
from al_deepspeed.scheduling.shapes import Corpus, latent_tokens


def parser() -> argparse.ArgumentParser:
    """The scan's options; all after `--` are the factory's."""
    arguments = argparse.ArgumentParser(prog="al_deepspeed.calibration", description=__doc__)
    arguments.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # from the launcher
    arguments.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # DeepSpeed's habit
    arguments.add_argument("--deepspeed_config", required=True, metavar="FILE", help="the real run's")
    arguments.add_argument("--factory", required=True, metavar="PKG.MOD:FUNCTION", help="model and batches")
    arguments.add_argument("--manifest", type=Path, help="its shapes are scanned (default: ds_config's)")
    arguments.add_argument("--shapes", type=shapes, default=(), help="FxHxW,... in place of a manifest's")
    arguments.add_argument("--patch", type=shape, default=(1, 2, 2), metavar="FxHxW", help="with --shapes")
    arguments.add_argument("--out", type=Path, default=Path("calibration.json"))
    arguments.add_argument("--plot", type=Path, help="default: OUT as .png")
    arguments.add_argument("--budget", type=seconds, default=300.0, metavar="5m", help="time for the scan")
    arguments.add_argument("--largest-batch", type=int, default=1024, metavar="B")
    arguments.add_argument("--most-repeats", type=int, default=10, metavar="N", help="a point")
    arguments.add_argument("--form", default="auto", choices=("auto", "power", "two_term", "roofline"))
    arguments.add_argument("--memory-fraction", type=float, default=assemble.MEMORY_FRACTION)
    arguments.add_argument("--capacity-gb", type=float, help="a rank's memory (default: the device's)")
    arguments.add_argument("--max-tokens", type=int, help="M_mem, in place of the measured one")
    arguments.add_argument("--world-size", type=int, help="R that M_comp is for (default: this launch's)")
    arguments.add_argument("--resume", action="store_true", help="go on with a scan that was interrupted")
    arguments.add_argument("factory_arguments", nargs="*", metavar="-- ARGUMENTS", help="the factory's own")
    return arguments


def shape(text: str) -> Shape:
    """`5x60x104` as a tuple."""
    sides = text.split("x")
    if len(sides) != 3 or not all(side.isdigit() and int(side) > 0 for side in sides):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape; allowed: frames x height x width, as 5x60x104"
        )
    return tuple(int(side) for side in sides)


def shapes(text: str) -> tuple[Shape, ...]:
    return tuple(shape(part) for part in text.split(","))


def seconds(text: str) -> float:
    """`90`, `90s`, `5m` or `1h`."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1.0)
    try:
        value = float(number) * unit
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; allowed: a number above 0, as 90s, 5m, 1h")
    return value


@dataclass(frozen=True)
class Task:
    """What all ranks have read and agreed on. corpus: None where shapes were listed."""

    config: dict
    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    corpus: Corpus | None


def read_task(arguments: argparse.Namespace) -> Task:
    """The ds_config, and the shapes from the list, the manifest given, or the one that ds_config names."""
    config = load_config(arguments.deepspeed_config)
    if arguments.shapes:
        tokens = tuple(latent_tokens(*one, patch=arguments.patch) for one in arguments.shapes)
        return Task(config, arguments.shapes, tokens, None)
    sampling = config.get("data_efficiency", {}).get("data_sampling", {})
    manifest = arguments.manifest or sampling.get("dual_constraint_batching", {}).get("manifest")
    if not manifest:
        raise CalibrationError(
            "no shapes to scan: give --manifest FILE or --shapes 1x32x32,5x60x104, or a ds_config whose "
            "dual_constraint_batching names a manifest."
        )
    corpus = read_manifest(manifest).corpus()
    corpus_shapes = tuple(tuple(map(int, sides)) for sides in corpus.shapes)
    return Task(config, corpus_shapes, tuple(map(int, corpus.tokens)), corpus)


def calibration_of(
    progress: scan.Progress, arguments: argparse.Namespace, setting: file.Setting, corpus: Corpus | None
) -> file.Calibration:
    """The scan's calibration, with M_comp for the corpus where there is one and M_mem is known."""
    result = assemble.calibrate(
        progress.points,
        replace(setting, capacity_gb=progress.capacity_gb),
        form=arguments.form,
        memory_fraction=arguments.memory_fraction,
        max_tokens=arguments.max_tokens,
    )
    if corpus is None or result.max_tokens is None:
        return result
    return assemble.with_budget(result, corpus, arguments.world_size)


def publish(result: file.Calibration, arguments: argparse.Namespace, corpus: Corpus | None) -> None:
    """File, picture and table; on rank 0."""
    from rich.console import Console

    file.write_calibration(result, arguments.out)
    show.draw(result, arguments.plot or arguments.out.with_suffix(".png"))
    show.print_calibration(result, Console(), corpus if result.curve else None)
    print(f"calibration written to {arguments.out}")


def run(arguments: argparse.Namespace) -> file.Calibration:
    """Scans and calibrates. Collective; returns the same calibration on every rank."""
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
    setting = current_setting(engine, task.config)
    return _scan(engine, synthetic, arguments, task, setting)


def _scan(
    engine: Any, synthetic: Any, arguments: argparse.Namespace, task: Task, setting: file.Setting
) -> file.Calibration:
    beside = arguments.out.with_name(arguments.out.name + ".scan")
    progress = [scan.Progress()]
    with together():
        if arguments.resume and dist.get_rank() == 0:
            progress = [scan.load_progress(beside, setting)]
    dist.broadcast_object_list(progress, src=0)

    def end_early(partial: scan.Progress) -> int:
        try:
            publish(calibration_of(partial, arguments, setting, task.corpus), arguments, task.corpus)
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
        took = point.status if point.ms is None else f"{point.ms:.1f} ms, {point.repeats} repeat(s)"
        print(
            f"[{progress.used_s:.0f} of {arguments.budget:.0f} s] {len(progress.points)} points; "
            f"B = {point.batch_size}, S = {point.tokens}: {took}",
            flush=True,
        )

    meter = Meter(engine, synthetic, arguments.most_repeats)
    finished = scan.Scan(meter, options, progress[0], record=record, finish=end_early).run()
    result: list[dict] = [{}]
    with together():
        if dist.get_rank() == 0:
            calibration = calibration_of(finished, arguments, setting, task.corpus)
            publish(calibration, arguments, task.corpus)
            beside.unlink(missing_ok=True)
            result = [calibration.to_dict()]
    dist.broadcast_object_list(result, src=0)
    return file.parse_calibration(result[0], str(arguments.out))


def main() -> int:
    """Exit code 0, or 2 after an error that a person can mend."""
    arguments = parser().parse_args()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    try:
        run(arguments)
    except AdaptiveLoadError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    dist.destroy_process_group()
    return 0
