"""Patched twins of a code base's modules, and their results beside those of the originals.

A twin is the module's source, rewritten, in a module object of its own: original and patched classes live
side by side in one process and get the same weights and inputs.
"""

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from al_deepspeed.patching import runtime
from al_deepspeed.patching.rewriter import rewrite
from al_deepspeed.patching.tree import resolver

CALLS = {name: getattr(runtime, name) for name in ("adaln", "residual_adaln", "gated_residual")}
SMALL = (
    0.01  # of the largest: a gradient that is nothing but rounding (of a key's bias) has no size of its own
)


class Twins:
    """Modules of the files, rewritten in this order, each seeing the twins made before it.

    Attributes:
        reached: sites ("file:line") that patched code has called.
    """

    def __init__(self, root: Path, files: list[str], *, observe: bool = True) -> None:
        self.reached: set[str] = set()
        self._modules: dict[str, types.ModuleType] = {}
        for name, call in CALLS.items():
            setattr(runtime, name, self._noting(call, name))
        originals = {name: importlib.import_module(name) for name in map(module_name, files)}
        try:
            for file in files:
                self._modules[module_name(file)] = self._make(root, file, observe)
        finally:
            sys.modules.update(originals)

    def __getitem__(self, name: str) -> types.ModuleType:
        return self._modules[name]

    def _make(self, root: Path, file: str, observe: bool) -> types.ModuleType:
        name = module_name(file)
        source = (root / file).read_text(encoding="utf-8")
        result = rewrite(source, file=file, resolve=resolver(root / file, root, {}), observe=observe)
        twin = types.ModuleType(name)
        twin.__package__ = name.rpartition(".")[0]
        twin.__file__ = str(root / file)
        sys.modules[name] = twin
        exec(compile(result.source, str(root / file), "exec"), twin.__dict__)
        return twin

    def _noting(self, call: Callable, name: str) -> Callable:
        def noted(*args, **kwargs):
            self.reached.add(kwargs.get("site") or name)
            return call(*args, **kwargs)

        return noted


def module_name(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """No weight stays at zero or one, where it would hide a wrong term."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def difference(
    original: nn.Module, patched: nn.Module, *args: Any, call: Callable | None = None, **kwargs: Any
) -> float:
    """Largest difference of outputs and gradients, each over its tensor's size.

    The size of a tensor is its largest value, and not less than a hundredth of the largest value of all.

    Args:
        call: how to run a module on the arguments; by default it is called.
    """
    randomise(original)
    patched.load_state_dict(original.state_dict())
    before = _results(original, call, args, kwargs)
    after = _results(patched, call, args, kwargs)
    assert before.keys() == after.keys(), before.keys() ^ after.keys()
    assert any(name.startswith("gradient") for name in before)
    floor = SMALL * max(tensor.abs().max().item() for tensor in before.values())
    return max(_relative(before[name], after[name], floor) for name in before)


def _results(module: nn.Module, call: Callable | None, args: tuple, kwargs: dict) -> dict[str, torch.Tensor]:
    module.zero_grad()
    args, kwargs = torch.utils._pytree.tree_map(_fresh, (args, kwargs))
    torch.manual_seed(0)
    outputs = _tensors(module(*args, **kwargs) if call is None else call(module, *args, **kwargs))
    generator = torch.Generator().manual_seed(1)
    torch.autograd.backward(outputs, [torch.randn(output.shape, generator=generator) for output in outputs])
    results = {f"output {place}": output.detach() for place, output in enumerate(outputs)}
    for place, value in enumerate(_tensors((args, kwargs))):
        if value.grad is not None:
            results[f"gradient of input {place}"] = value.grad
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            results[f"gradient of {name}"] = parameter.grad.clone()
    return results


def _fresh(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


def _tensors(values: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _relative(before: torch.Tensor, after: torch.Tensor, floor: float) -> float:
    assert before.shape == after.shape and before.dtype == after.dtype
    return (before - after).abs().max().item() / max(before.abs().max().item(), floor)
