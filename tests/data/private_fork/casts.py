"""Style one: arithmetic with casts, a norm class of its own, tokens first."""

import torch
import torch.nn.functional as F
from torch import nn

from .megatron import Branch, MegatronModule


class StreamNorm(nn.LayerNorm):
    """Computes in fp32, answers in the dtype of the stream."""

    def forward(self, x):
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).type_as(x)


class CastLayer(MegatronModule):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm1 = StreamNorm(features, eps=1e-6, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(features, eps=1e-6, elementwise_affine=False)
        self.norm3 = StreamNorm(features)
        self.attention = Branch(features)
        self.cross_attention = Branch(features)
        self.mlp = Branch(features)
        self.table = nn.Parameter(torch.zeros(6, 1, features))

    def forward(self, hidden_states, condition):
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.table + condition.float()).unbind(0)
        scale1 = scale1[None]
        normed = (self.norm1(hidden_states.float()) * (1.0 + scale1) + shift1).type_as(hidden_states)
        update = self.attention(normed)
        hidden_states = (hidden_states.float() + update.float() * gate1).to(hidden_states.dtype)

        # what the text says
        normed = self.norm3(hidden_states)
        update = self.cross_attention(normed)
        hidden_states = hidden_states + update

        normed = self.norm2(hidden_states.float()).to(torch.float32)
        normed = (shift2 + (scale2 + 1) * normed).to(dtype=hidden_states.dtype)
        update = gate2 * self.mlp(normed)
        return (hidden_states.float() + update).type_as(hidden_states)
