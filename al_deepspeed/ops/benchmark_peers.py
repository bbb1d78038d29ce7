"""What fused AdaLN is measured against, each as one function of the same leaves.

Peers take x as [B, G, T, D] and modulation as [B, G, 1, D] (G groups a sample of T tokens), so that plain
broadcasting does for per sample, per frame and per token alike. Ours takes [B, S, D] and [B, G, D].
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from al_deepspeed.ops.adaln import adaln, residual_adaln

EPS = 1e-6


def _norm(x):
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


def plain(x, shift, scale):
    """As most DiT code has it: everything in x's dtype."""
    return _norm(x) * (1 + scale.to(x.dtype)) + shift.to(x.dtype)


def wan(x, shift, scale):
    """As Wan has it: fp32 inside, rounded once. What ours computes."""
    return (_norm(x.float()) * (1 + scale) + shift).type_as(x)


def residual_plain(residual, branch, gate, shift, scale):
    residual = residual + branch * gate.to(residual.dtype)
    return residual, plain(residual, shift, scale)


def residual_wan(residual, branch, gate, shift, scale):
    residual = (residual.float() + branch * gate).type_as(residual)
    return residual, wan(residual, shift, scale)


def _liger() -> Callable | None:
    try:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    except ImportError:
        return None

    def liger(x, shift, scale):
        ones = torch.ones(x.shape[-1], device=x.device, dtype=x.dtype)
        normed = LigerLayerNormFunction.apply(x, ones, torch.zeros_like(ones), EPS)
        return normed * (1 + scale.to(x.dtype)) + shift.to(x.dtype)

    return liger


def _apex() -> Callable | None:
    """NVIDIA's; the package of that name on PyPI is something else and has no such function."""
    try:
        from apex.normalization.fused_layer_norm import fused_layer_norm
    except ImportError:
        return None

    def apex(x, shift, scale):
        normed = fused_layer_norm(x, x.shape[-1:], EPS)
        return normed * (1 + scale.to(x.dtype)) + shift.to(x.dtype)

    return apex


def peers(op: str) -> dict[str, Callable]:
    """Everything that is importable here, by name; compiled anew for every shape."""
    if op == "residual_adaln":
        found = {"eager plain": residual_plain, "eager wan": residual_wan}
        return found | {"torch.compile": torch.compile(residual_wan, dynamic=False)}
    found = {"eager plain": plain, "eager wan": wan, "torch.compile": torch.compile(wan, dynamic=False)}
    return found | {name: peer for name, peer in (("liger", _liger()), ("apex", _apex())) if peer}


def ours(op: str) -> dict[str, Callable]:
    """Our op with each of its backward kernels."""
    function = {"adaln": adaln, "residual_adaln": residual_adaln}[op]

    def with_backward(backward):
        return lambda *leaves: function(*leaves, layout="bsd", backward=backward)

    return {f"fused {backward}": with_backward(backward) for backward in ("one_pass", "dtile")}
