"""Operands that broadcast, as the fused ops take them.

The original expression aligned shapes from the right; the ops name rows by sample and group. A modulation
that is constant along all axes but a leading run of them has one row a sample, frame or token of [B, ...,
D]; one that varies along the second of two axes alone has one row a sample of [S, B, D]. Everything else
does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

Tensor = torch.Tensor
DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
DTYPES["cuda"] = DTYPES["cpu"][:3]


@dataclass(frozen=True)
class Fitted:
    x: Tensor
    branch: Tensor | None
    gate: Tensor | None
    shift: Tensor | None
    scale: Tensor | None
    layout: str


def fit(x, branch, gate, shift, scale) -> Fitted | None:
    """The operands in the ops' shapes, views of those given; None when the ops have no rule for them."""
    if not isinstance(x, Tensor) or x.dim() < 2 or x.dtype not in DTYPES.get(x.device.type, ()):
        return None
    if branch is not None:
        if gate is not None and _has_shape(gate, x) and not _has_shape(branch, x):
            branch, gate = gate, branch  # a product may be written either way round
        if not _has_shape(branch, x) or not branch.is_floating_point() or branch.device != x.device:
            return None
    given = [m for m in (gate, shift, scale) if m is not None]
    if not all(_broadcasts(m, x) for m in given):
        return None
    aligned = [None if m is None else _aligned(m, x.dim()) for m in (gate, shift, scale)]
    sizes = [1] * (x.dim() - 1)
    for modulation in aligned:
        if modulation is not None:
            sizes = [max(a, b) for a, b in zip(sizes, modulation.shape[:-1], strict=True)]
    layout, shape, grouped = _layout(x.shape, sizes)
    if layout is None:
        return None
    placed = [None if m is None else _placed(m, shape, grouped) for m in aligned]
    return Fitted(x, branch, *placed, layout)


def _has_shape(operand, x: Tensor) -> bool:
    return isinstance(operand, Tensor) and operand.shape == x.shape


def _broadcasts(modulation, x: Tensor) -> bool:
    if not isinstance(modulation, Tensor) or not 0 < modulation.dim() <= x.dim():
        return False
    if not modulation.is_floating_point() or modulation.dtype == torch.float64 != x.dtype:
        return False
    if modulation.device != x.device or modulation.shape[-1] != x.shape[-1]:
        return False
    sizes = x.shape[x.dim() - modulation.dim() : -1]
    return all(m in (1, n) for m, n in zip(modulation.shape[:-1], sizes, strict=True))


def _aligned(modulation: Tensor, dims: int) -> Tensor:
    """With x's number of dims, and size 1 again along axes that were only expanded."""
    for axis in range(modulation.dim() - 1):
        if modulation.shape[axis] > 1 and modulation.stride(axis) == 0:
            modulation = modulation.narrow(axis, 0, 1)
    missing = dims - modulation.dim()
    return modulation.reshape((1,) * missing + tuple(modulation.shape)) if missing else modulation


def _placed(modulation: Tensor, sizes: list[int], shape: tuple[int, ...]) -> Tensor:
    """Views that change nothing are left out: each costs the host time, in the backward pass too."""
    whole = (*sizes, modulation.shape[-1])
    if modulation.shape != whole:
        modulation = modulation.expand(whole)
    return modulation if modulation.shape == shape else modulation.reshape(shape)


def _layout(x_shape, sizes: list[int]) -> tuple[str | None, list[int], tuple[int, ...]]:
    """(layout, sizes to expand to, shape that the op takes) for modulations that vary along `sizes`."""
    axes, features = list(x_shape[:-1]), x_shape[-1]
    last = max([0, *[axis for axis, size in enumerate(sizes) if size > 1]])
    if len(axes) == 2 and last == 1 and sizes[0] == 1 < axes[0]:
        return "sbd", sizes, (axes[1], features)
    leading = axes[: last + 1]
    if any(size != axis for size, axis in zip(sizes[1 : last + 1], leading[1:], strict=True)):
        return None, sizes, ()
    shape = leading + [1] * (len(axes) - len(leading))
    if last == 0:
        return "bsd", shape, (axes[0], features)
    return "bsd", shape, (axes[0], prod(leading[1:]), features)
