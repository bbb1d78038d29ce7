"""AdaLN as modules for new code: they hold weight and bias, the caller brings shift, scale and gate."""

import torch
from torch import nn

from al_deepspeed.ops.adaln import adaln, residual_adaln

Tensor = torch.Tensor


class AdaLayerNorm(nn.Module):
    """`adaln` over `features`; `elementwise_affine` adds a learnt weight and bias before the modulation."""

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-6,
        elementwise_affine: bool = False,
        norm: str = "layer",
        layout: str | None = None,
    ) -> None:
        super().__init__()
        self.features, self.eps, self.norm, self.layout = features, eps, norm, layout
        self.weight = nn.Parameter(torch.ones(features)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(features)) if elementwise_affine else None

    def forward(self, x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None, **how) -> Tensor:
        """`how`: out_dtype, cu_seqlens, token_offset, tokens_per_group, backward, as in `adaln`."""
        return adaln(x, shift, scale, **self._settings(), **how)

    def _settings(self) -> dict:
        return {name: getattr(self, name) for name in ("weight", "bias", "eps", "norm", "layout")}

    def extra_repr(self) -> str:
        return f"{self.features}, eps={self.eps}, affine={self.weight is not None}, norm={self.norm!r}"


class GatedResidualAdaLayerNorm(AdaLayerNorm):
    """`residual_adaln` over `features`: takes the residual stream and a branch, returns both results."""

    def forward(
        self,
        residual: Tensor,
        branch: Tensor,
        gate: Tensor | None = None,
        shift: Tensor | None = None,
        scale: Tensor | None = None,
        **how,
    ) -> tuple[Tensor, Tensor]:
        return residual_adaln(residual, branch, gate, shift, scale, **self._settings(), **how)
