"""Wan transformer blocks of diffusers on the fused ops.

A block has four sites, in the order in which the stream passes them:
    norm1 and its modulation                       adaln
    gate of self-attention, then norm2             residual_adaln (inside norm2, which owns weight and bias)
    residual of cross-attention, then norm3        residual_adaln with shift and scale
    gate of the feed-forward                       gated_residual
Parameters are read in the forward of the module that owns them, so ZeRO-3 finds them gathered. Not covered:
the model's own output norm (norm_out, once a step), the norms inside attention, blocks of other classes.
"""

import logging
from types import MethodType

import torch
from torch import nn

from al_deepspeed.ops.adaln import adaln, gated_residual, residual_adaln

logger = logging.getLogger(__name__)
Tensor = torch.Tensor


def use_fused_adaln(model: nn.Module) -> int:
    """Give every Wan block of the model the fused forward; a second call changes nothing.

    Returns:
        The number of sites that run fused ops now, 0 for a model without Wan blocks.
    """
    try:
        from diffusers.models.transformers.transformer_wan import WanTransformerBlock
    except ImportError:
        return 0
    sites = 0
    for name, block in model.named_modules():
        if not isinstance(block, WanTransformerBlock):
            continue
        if reason := _obstacle(block):
            logger.warning("fused AdaLN leaves %s as it is: %s", name, reason)
            continue
        block.forward = MethodType(_block_forward, block)
        if not isinstance(block.norm2, nn.Identity):
            block.norm2.forward = MethodType(_residual_norm_forward, block.norm2)
        sites += 4
    return sites


def _obstacle(block: nn.Module) -> str | None:
    for name in ("norm1", "norm3"):
        norm = getattr(block, name)
        if not isinstance(norm, nn.LayerNorm) or norm.weight is not None:
            return f"{name} is {norm}, not a LayerNorm without weight"
    if not isinstance(block.norm2, (nn.LayerNorm, nn.Identity)):
        return f"norm2 is {block.norm2}, neither LayerNorm nor Identity"
    return None


def _block_forward(
    block, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb
) -> Tensor:
    """temb: [B, 6, D], or [B, S, 6, D] with a time step a token."""
    table = block.scale_shift_table + temb.float()
    if temb.ndim == 4:
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = table.unbind(2)
    else:
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = table.split(1, dim=1)

    normed = adaln(hidden_states, shift, scale, eps=block.norm1.eps, layout="bsd")
    attended = block.attn1(normed, None, None, rotary_emb)
    if isinstance(block.norm2, nn.Identity):
        hidden_states = normed = gated_residual(hidden_states, attended, gate, layout="bsd")
    else:
        hidden_states, normed = block.norm2(hidden_states, attended, gate)
    attended = block.attn2(normed, encoder_hidden_states, None, None)
    hidden_states, normed = residual_adaln(
        hidden_states, attended, None, ffn_shift, ffn_scale, eps=block.norm3.eps, layout="bsd"
    )
    return gated_residual(hidden_states, block.ffn(normed), ffn_gate, layout="bsd")


def _residual_norm_forward(norm, residual: Tensor, branch: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return residual_adaln(
        residual, branch, gate, weight=norm.weight, bias=norm.bias, eps=norm.eps, layout="bsd"
    )
