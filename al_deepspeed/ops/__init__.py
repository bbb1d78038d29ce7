"""Fused AdaLN operators. Importing them needs PyTorch alone; kernels are built or loaded at first use."""

from al_deepspeed.ops.adaln import adaln, gated_residual, residual_adaln
from al_deepspeed.ops.backend import get_backend, set_backend
from al_deepspeed.ops.modules import AdaLayerNorm, GatedResidualAdaLayerNorm

__all__ = [
    "AdaLayerNorm",
    "GatedResidualAdaLayerNorm",
    "adaln",
    "gated_residual",
    "get_backend",
    "residual_adaln",
    "set_backend",
]
