"""Whether a helper that the matcher saw through is still the one that runs.

`self.modulate(self.norm(x), shift, scale)` was read as what `Block.modulate` computes. A subclass in another
file may bring its own, an attribute may hold another module, a module may carry hooks, a name of the module
may stand for another function by now. So a rewritten call names each such function, and asks here before it
stands in for it; when the answer is no, the original expression runs. A helper that is edited in its own
place after the rewriting is not noticed.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import nn

from al_deepspeed.patching.prepared import is_free

WRAPPED = ("_torchdynamo_orig_callable", "_torchdynamo_inline")  # compilers, which change no result


def are_as_read(helpers: tuple[tuple[Any, str, str], ...]) -> bool:
    """helpers: (object, module, "Class.method") of each function that was read through the object.

    For a free function (the function, its module, its name).
    """
    for holder, module, name in helpers:
        if "." not in name:
            if not _is_function(holder, module, name):
                return False
            continue
        method = name.rpartition(".")[2]
        runs = getattr(holder, method, None)  # read like this, a compiled graph is guarded against others
        if runs is None or method in holder.__dict__ or not _is_read(type(holder), method, module, name):
            return False
        if method == "forward" and isinstance(holder, nn.Module) and not is_free(holder):
            return False
    return True


@torch.compiler.assume_constant_result
def _is_function(found: Any, module: str, name: str) -> bool:
    """Whether this is the function that was read there."""
    for wrapped in WRAPPED:
        found = getattr(found, wrapped, found)
    if not isinstance(found, FunctionType) or hasattr(found, "__wrapped__"):
        return False
    return (found.__module__, found.__qualname__) == (module, name)


@torch.compiler.assume_constant_result
def _is_read(cls: type, method: str, module: str, name: str) -> bool:
    """Whether the class gets the method from where it was read, without a wrapper around it."""
    found = next((vars(base)[method] for base in cls.__mro__ if method in vars(base)), None)
    return _is_function(getattr(found, "__func__", found), module, name)
