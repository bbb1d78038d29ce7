"""Whether a module is LayerNorm or RMSNorm over the last dim, found by trying it.

Names say little: Apex, Transformer Engine, Megatron and every code base have norms of their own, with eps
under several names, weights around 1 or around 0, and outputs in the input's dtype or the weight's. So a
copy of the module with random weights runs on a few random rows, and what comes out is compared with the
definition. A module that does anything else, or holds anything else, is not recognised. Asked once a module
and dtype, and again when what the answer came from has changed since: eps, parameters, the class's forward.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor
EPSILONS = ("eps", "epsilon", "variance_epsilon", "layernorm_epsilon")
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
ANSWERS = "_al_deepspeed_norm"  # on the module: {(dtype, autocast, device type): (state, Known or None)}


@dataclass(frozen=True)
class Known:
    """What a norm computes. affine: it has parameters, so the op must run inside its forward.

    centred_at_zero: the weight is stored as its distance from 1. weight, bias: given with the call, by
    F.layer_norm alone.
    """

    eps: float
    out_dtype: torch.dtype
    rms: bool = False
    affine: bool = False
    centred_at_zero: bool = False
    weight: Tensor | None = None
    bias: Tensor | None = None


class LayerNormCall:
    """F.layer_norm without its input, for code that calls the function."""

    def __init__(self, normalized_shape, weight=None, bias=None, eps: float = 1e-5) -> None:
        self.normalized_shape, self.weight, self.bias, self.eps = tuple(normalized_shape), weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def recognise(norm, x: Tensor, dtype: torch.dtype) -> Known | None:
    """What `norm` computes for x cast to dtype; None when that is not what the op computes."""
    if isinstance(norm, LayerNormCall):
        if norm.normalized_shape != tuple(x.shape[-1:]):
            return None
        autocast = autocast_dtype(x.device.type)
        out_dtype = torch.float32 if autocast is not None and x.is_cuda else dtype
        return Known(norm.eps, out_dtype, weight=norm.weight, bias=norm.bias)
    if not isinstance(norm, nn.Module):
        return None
    answers = norm.__dict__.get(ANSWERS)
    key = (dtype, autocast_dtype(x.device.type), x.device.type)
    if answers is not None and key in answers and answers[key][0] == _state(norm):
        return answers[key][1]
    if torch.compiler.is_compiling() or x.device.type not in ("cpu", "cuda"):
        return None  # a trial cannot be traced: `prepare` asks before that
    return ask(norm, x.shape[-1], dtype, x.device)


def ask(norm: nn.Module, features: int, dtype: torch.dtype, device: torch.device) -> Known | None:
    """Tries the module under the current autocast state, and remembers the answer on it."""
    answers = norm.__dict__.setdefault(ANSWERS, {})
    key = (dtype, autocast_dtype(device.type), device.type)
    state = _state(norm)
    if key not in answers or answers[key][0] != state:
        answers[key] = (state, _try(norm, features, dtype, device) if is_plain(norm) else None)
    return answers[key][1]


def _state(norm: nn.Module) -> tuple:
    """What an answer depends on and a user may change: no weights, they are read at every call."""
    held = tuple((name, None if p is None else p.dtype) for name, p in norm._parameters.items())
    return type(norm).forward, epsilon(norm), held, len(norm._modules), len(norm._buffers)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def epsilon(norm: nn.Module) -> float | None:
    for name in EPSILONS:
        eps = getattr(norm, name, None)
        if isinstance(eps, float | int):
            return float(eps)
    return None


def is_plain(norm: nn.Module) -> bool:
    """Whether the module holds an epsilon, at most a weight and a bias of one dim, and nothing else."""
    held = {name: p for name, p in norm._parameters.items() if p is not None}
    shapes = [getattr(p, "ds_shape", p.shape) for p in held.values()]
    return (
        epsilon(norm) is not None
        and set(held) <= {"weight", "bias"}
        and all(len(shape) == 1 for shape in shapes)
        and not any(buffer is not None for buffer in norm._buffers.values())
        and not norm._modules
    )


def _try(norm: nn.Module, features: int, dtype: torch.dtype, device: torch.device) -> Known | None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 3, features, generator=generator) + 0.5
    rows[1] *= 1e-3  # so that eps matters
    rows = rows.to(device, dtype)
    weights = {
        name: torch.rand(features, generator=generator).to(device, p.dtype) + 0.5
        for name, p in norm._parameters.items()
        if p is not None
    }
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = type(norm).forward(_copy(norm, weights), rows)
            if not isinstance(found, Tensor) or found.shape != rows.shape:
                return None
            for rms in (False, True):
                for centred_at_zero in (False, True) if "weight" in weights else (False,):
                    known = Known(epsilon(norm), found.dtype, rms, bool(weights), centred_at_zero)
                    if _agrees(
                        found, rows, weights, known, min(dtype, found.dtype, key=lambda d: d.itemsize)
                    ):
                        return known
    except Exception:  # whatever a foreign module raises on rows it was not made for
        return None
    return None


def _agrees(found: Tensor, rows: Tensor, weights: dict, known: Known, dtype: torch.dtype) -> bool:
    x = rows.double()
    centred = x if known.rms else x - x.mean(-1, keepdim=True)
    expected = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + known.eps)
    if "weight" in weights:
        expected = expected * (weights["weight"].double() + known.centred_at_zero)
    if "bias" in weights:
        expected = expected + weights["bias"].double()
    return bool(torch.allclose(found.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]))


def _copy(norm: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """The module with other parameters and without hooks; the module itself stays as it is."""
    copy = norm.__class__.__new__(norm.__class__)
    copy.__dict__.update(norm.__dict__)
    for name in ("forward", ANSWERS):
        copy.__dict__.pop(name, None)
    for name, value in norm.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            copy.__dict__[name] = OrderedDict()
    copy.__dict__["_parameters"] = {
        name: nn.Parameter(weights[name], requires_grad=False) if name in weights else None
        for name in norm._parameters
    }
    return copy
