"""Whether a module is LayerNorm or RMSNorm over the last dim, found by trying it.

Names say little: Apex, Transformer Engine, Megatron and every code base have norms of their own, with eps
under several names, weights around 1 or around 0, and outputs in the input's dtype or the weight's. So a
copy of the module with random weights runs on a few random rows, and what comes out is compared with the
definition. A module that does anything else, or holds anything else, is not recognised. Asked once a module
and dtype, and again when what the answer came from has changed since: eps and other plain attributes (which
compiled code does not see), parameters, the class's forward.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor
EPSILONS = ("eps", "epsilon", "variance_epsilon", "layernorm_epsilon")
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
ANSWERS = "_al_deepspeed_norm"  # on the module: {(dtype, autocast, device type): (state, settings, answer)}
IGNORED = frozenset([*vars(nn.Module()), ANSWERS, "forward", "__getstate__"])
PLAIN = frozenset([bool, int, float, str, tuple, torch.Size, torch.dtype, type(None)])
_answers: dict[tuple, Known | None] = {}


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
        if norm.normalized_shape != tuple(x.shape[-1:]) or x.device.type not in ("cpu", "cuda"):
            return None
        autocast = autocast_dtype(x.device.type)
        out_dtype = torch.float32 if autocast is not None and x.is_cuda else dtype
        return Known(norm.eps, out_dtype, weight=norm.weight, bias=norm.bias)
    if not isinstance(norm, nn.Module) or x.device.type not in ("cpu", "cuda"):
        return None
    answers = norm.__dict__.get(ANSWERS)
    key = (dtype, autocast_dtype(x.device.type), x.device.type)
    compiling = torch.compiler.is_compiling()
    if answers is not None and key in answers and answers[key][0] == _state(norm):  # noqa: SIM102
        if compiling or answers[key][1] == _settings(norm):
            return answers[key][2]
    if compiling:
        return None  # a trial cannot be traced: `prepare` asks before that
    return ask(norm, x.shape[-1], dtype, x.device)


def ask(norm: nn.Module, features: int, dtype: torch.dtype, device: torch.device) -> Known | None:
    """Tries the module under the current autocast state, and remembers the answer on it."""
    answers = norm.__dict__.setdefault(ANSWERS, {})
    key = (dtype, autocast_dtype(device.type), device.type)
    state, settings = _state(norm), _settings(norm)
    if key not in answers or answers[key][:2] != (state, settings):
        known = _tried(norm, features, key, state, settings) if is_plain(norm) else None
        answers[key] = (state, settings, known)
    return answers[key][2]


def _tried(norm: nn.Module, features: int, key: tuple, state: tuple, settings: tuple) -> Known | None:
    """Norms of one class that hold the same settings and nothing else are tried once."""
    if len(settings) < len(norm.__dict__.keys() - IGNORED):
        return _try(norm, features, key[0], torch.device(key[2]))
    alike = (type(norm), features, key, state, repr(settings))
    if alike not in _answers:
        _answers[alike] = _try(norm, features, key[0], torch.device(key[2]))
    return _answers[alike]


def _settings(norm: nn.Module) -> tuple:
    """The plain values among its attributes."""
    held = norm.__dict__.items()
    return tuple(pair for pair in held if type(pair[1]) in PLAIN and pair[0] not in IGNORED)


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
    """Whether the module holds an epsilon, at most a weight and a bias of one dim, and nothing else.

    A tensor that is no parameter may be one that a wrapper has taken away and sets anew at every step.
    """
    held = {name: p for name, p in norm._parameters.items() if p is not None}
    shapes = [getattr(p, "ds_shape", p.shape) for p in held.values()]
    return (
        epsilon(norm) is not None
        and set(held) <= {"weight", "bias"}
        and all(len(shape) == 1 for shape in shapes)
        and not any(buffer is not None for buffer in norm._buffers.values())
        and not norm._modules
        and not any(isinstance(value, Tensor) for value in norm.__dict__.values())
    )


@dataclass(frozen=True)
class _Trial:
    """Rows and weights on which a norm is tried; the weights by name."""

    rows: Tensor
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, norm: nn.Module, features: int, dtype: torch.dtype, device: torch.device) -> _Trial:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(2, 4, features, generator=generator) + 0.5
        rows[1] *= 1e-3  # so that eps matters
        rows[0, 2] *= 30
        rows[0, 3] = 0.0
        rows[0, 3, 0] = 100.0  # so that its normed value is large too
        weights = {}
        for name, parameter in norm._parameters.items():
            if parameter is not None:
                weight = torch.rand(features, generator=generator) + 0.5
                weight[::2] *= -1
                weights[name] = weight.to(device, parameter.dtype)
        return cls(rows.to(device, dtype), weights)

    def run(self, norm: nn.Module, training: bool) -> Tensor:
        copy = _copy(norm, self.weights, training)
        held = dict(vars(copy))
        y = type(norm).forward(copy, self.rows)
        new = [value for name, value in vars(copy).items() if value is not held.get(name)]
        if any(isinstance(value, Tensor | int | float) and type(value) is not bool for value in new):
            raise ValueError("it keeps a statistic of what passes through it")
        return y

    def definition(self, known: Known) -> Tensor:
        x = self.rows.double()
        centred = x if known.rms else x - x.mean(-1, keepdim=True)
        expected = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + known.eps)
        if "weight" in self.weights:
            expected = expected * (self.weights["weight"].double() + known.centred_at_zero)
        if "bias" in self.weights:
            expected = expected + self.weights["bias"].double()
        return expected

    def gradients(self, y: Tensor) -> list[Tensor]:
        """Of a fixed projection of y, by the rows and the weights."""
        projection = torch.linspace(-1.0, 1.0, y.numel(), dtype=torch.float64).reshape(y.shape).to(y.device)
        leaves = [self.rows, *self.weights.values()]
        found = torch.autograd.grad((y.double() * projection).sum(), leaves, allow_unused=True)
        return [torch.zeros(()) if one is None else one.double() for one in found]


def _try(norm: nn.Module, features: int, dtype: torch.dtype, device: torch.device) -> Known | None:
    """In training with gradients, and in evaluation without: both must be the definition."""
    with _apart(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trial = _Trial.of(norm, features, dtype, device)
            for leaf in (trial.rows, *trial.weights.values()):
                leaf.requires_grad_()
            found = trial.run(norm, training=True)
            with torch.no_grad():
                evaluated = trial.run(norm, training=False)
            return next(
                (one for one in _candidates(norm, trial, found) if _is(one, trial, found, evaluated)), None
            )
        except Exception:  # whatever a foreign module raises on rows it was not made for
            return None


def _candidates(norm: nn.Module, trial: _Trial, found: Tensor) -> Iterator[Known]:
    if isinstance(found, Tensor) and found.shape == trial.rows.shape:
        affine = bool(trial.weights)
        for rms in (False, True):
            for centred_at_zero in (False, True) if "weight" in trial.weights else (False,):
                yield Known(epsilon(norm), found.dtype, rms, affine, centred_at_zero)


def _is(known: Known, trial: _Trial, found: Tensor, evaluated: Tensor) -> bool:
    """Whether outputs and gradients are those of the definition."""
    expected = trial.definition(known)
    tolerance = TOLERANCES[min(trial.rows.dtype, found.dtype, key=lambda dtype: dtype.itemsize)]
    for one in (found, evaluated):
        if one.dtype != found.dtype or not torch.allclose(one.double(), expected, tolerance, tolerance):
            return False
    pairs = zip(trial.gradients(found), trial.gradients(expected), strict=True)
    return all(bool((one - other).norm() <= 0.1 * other.norm()) for one, other in pairs)


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Gradients on, random state kept, and no saved tensor seen by an enclosing checkpoint."""
    devices = [device] if device.type == "cuda" else []
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=devices),
        torch.autograd.graph.saved_tensors_hooks(_same, _same),
    ):
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _copy(norm: nn.Module, weights: dict[str, Tensor], training: bool) -> nn.Module:
    """The module with other parameters and without hooks; the module itself stays as it is."""
    copy = norm.__class__.__new__(norm.__class__)
    copy.__dict__.update(norm.__dict__)
    for name, value in norm.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            copy.__dict__[name] = OrderedDict()
    copy.__dict__["training"] = training
    copy.__dict__["_parameters"] = {name: weights.get(name) for name in norm._parameters}
    return copy
