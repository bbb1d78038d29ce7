"""What `launch/train_wan.py` takes on its command line, and the ds_config that comes of it."""

import argparse
import json
from pathlib import Path

from al_deepspeed.config import load_config
from al_deepspeed.errors import ConfigError
from al_deepspeed.training import wan
from al_deepspeed.training.objective import TIMESTEPS


def parser(description: str, *, for_a_run: bool = True) -> argparse.ArgumentParser:
    """The trainer's arguments, in groups; for a calibration without the need for --config and --run."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # from the launcher

    run = arguments.add_argument_group("run")
    run.add_argument("--config", required=for_a_run, help="ds_config, for example launch/configs/zero3.json")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of it")
    run.add_argument(
        "--precision", choices=["config", "fp32"], default="config", help="fp32: no half precision"
    )
    run.add_argument("--run", required=for_a_run, type=Path, metavar="DIR", help="the run's own folder")
    run.add_argument("--epochs", type=_positive, default=1, help="epochs in all (default 1)")
    run.add_argument("--max-steps", type=_positive, metavar="N", help="optimizer steps in all, at most")
    run.add_argument("--save-every", type=_positive, metavar="N", help="steps (default: at the end only)")
    run.add_argument("--keep", type=_positive, default=2, metavar="N", help="checkpoints kept (default 2)")
    run.add_argument("--resume", action="store_true", help="go on from the last checkpoint, if there is one")

    model = arguments.add_argument_group("model")
    weights = model.add_mutually_exclusive_group()
    weights.add_argument("--preset", choices=list(wan.PRESETS), default="tiny", help="random weights")
    weights.add_argument("--pretrained", metavar="NAME_OR_DIR", help="hub repository or diffusers folder")
    model.add_argument(
        "--layers", type=_positive, metavar="N", help="the first N blocks alone, for measuring"
    )
    model.add_argument("--gradient-checkpointing", action="store_true", help="compute activations twice")

    objective = arguments.add_argument_group("objective")
    objective.add_argument("--timesteps", choices=list(TIMESTEPS), default="logit_normal")
    objective.add_argument("--shift", type=float, default=3.0, help="timestep shift; 1 is none (default 3)")
    objective.add_argument("--condition-dropout", type=float, default=0.1, metavar="P", help="(default 0.1)")

    validation = arguments.add_argument_group("validation, with fixed noise")
    validation.add_argument("--validate-every", type=_positive, metavar="N", help="steps (default: never)")
    validation.add_argument(
        "--validation-manifest", metavar="FILE", help="held-out samples (default: corpus)"
    )
    validation.add_argument("--validation-samples", type=_positive, default=1, metavar="N", help="a shape")
    return arguments


def changed_config(config: str | dict, changes: list[str], precision: str) -> dict:
    """The ds_config after `KEY=VALUE` changes, as a new dictionary.

    Args:
        config: path or dictionary.
        changes: dotted keys; a value is JSON, or else taken as a string.
        precision: "fp32" takes every half-precision section out, as CPUs want; "config" leaves them.
    """
    config = load_config(config)
    for change in changes:
        key, separator, value = change.partition("=")
        if not separator:
            raise ConfigError(f"--set {change}: write KEY=VALUE, for example zero_optimization.stage=2.")
        *parents, last = key.split(".")
        place = config
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {change}: {parent} is {place!r}, which holds no keys.")
        place[last] = _json_or_string(value)
    if precision == "fp32":
        for section in ("bf16", "fp16", "torch_autocast"):
            config.pop(section, None)
    return config


def _json_or_string(value: str) -> object:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value
