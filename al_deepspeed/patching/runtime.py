"""What rewritten code calls: the fused ops, taking the norm module and operands that broadcast as written.

    adaln(norm, x, shift, scale)                                 norm(x) * (1 + scale) + shift
    residual_adaln(norm, residual, branch, gate, shift, scale)   r = residual + branch * gate, and adaln of r
    gated_residual(residual, branch, gate)                       residual + branch * gate
Never wrong, at worst slower: a norm that is not provably LayerNorm or RMSNorm (recognised.py), operands that
do not fit the op's layouts (broadcasting.py), or dtypes that it does not take, get the expression in eager
PyTorch. An affine norm's weight and bias are read inside that norm's own forward (prepared.py), where ZeRO-3
has gathered them and compiled engines expect them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from al_deepspeed.ops import gated_residual as fused_gated_residual
from al_deepspeed.patching.as_read import are_as_read
from al_deepspeed.patching.broadcasting import Fitted, fit
from al_deepspeed.patching.prepared import (
    is_free,
    is_prepared,
    leave,
    left_alone,
    prepare,
    run,
    run_prepared,
)
from al_deepspeed.patching.recognised import Known, LayerNormCall, recognise

__all__ = [
    "LayerNormCall",
    "adaln",
    "cast",
    "gated_residual",
    "leave",
    "left_alone",
    "prepare",
    "residual_adaln",
    "set_checker",
    "then",
]

Tensor = torch.Tensor
DTypeLike = torch.dtype | str | None
Checker = Callable[[str, Callable, Callable, tuple], Any]
Helpers = tuple[tuple[Any, str, str], ...]


@dataclass
class _Checking:
    checker: Checker | None = None


_checking = _Checking()


def set_checker(checker: Checker | None) -> None:
    """Have calls that carry their original go through `checker(site, original, fused, operands)`.

    Both callables take the operands, norm first where there is one, and return the same outputs.
    """
    _checking.checker = checker


def adaln(
    norm,
    x: Tensor,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    out_dtype: DTypeLike = None,
    norm_dtype: DTypeLike = None,
    in_dtype: DTypeLike = None,
    helpers: Helpers = (),
    otherwise: Callable | None = None,
    site: str | None = None,
    original: Callable | None = None,
) -> Tensor:
    """norm(x) * (1 + scale) + shift.

    Args:
        out_dtype, norm_dtype, in_dtype: what the result, the norm's output or its input was cast to; without
            any the result has the dtype that the expression has. A name ("float32") or a torch dtype; for
            out_dtype also "normed", the dtype of what the norm returned.
        helpers, otherwise: methods and modules whose source the call was read from (as_read.py), and the
            expression with their calls, for when one of them is another by now.
    """

    def fused(norm, x, shift=None, scale=None):
        casts = Casts(_out(out_dtype), dtype_of(norm_dtype), dtype_of(in_dtype))
        return _adaln(norm, x, shift, scale, casts)

    operands = (norm, x, *_given(shift, scale))
    return _at_site(fused, operands, helpers, otherwise, site, original)


def residual_adaln(
    norm,
    residual: Tensor,
    branch: Tensor,
    gate: Tensor | None = None,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    residual_dtype: DTypeLike = None,
    out_dtype: DTypeLike = None,
    norm_dtype: DTypeLike = None,
    in_dtype: DTypeLike = None,
    helpers: Helpers = (),
    otherwise: Callable | None = None,
    site: str | None = None,
    original: Callable | None = None,
) -> tuple[Tensor, Tensor]:
    """The new residual, and norm(new residual) * (1 + scale) + shift.

    Args:
        residual_dtype: what the sum was cast to. The other dtypes as in `adaln`; "residual" is the new
            residual's own.
    """

    def fused(norm, residual, branch, gate=None, shift=None, scale=None):
        if not (isinstance(residual, Tensor) and residual.dim()):
            residual, branch, gate = branch if gate is None else branch * gate, residual, None
        sum_dtype = dtype_of(residual_dtype) or promoted(residual, branch, gate)
        out = _out(out_dtype, sum_dtype)
        casts = Casts(out, *(dtype_of(d, sum_dtype) for d in (norm_dtype, in_dtype)))
        return _residual_adaln(norm, residual, branch, gate, shift, scale, sum_dtype, casts)

    operands = (norm, residual, branch, *_given(gate, shift, scale))
    return _at_site(fused, operands, helpers, otherwise, site, original)


def gated_residual(
    residual: Tensor,
    branch: Tensor,
    gate: Tensor,
    *,
    residual_dtype: DTypeLike = None,
    helpers: Helpers = (),
    otherwise: Callable | None = None,
    site: str | None = None,
    original: Callable | None = None,
) -> Tensor:
    """residual + branch * gate, cast to residual_dtype where one is given."""

    def fused(residual, branch, gate):
        if not (isinstance(residual, Tensor) and residual.dim()):
            return _cast(residual + branch * gate, dtype_of(residual_dtype))
        return _gated_residual(
            residual, branch, gate, dtype_of(residual_dtype) or promoted(residual, branch, gate)
        )

    return _at_site(fused, (residual, branch, gate), helpers, otherwise, site, original)


def cast(value: Tensor, dtype: DTypeLike) -> Tensor:
    """For the originals: `value` in a dtype given as in the ops above."""
    return value.to(dtype_of(dtype))


def then(first: Tensor, following: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """For the originals: a new residual, and what follows from it."""
    return first, following(first)


def _at_site(fused, operands, helpers, otherwise, site, original):
    if not are_as_read(helpers):
        return otherwise(*operands)
    if original is not None and _checking.checker is not None:
        return _checking.checker(site, original, fused, operands)
    return fused(*operands)


def _given(*operands):
    """Without the Nones at the end, so that `original` and `fused` take the same operands."""
    while operands and operands[-1] is None:
        operands = operands[:-1]
    return operands


# dtypes ---------------------------------------------------------------------------------------------------


class Casts(NamedTuple):
    """What y, the norm's output and the norm's input were cast to; None where there was no cast.

    out: "normed" stands for the dtype of the norm's output, before any cast.
    """

    out: torch.dtype | str | None = None
    norm: torch.dtype | None = None
    x: torch.dtype | None = None


def dtype_of(dtype: DTypeLike, residual: torch.dtype | None = None) -> torch.dtype | None:
    if isinstance(dtype, str):
        return residual if dtype == "residual" else getattr(torch, dtype)
    return dtype


def _out(dtype: DTypeLike, residual: torch.dtype | None = None) -> DTypeLike:
    return dtype if dtype == "normed" else dtype_of(dtype, residual)


def promoted(*operands) -> torch.dtype:
    """The dtype of residual + branch * gate, by PyTorch's rules, in a form that can be compiled."""
    residual, *factors = map(_weighed, operands)
    product = factors[0] if len(factors) == 1 or operands[2] is None else _together(*factors)
    return _together(residual, product)[0]


