"""`initialize`: DeepSpeed's engine with planned batches, a restorable position, telemetry and the fused op.

What we add hangs on one engine instance: `step`, `save_checkpoint` and `load_checkpoint` are wrapped after
DeepSpeed built it. A subclass would not do, since `deepspeed.initialize` chooses the class itself (plain,
hybrid or pipeline), and a change of the classes would reach engines that are none of ours. The wrappers only
call, count and hand on; what they return is DeepSpeed's.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.utils import logger
from torch.utils.data import Dataset

from al_deepspeed.agreement import first_difference, together
from al_deepspeed.build_locks import told_of_build_locks
from al_deepspeed.calibration.file import Calibration
from al_deepspeed.calibration.setting import current_setting, write_setting
from al_deepspeed.config import (
    BATCHING_KEY,
    Settings,
    load_config,
    read_config,
    with_one_micro_batch,
)
from al_deepspeed.config_sections import FusedAdaLN
from al_deepspeed.coupling import Coupling
from al_deepspeed.errors import ConfigError
from al_deepspeed.groups import DataRanks, data_ranks
from al_deepspeed.heap import freeze_heap
from al_deepspeed.inputs import Inputs, open_inputs
from al_deepspeed.loader import Batches, PlannedBatches
from al_deepspeed.scheduling.options import PlanOptions
from al_deepspeed.scheduling.sampler import PlanSampler
from al_deepspeed.scheduling.streaming import StreamSampler
from al_deepspeed.stream_loader import ShapedSamples, StreamedBatches, gathering, sharing

if TYPE_CHECKING:
    from al_deepspeed.patching.in_memory import Report


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Dataset | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list], dict] | None = None,
    config: dict | str | None = None,
    mesh_param: Any = None,
    config_params: dict | str | None = None,
    *,
    dataset: Dataset | Iterable | None = None,
    shape_of: Callable[[Any], tuple[int, int, int]] | None = None,
) -> tuple[Any, Any, Batches | Any, Any]:
    """`deepspeed.initialize` with planned batches. All ranks call it; they fail together or not at all.

    Args:
        args .. config_params: as `deepspeed.initialize` takes them. `collate_fn` must return a dict; torch's
            default stacks the tensors of the samples' dicts.
        dataset: map-style, one sample a row of the manifest. Left out, the manifest's own shards are read.
            Without a manifest: an iterable of this rank's samples, dicts as a rule; of ranks that share a
            model, that of the first. See stream_loader.py.
        shape_of: latent (frames, height, width) of a stream's sample; left out, that of its "latent".
    Returns:
        (engine, optimizer, loader, lr_scheduler). The loader yields this rank's batches with `loss_weight`.
        Without `dual_constraint_batching` it is whatever DeepSpeed makes of `training_data`.
    Raises:
        ConfigError, CorpusError, CalibrationError, PlanError, PatchError: on every rank, before training.
    """
    _start_communication(args, distributed_port, dist_init_required)
    with together():
        raw = _given_config(args, config, config_params)
        settings = read_config(raw)
        inputs = _open_inputs(settings, dataset, training_data)
        if inputs is not None and isinstance(model, deepspeed.pipe.PipelineModule):
            raise ConfigError(
                f"model is a {type(model).__name__}, which takes batches and steps by itself in "
                f"train_batch(), where loss weights have no place; allowed with {BATCHING_KEY}: a module "
                "that is trained by forward, backward and step."
            )
        patched = _patch(settings.fused_adaln, model)
        if shape_of is not None and (inputs is None or inputs.corpus is not None):
            raise ConfigError("shape_of was given, but the data are no stream; allowed without a manifest.")
    _same_on_all_ranks(settings, inputs, patched)
    with _one_config(args):
        engine, optimizer, loader, lr_scheduler = deepspeed.initialize(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            distributed_port=distributed_port,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=raw if inputs is None else with_one_micro_batch(raw),
            mesh_param=mesh_param,
        )
    if inputs is not None:
        ranks = data_ranks(engine)
        talk = (gathering(ranks), sharing(ranks)) if inputs.corpus is None else None
        with together():
            if inputs.corpus is None:
                source = ShapedSamples(inputs.dataset, shape_of, settings.num_workers)
                loader = _streamed_batches(engine, settings, inputs, ranks, collate_fn, source, *talk)
            else:
                loader = _planned_batches(engine, settings, inputs, ranks, collate_fn)
            _note_setting(engine, raw, settings.batching.run_dir, inputs.calibration)
    if patched is not None:
        _announce(engine, patched, settings.fused_adaln)
    freeze_heap()
    return engine, optimizer, loader, lr_scheduler


def _patch(section: FusedAdaLN, model: torch.nn.Module | None) -> "Report | None":
    """Rewrites the classes of the model; after this, DeepSpeed may hook into its modules and compile them."""
    if not section.enabled or section.patch == "off" or not isinstance(model, torch.nn.Module):
        return None
    from al_deepspeed.patching.in_memory import patch_model

    recipes = None if section.patch == "auto" else section.patch
    return patch_model(model, recipes, observe=section.verify == "first_step")


def _announce(engine: Any, patched: "Report", section: FusedAdaLN) -> None:
    """Says what was rewritten, and has it checked."""
    if engine.global_rank == 0:
        print("\n".join(patched.lines()), file=sys.stderr, flush=True)
    if patched.count and section.verify == "first_step":
        from al_deepspeed.contract import FirstStep

        FirstStep(engine, patched)


def _planned_batches(
    engine: Any, settings: Settings, inputs: Inputs, ranks: DataRanks, collate_fn: Callable | None
) -> PlannedBatches:
    batching = settings.batching
    curriculum = {name: metric.model_dump() for name, metric in settings.curriculum.items()}
    world = _world(engine, settings, ranks)
    sampler = PlanSampler(inputs.corpus, inputs.cost, inputs.limits, curriculum=curriculum, **world)
    if all(metric.schedule_type != "custom" for metric in settings.curriculum.values()):
        _ = sampler.plan  # what cannot be planned is refused now; a custom schedule is given later
    coupling = Coupling(engine, sampler, batching, inputs.calibration, ranks)
    loader = PlannedBatches(
        inputs.dataset,
        sampler,
        collate_fn=collate_fn,
        num_workers=settings.num_workers,
        pin_memory=settings.pin_memory,
        listener=coupling,
    )
    coupling.hook(loader)
    return loader


def _streamed_batches(
    engine: Any,
    settings: Settings,
    inputs: Inputs,
    ranks: DataRanks,
    collate_fn: Callable | None,
    source: ShapedSamples,
    gather: Callable,
    share: Callable,
) -> StreamedBatches:
    world = _world(engine, settings, ranks)
    sampler = StreamSampler(source, inputs.cost, inputs.limits, gather=gather, share=share, **world)
    coupling = Coupling(engine, sampler, settings.batching, inputs.calibration, ranks)
    loader = StreamedBatches(sampler, collate_fn=collate_fn, listener=coupling)
    coupling.hook(loader)
    return loader


def _world(engine: Any, settings: Settings, ranks: DataRanks) -> dict[str, Any]:
    """What both kinds of samplers are told of ranks, chance and options."""
    return {
        "rank": ranks.own,
        "world_size": ranks.size,
        "accumulation": engine.gradient_accumulation_steps(),
        "seed": settings.seed,
        **{field.name: getattr(settings.batching, field.name) for field in fields(PlanOptions)},
    }


def _note_setting(engine: Any, config: dict, run_dir: str | None, calibration: Calibration | None) -> None:
    """Warns of a calibration from elsewhere, and keeps in the run's folder what its telemetry is of."""
    if engine.global_rank != 0:
        return
    setting = current_setting(engine, config)
    for reason in () if calibration is None else calibration.mismatches(setting):
        logger.warning(reason)
    if run_dir is not None:
        write_setting(setting, Path(run_dir))


