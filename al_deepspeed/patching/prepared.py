"""The op inside an affine norm's own forward.

ZeRO-3 gathers a module's parameters in hooks around its forward, and a compiled engine traces them there.
So an affine norm gets a forward that still takes x, and also takes the op's operands; rewritten code then
calls the module. Norms that somebody else works on (hooks, another forward) are left alone.
"""

from __future__ import annotations

import copy
import weakref
from functools import partial

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from al_deepspeed.ops import adaln as fused_adaln
from al_deepspeed.ops import residual_adaln as fused_residual_adaln
from al_deepspeed.patching.broadcasting import DTYPES, Fitted
from al_deepspeed.patching.recognised import Known, ask, is_plain

Tensor = torch.Tensor
FUSED = "al_deepspeed"  # stands between x and the op's operands
left_alone: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def leave(norm: nn.Module) -> None:
    """Have this norm run as the module it is, in every call."""
    left_alone.add(norm)


def is_free(norm) -> bool:
    """Whether nobody else hooks into the norm or all modules. DeepSpeed's hooks only gather parameters."""
    if not isinstance(norm, nn.Module):
        return True
    if _has_any_global_hook() or not calls_forward(type(norm)):
        return False
    if len(left_alone) and norm in left_alone:
        return False
    if "forward" in norm.__dict__ and not is_prepared(norm):
        return False
    for hooks in (
        norm._forward_hooks,
        norm._forward_pre_hooks,
        norm._backward_hooks,
        norm._backward_pre_hooks,
    ):
        for hook in hooks.values():
            if not (getattr(hook, "__module__", None) or "").startswith("deepspeed."):
                return False
    return True


@torch.compiler.assume_constant_result
def calls_forward(cls: type) -> bool:
    """Whether calling the module is nothing but its forward and hooks."""
    return cls.__call__ is nn.Module.__call__


def is_prepared(norm: nn.Module) -> bool:
    forward = norm.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is _forward and forward.args[0] is norm


def prepare(norm: nn.Module) -> bool:
    """Make a norm ready for rewritten code, before compilation; again and again changes nothing.

    Returns:
        Whether calls with this norm can run the fused op.
    """
    if not (isinstance(norm, nn.Module) and is_free(norm) and is_plain(norm)):
        return False
    if not torch.compiler.is_compiling():
        _ask_ahead(norm)
    if is_prepared(norm):
        return True
    if torch.compiler.is_compiling():
        return False
    if any(parameter is not None for parameter in norm._parameters.values()):
        vars(norm).update(_bound(norm))
    return True


def _bound(norm: nn.Module) -> dict:
    """What a prepared norm holds of itself; not bound methods: they can be pickled."""
    return {"forward": partial(_forward, norm), "__getstate__": partial(_State, norm)}


class _State(dict):
    """What copies of a prepared norm are made of: a shallow one is not prepared, others each for itself."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(vars(norm))
        self.norm = norm
        for name in _bound(norm):
            del self[name]

    def __deepcopy__(self, memo: dict) -> dict:
        return copy.deepcopy(dict(self), memo) | _bound(memo[id(self.norm)])

    def __reduce__(self) -> tuple:
        return dict, ({**self, **_bound(self.norm)},)


def _ask_ahead(norm: nn.Module) -> None:
    """What the norm computes, for the dtypes a compiled model may call it with."""
    features = _features(norm)
    if features is None:
        return
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in map(torch.device, devices):
        for dtype in DTYPES["cuda"]:
            for autocast in (None, torch.bfloat16, torch.float16):
                enabled = autocast is not None
                with torch.autocast(device.type, dtype=autocast or torch.bfloat16, enabled=enabled):
                    ask(norm, features, dtype, device)


def _features(norm: nn.Module) -> int | None:
    for parameter in norm._parameters.values():
        if parameter is not None:
            return getattr(parameter, "ds_shape", parameter.shape)[0]
    shape = getattr(norm, "normalized_shape", None)
    if isinstance(shape, int):
        return shape
    return shape[0] if shape is not None and len(shape) == 1 else None


def run_prepared(norm: nn.Module, known: Known, fitted: Fitted, out_dtype: torch.dtype):
    """The op in the norm's forward. Only builtin types and tensors go in: ZeRO's hooks look at them."""
    how = (fitted.layout, str(out_dtype).rpartition(".")[2], known.eps, known.rms, known.centred_at_zero)
    return norm(fitted.x, FUSED, fitted.branch, fitted.gate, fitted.shift, fitted.scale, *how)


def _forward(norm: nn.Module, *inputs, **keywords):
    if len(inputs) < 2 or not (isinstance(inputs[1], str) and inputs[1] == FUSED):
        return type(norm).forward(norm, *inputs, **keywords)
    x, _, branch, gate, shift, scale, layout, out_dtype, eps, rms, centred_at_zero = inputs
    known = Known(eps, getattr(torch, out_dtype), rms, True, centred_at_zero)
    weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
    return run(known, weight, bias, Fitted(x, branch, gate, shift, scale, layout), known.out_dtype)


def run(known: Known, weight, bias, fitted: Fitted, out_dtype: torch.dtype):
    """adaln, or residual_adaln where there is a branch."""
    if known.centred_at_zero:
        weight = weight + 1
    how = {
        "weight": weight,
        "bias": bias,
        "eps": known.eps,
        "out_dtype": out_dtype,
        "layout": fitted.layout,
        "norm": "rms" if known.rms else "layer",
    }
    if fitted.branch is None:
        return fused_adaln(fitted.x, fitted.shift, fitted.scale, **how)
    return fused_residual_adaln(fitted.x, fitted.branch, fitted.gate, fitted.shift, fitted.scale, **how)
