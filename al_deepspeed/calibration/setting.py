"""Where a calibration holds: model, device, ZeRO stage and what else the engine in use can tell."""

import copy
import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from al_deepspeed.calibration.file import Setting
from al_deepspeed.config import with_one_micro_batch

MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")


def scan_config(config: dict) -> dict:
    """The ds_config that a scan runs with: that of training without its data loading and monitors."""
    kept = {key: value for key, value in config.items() if key not in ("data_efficiency", *MONITORS)}
    return with_one_micro_batch(copy.deepcopy(kept))


def current_setting(engine: Any, config: dict, capacity_gb: float | None = None) -> Setting:
    """The setting of a live engine and the ds_config it was made from."""
    name = get_accelerator().device_name()
    return Setting(
        device=torch.cuda.get_device_name() if name == "cuda" else name,
        capacity_gb=capacity_gb,
        zero_stage=engine.zero_optimization_stage(),
        ranks=dist.get_world_size(),
        torch=torch.__version__,
        fingerprints={"model": model_fingerprint(engine.module), "ds_config": _digest(scan_config(config))},
    )


def model_fingerprint(model: torch.nn.Module) -> str:
    """Hex digest over each parameter's name, whole shape and whether it is trained, and what is checkpointed.

    Modules of diffusers and transformers hold `gradient_checkpointing`: it changes time and memory alike.
    """
    parameters = [
        [name, list(getattr(parameter, "ds_shape", parameter.shape)), parameter.requires_grad]
        for name, parameter in sorted(model.named_parameters())
    ]
    checkpointed = [
        name
        for name, module in model.named_modules()
        if getattr(module, "gradient_checkpointing", None) is True
    ]
    return _digest([*parameters, *checkpointed])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
