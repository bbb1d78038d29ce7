"""Operands that broadcast, as the fused ops take them.

The original expression aligned shapes from the right; the ops name rows by sample and group. A modulation
that is constant along all axes but a leading run of them has one row a sample, frame or token of [B, ...,
D]; one that varies along the second of two axes alone has one row a sample of [S, B, D]. Everything else
does not fit.

What to do follows from shapes, strides, dtypes and devices alone, so it is found out once for each: a model
asks for the same few in every layer of every step, and the host has no time to lose there.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

Tensor = torch.Tensor
DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
DTYPES["cuda"] = DTYPES["cpu"][:3]


class Fitted(NamedTuple):
    x: Tensor
    branch: Tensor | None
    gate: Tensor | None
    shift: Tensor | None
    scale: Tensor | None
    layout: str


def fit(x, branch, gate, shift, scale) -> Fitted | None:
    """The operands in the ops' shapes, views of those given; None when the ops have no rule for them."""
    operands = (x, branch, gate, shift, scale)
    if x is None or not all(one is None or isinstance(one, Tensor) for one in operands):
        return None
    read = _read if torch.compiler.is_compiling() else _read_once
    reading = read(*map(_described, operands))
    if reading is None:
        return None
    if reading.swapped:
        branch, gate = gate, branch
    views = (_viewed(m, view) for m, view in zip((gate, shift, scale), reading.views, strict=True))
    return Fitted(x, branch, *views, reading.layout)


class _Operand(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _View(NamedTuple):
    """Steps from an operand to what the op takes. A step that changes nothing is left out: each costs the
    host time, in the backward pass too.

    narrowed: axes that were only expanded. aligned, expanded, merged: the shapes after each further step.
    """

    narrowed: tuple[int, ...]
    aligned: tuple[int, ...] | None
    expanded: tuple[int, ...] | None
    merged: tuple[int, ...] | None


class _Reading(NamedTuple):
    """swapped: a product may be written either way round. views: of gate, shift and scale."""

    layout: str
    swapped: bool
    views: tuple[_View | None, ...]


def _described(operand: Tensor | None) -> _Operand | None:
    if operand is None:
        return None
    return _Operand(operand.shape, operand.stride(), operand.dtype, operand.device)


def _viewed(modulation: Tensor | None, view: _View | None) -> Tensor | None:
    if view is None:
        return modulation
    for axis in view.narrowed:
        modulation = modulation.narrow(axis, 0, 1)
    if view.aligned is not None:
        modulation = modulation.reshape(view.aligned)
    if view.expanded is not None:
        modulation = modulation.expand(view.expanded)
    return modulation if view.merged is None else modulation.reshape(view.merged)


def _read(x: _Operand, branch, gate, shift, scale) -> _Reading | None:
    if len(x.shape) < 2 or x.dtype not in DTYPES.get(x.device.type, ()):
        return None
    swapped = False
    if branch is not None:
        if gate is not None and gate.shape == x.shape != branch.shape:
            branch, gate, swapped = gate, branch, True
        if branch.shape != x.shape or not branch.dtype.is_floating_point or branch.device != x.device:
            return None
    modulations = (gate, shift, scale)
    if not all(m is None or _broadcasts(m, x) for m in modulations):
        return None
    aligned = [None if m is None else _aligned(m, len(x.shape)) for m in modulations]
    layout, whole = _layout(x.shape, [shape for shape in aligned if shape is not None])
    if layout is None:
        return None
    # The ops take one axis of samples and one of groups.
    merged = whole if len(whole) <= 3 else (whole[0], prod(whole[1:-1]), whole[-1])
    views = [
        None if m is None else _view(m, shape, whole, merged)
        for m, shape in zip(modulations, aligned, strict=True)
    ]
    return _Reading(layout, swapped, tuple(views))


_read_once = lru_cache(maxsize=4096)(_read)


def _broadcasts(modulation: _Operand, x: _Operand) -> bool:
    if not 0 < len(modulation.shape) <= len(x.shape) or modulation.shape[-1] != x.shape[-1]:
        return False
    if not modulation.dtype.is_floating_point or modulation.dtype == torch.float64 != x.dtype:
        return False
    if modulation.device != x.device:
        return False
    sizes = x.shape[len(x.shape) - len(modulation.shape) : -1]
    return all(m in (1, n) for m, n in zip(modulation.shape[:-1], sizes, strict=True))


def _aligned(modulation: _Operand, dims: int) -> tuple[int, ...]:
    """Its shape with x's number of dims, and size 1 again along axes that were only expanded."""
    narrowed = [1 if axis in _expanded(modulation) else size for axis, size in enumerate(modulation.shape)]
    return (1,) * (dims - len(narrowed)) + tuple(narrowed)


def _expanded(modulation: _Operand) -> tuple[int, ...]:
    axes = range(len(modulation.shape) - 1)
    return tuple(axis for axis in axes if modulation.shape[axis] > 1 and modulation.stride[axis] == 0)


def _layout(x_shape, aligned: list[tuple[int, ...]]) -> tuple[str | None, tuple[int, ...]]:
    """(layout, the shape that the modulations have together), for x's layout as they vary over it."""
    axes, features = tuple(x_shape[:-1]), x_shape[-1]
    sizes = [max([1, *(shape[axis] for shape in aligned)]) for axis in range(len(axes))]
    last = max([0, *(axis for axis, size in enumerate(sizes) if size > 1)])
    if len(axes) == 2 and last == 1 and sizes[0] == 1 < axes[0]:
        return "sbd", (*sizes, features)
    if any(size != axis for size, axis in zip(sizes[1 : last + 1], axes[1 : last + 1], strict=True)):
        return None, ()
    return "bsd", (*axes[: last + 1], *[1] * (len(axes) - last - 1), features)


def _view(modulation: _Operand, aligned, whole, merged) -> _View:
    return _View(
        narrowed=_expanded(modulation),
        aligned=aligned if len(aligned) != len(modulation.shape) else None,
        expanded=whole if whole != aligned else None,
        merged=merged if merged != whole else None,
    )
