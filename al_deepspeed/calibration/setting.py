"""Where a calibration holds: model, device, ZeRO stage and what else the engine in use can tell."""

import copy
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from al_deepspeed.calibration.file import Setting, write_json
from al_deepspeed.config import with_one_micro_batch
from al_deepspeed.errors import CalibrationError

FILE_NAME = "setting.json"
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


def write_setting(setting: Setting, run_dir: Path) -> None:
    """RUN/setting.json, beside the telemetry that was measured there; of a resumed run the latest."""
    write_json(asdict(setting), run_dir / FILE_NAME)


def read_setting(run_dir: Path) -> Setting:
    """A run's setting; nothing known where the run kept none."""
    path = run_dir / FILE_NAME
    if not path.is_file():
        return Setting()
    try:
        return Setting(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CalibrationError(
            f"{path} is no setting of this version ({type(error).__name__}: {error}). Remove it, or give "
            "another run."
        ) from error


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
