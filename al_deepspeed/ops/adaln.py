"""Fused AdaLN for diffusion transformers: `adaln`, `residual_adaln` and `gated_residual`.

    adaln(x)                   y = LN(x) * (1 + scale) + shift
    residual_adaln(r, branch)  r' = r + branch * gate;  y = LN(r') * (1 + scale) + shift
    gated_residual(r, branch)  r' = r + branch * gate
reference.py is the definition, placement.py says which modulation row a row of x takes. CUDA tensors use the
kernels of csrc/ when the backend has them, all others the reference. Under tensor or sequence parallelism the
gradients are this rank's partial sums; nothing here communicates.
"""

import torch

from al_deepspeed.ops import library as _library  # noqa: F401  defines the ops
from al_deepspeed.ops import reference
from al_deepspeed.ops.backend import uses_ops
from al_deepspeed.ops.placement import place

Tensor = torch.Tensor
_adaln, _residual_adaln, _gated_residual = (
    getattr(torch.ops.al_deepspeed, name).default for name in ("adaln", "residual_adaln", "gated_residual")
)
NORMS = {"layer": False, "rms": True}
BACKWARDS = {"auto": False, "one_pass": False, "dtile": True}


def adaln(
    x: Tensor,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
    layout: str | None = None,
    cu_seqlens: Tensor | None = None,
    token_offset: int = 0,
    tokens_per_group: int | None = None,
    norm: str = "layer",
    backward: str = "auto",
) -> Tensor:
    """LayerNorm (or RMSNorm) over the last dim, then `* (1 + scale) + shift`.

    Args:
        x: [B, S, D], [B, T, H, W, D], or [S, B, D] with `layout="sbd"`; bf16, fp16 or fp32, any strides.
        shift, scale: one row a sample [B, D], [B, 1, D] or [1, B, D]; a frame [B, F, D] or [B, F, 1, D]; a
            token [B, S, D]; a packed sequence [N, D] with `cu_seqlens`. "sbd" also: [F, B, D], [S, B, D].
        weight, bias: [D], applied before the modulation.
        out_dtype: of y; x's dtype by default.
        layout: "bsd" or "sbd". Left out, the shapes must allow only one of them.
        cu_seqlens: int32 [N + 1] from 0 to S on x's device: x is N sequences end to end, and B is 1.
        token_offset: place of x's first token in the whole sequence, for a sequence-parallel shard.
        tokens_per_group: tokens a frame; S / F by default, needed with `token_offset`.
        norm: "layer" or "rms".
        backward: "one_pass", the paper's "dtile", or "auto".
    """
    placed = place(x, None, shift, scale, layout, cu_seqlens, token_offset, tokens_per_group)
    rms, dtile, out_dtype = _options(x, weight, bias, norm, backward, out_dtype)
    if not uses_ops(x):
        groups = reference.Groups(x.shape, placed, cu_seqlens)
        return reference.adaln(x, shift, scale, weight, bias, groups, eps, rms, out_dtype)
    return _adaln(x, shift, scale, weight, bias, cu_seqlens, *placed.for_ops(), eps, rms, dtile, out_dtype)[0]


def residual_adaln(
    residual: Tensor,
    branch: Tensor,
    gate: Tensor | None = None,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
    layout: str | None = None,
    cu_seqlens: Tensor | None = None,
    token_offset: int = 0,
    tokens_per_group: int | None = None,
    norm: str = "layer",
    backward: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The gated residual and the AdaLN that follows it: (residual + branch * gate, adaln of that).

    The norm reads the new residual as rounded to residual's dtype. `branch` has residual's shape; `gate` is
    placed like shift and scale. The other arguments are those of `adaln`.
    """
    _same_shape(residual, branch)
    placed = place(residual, gate, shift, scale, layout, cu_seqlens, token_offset, tokens_per_group)
    rms, dtile, out_dtype = _options(residual, weight, bias, norm, backward, out_dtype)
    if not uses_ops(residual):
        groups = reference.Groups(residual.shape, placed, cu_seqlens)
        residual = reference.gated_residual(residual, branch, gate, groups)
        return residual, reference.adaln(residual, shift, scale, weight, bias, groups, eps, rms, out_dtype)
    return _residual_adaln(
        residual,
        branch,
        gate,
        shift,
        scale,
        weight,
        bias,
        cu_seqlens,
        *placed.for_ops(),
        eps,
        rms,
        dtile,
        out_dtype,
    )[:2]


def gated_residual(
    residual: Tensor,
    branch: Tensor,
    gate: Tensor,
    *,
    layout: str | None = None,
    cu_seqlens: Tensor | None = None,
    token_offset: int = 0,
    tokens_per_group: int | None = None,
) -> Tensor:
    """residual + branch * gate in fp32, rounded to residual's dtype. Arguments as in `residual_adaln`."""
    _same_shape(residual, branch)
    placed = place(residual, gate, None, None, layout, cu_seqlens, token_offset, tokens_per_group)
    if not uses_ops(residual):
        return reference.gated_residual(
            residual, branch, gate, reference.Groups(residual.shape, placed, cu_seqlens)
        )
    return _gated_residual(residual, branch, gate, cu_seqlens, *placed.for_ops())


def _same_shape(residual: Tensor, branch: Tensor) -> None:
    if residual.shape != branch.shape:
        raise ValueError(
            f"residual has shape {list(residual.shape)} and branch {list(branch.shape)}; they must agree"
        )


def _options(x, weight, bias, norm, backward, out_dtype) -> tuple[bool, bool, torch.dtype]:
    if norm not in NORMS:
        raise ValueError(f"norm is {norm!r}; allowed: {', '.join(map(repr, NORMS))}")
    if backward not in BACKWARDS:
        raise ValueError(f"backward is {backward!r}; allowed: {', '.join(map(repr, BACKWARDS))}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} has shape {list(vector.shape)} and x {list(x.shape)}; {name} must be [D]"
            )
    return NORMS[norm], BACKWARDS[backward], x.dtype if out_dtype is None else out_dtype