def _weighed(operand) -> tuple[torch.dtype | None, int]:
    """Its dtype, and how much that weighs: numbers and 0-dim tensors only decide whether it is a float."""
    if isinstance(operand, Tensor):
        return operand.dtype, 1 + (operand.dim() > 0)
    return torch.get_default_dtype() if isinstance(operand, float) else torch.int64, 0


def _together(one: tuple[torch.dtype, int], other: tuple[torch.dtype, int]) -> tuple[torch.dtype, int]:
    strong, weak = (one, other) if one[1] >= other[1] else (other, one)
    if strong[1] == weak[1] or weak[0].is_floating_point > strong[0].is_floating_point:
        return torch.promote_types(strong[0], weak[0]), strong[1]
    return strong


def _result_dtype(casts: Casts, normed: torch.dtype, shift, scale) -> torch.dtype:
    if casts.out is not None:
        return normed if casts.out == "normed" else casts.out
    dtype = normed if casts.norm is None else casts.norm
    for operand in (scale, shift):
        if isinstance(operand, Tensor) and operand.dim() > 0:
            dtype = torch.promote_types(dtype, operand.dtype)
    return dtype


# The ops, or the same in eager PyTorch --------------------------------------------------------------------


def _adaln(norm, x, shift, scale, casts: Casts) -> Tensor:
    known = _known(norm, x, casts.x or x.dtype)
    fitted = None if known is None else fit(x, None, None, shift, scale)
    if fitted is None:
        return _eager_adaln(norm, x, shift, scale, casts)
    return _run(norm, known, fitted, _result_dtype(casts, known.out_dtype, shift, scale))


def _residual_adaln(norm, residual, branch, gate, shift, scale, sum_dtype, casts: Casts):
    known = _known(norm, residual, casts.x or sum_dtype) if _wider(sum_dtype, residual.dtype) else None
    fitted = None if known is None else fit(residual.to(sum_dtype), branch, gate, shift, scale)
    if fitted is None:
        residual = _gated_residual(residual, branch, gate, sum_dtype)
        return residual, _adaln(norm, residual, shift, scale, casts)
    return _run(norm, known, fitted, _result_dtype(casts, known.out_dtype, shift, scale))


def _known(norm, x: Tensor, dtype: torch.dtype) -> Known | None:
    """What the norm computes, when the op may compute it in its place."""
    known = recognise(norm, x, dtype) if is_free(norm) and not _is_transformed() else None
    if known is not None and known.affine and not is_prepared(norm) and not prepare(norm):
        return None
    return known


def _run(norm, known: Known, fitted: Fitted, out_dtype: torch.dtype):
    if known.affine:
        return run_prepared(norm, known, fitted, out_dtype)
    return run(known, known.weight, known.bias, fitted, out_dtype)


def _gated_residual(residual, branch, gate, sum_dtype: torch.dtype) -> Tensor:
    fits = gate is not None and _wider(sum_dtype, residual.dtype) and not _is_transformed()
    fitted = fit(residual.to(sum_dtype), branch, gate, None, None) if fits else None
    if fitted is None:
        return _eager_sum(residual, branch, gate, sum_dtype)
    return fused_gated_residual(fitted.x, fitted.branch, fitted.gate, layout=fitted.layout)


@torch.compiler.assume_constant_result  # compiled graphs are guarded by the transforms they were made under
def _is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work: the op has rules for neither."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _wider(dtype: torch.dtype, than: torch.dtype) -> bool:
    return torch.promote_types(dtype, than) == dtype


def _eager_sum(residual, branch, gate, dtype: torch.dtype) -> Tensor:
    return (residual + (branch if gate is None else branch * gate)).to(dtype)


def _eager_adaln(norm, x, shift, scale, casts: Casts) -> Tensor:
    y = norm(_cast(x, casts.x))
    out = y.dtype if casts.out == "normed" else casts.out
    y = _cast(y, casts.norm)
    y = y if scale is None else y * (1 + scale)
    y = y if shift is None else y + shift
    return _cast(y, out)


def _cast(value, dtype: torch.dtype | None):
    return value if dtype is None else value.to(dtype)