def _start_communication(args: Any, distributed_port: int, dist_init_required: bool | None) -> None:
    """What `deepspeed.initialize` begins with, too, and a second time changes nothing: ranks must be able to
    agree before anything can fail, and NCCL needs each rank's own device for that."""
    with told_of_build_locks():
        deepspeed.init_distributed(
            dist_backend=get_accelerator().communication_backend_name(),
            distributed_port=distributed_port,
            dist_init_required=dist_init_required,
        )
    device = getattr(args, "device_rank", None)
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]) if device is None else device)


def _given_config(args: Any, config: dict | str | None, config_params: dict | str | None) -> dict:
    in_arguments = getattr(args, "deepspeed_config", None)
    given = [one for one in (config, config_params, in_arguments) if one is not None]
    if len(given) != 1:
        raise ConfigError(
            f"{len(given)} ds_configs were given; allowed: one, config, config_params or --deepspeed_config."
        )
    return load_config(given[0])


@contextmanager
def _one_config(args: Any) -> Iterator[None]:
    """DeepSpeed refuses a config besides --deepspeed_config, which we have read already."""
    path = getattr(args, "deepspeed_config", None)
    if path is None:
        yield
        return
    args.deepspeed_config = None
    try:
        yield
    finally:
        args.deepspeed_config = path


def _open_inputs(
    settings: Settings, dataset: Dataset | Iterable | None, training_data: Dataset | None
) -> Inputs | None:
    if settings.fused_adaln.enabled:
        from al_deepspeed.ops import set_backend

        set_backend(settings.fused_adaln.backend)
    if settings.batching is None:
        if dataset is not None:
            raise ConfigError(
                f"a dataset was given, but {BATCHING_KEY} is absent or not enabled. Enable it, or pass "
                "training_data for DeepSpeed's own loader."
            )
        return None
    if training_data is not None:
        raise ConfigError(f"training_data was given, but {BATCHING_KEY} is enabled; allowed: dataset.")
    return open_inputs(settings.batching, dataset)


def _same_on_all_ranks(settings: Settings, inputs: Inputs | None, patched: "Report | None") -> None:
    """Plans are made without talking, so all ranks must make them from the same, and run the same code."""
    what = [repr(settings)]
    if patched is not None:
        what += patched.lines()
    if inputs is not None:
        corpus = "a stream" if inputs.corpus is None else inputs.corpus.fingerprint
        what += [corpus, repr(inputs.cost), repr(inputs.limits)]
    difference = first_difference("\n".join(what))
    if difference is not None:
        rank, other = difference
        raise ConfigError(
            f"rank {rank} read other settings, manifest or calibration than rank 0:\n{other}\nGive all ranks "
            "the same files; on several nodes, a shared folder."
        )
