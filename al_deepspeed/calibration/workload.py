"""What a scan runs: the user's own model and, for any (B, shape), a synthetic batch and its loss.

A factory is a function of the user's, named `pkg.mod:function`:

    def factory(arguments: list[str], ds_config: dict):
        model = ...                                # as the training script builds it
        def synthetic(batch_size, shape):          # shape: latent frames, height, width
            batch = {"latent": torch.randn(batch_size, 16, *shape), ...}
            return batch, loss
        return model, synthetic

    def loss(engine, batch): ...                   # a scalar, computed as in the training loop

`arguments` are those after `--` on the command line, such as `--pretrained NAME`. What the factory changes in
`ds_config`, as the training script does by its own options, holds for the engine too. A batch is a tensor, or
lists, tuples and dicts of tensors; it is moved to the device before the clock starts.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from al_deepspeed.errors import CalibrationError

Shape = tuple[int, int, int]
Loss = Callable[[Any, Any], torch.Tensor]
Synthetic = Callable[[int, Shape], tuple[Any, Loss]]
Factory = Callable[[list[str], dict], tuple[torch.nn.Module, Synthetic]]


def read_shape(text: str) -> Shape | None:
    """`5x60x104` as (5, 60, 104); None where it is no shape."""
    sides = text.split("x")
    if len(sides) != 3 or not all(side.isdigit() and int(side) > 0 for side in sides):
        return None
    return int(sides[0]), int(sides[1]), int(sides[2])


def load_factory(name: str) -> Factory:
    """The function that `pkg.mod:function` names; modules of the working directory are found too."""
    module_name, separator, function_name = name.partition(":")
    if not (module_name and separator and function_name):
        raise CalibrationError(f"--factory is {name!r}; allowed: pkg.mod:function, as in an import.")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except ModuleNotFoundError as error:
        raise CalibrationError(
            f"--factory is {name!r}, but {error.name} cannot be imported from {folder}. Install it, set "
            "PYTHONPATH, or start from the folder that holds it."
        ) from error
    if not callable(function):
        raise CalibrationError(f"--factory is {name!r}, but {module_name} has no function {function_name}.")
    return function


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on the device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
