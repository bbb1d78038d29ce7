"""Style five: residuals that feed norms, two streams, no autocast, a nested function, expanded shifts."""

import torch
from torch import nn

from .megatron import Branch, MegatronModule


class CombinedLayer(MegatronModule):
    def __init__(self, features: int, cross_norm: bool = True) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(features, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(features, elementwise_affine=False)
        self.norm3 = nn.LayerNorm(features) if cross_norm else nn.Identity()
        self.text_norm = nn.LayerNorm(features, elementwise_affine=False)
        self.attention = Branch(features)
        self.cross_attention = Branch(features)
        self.mlp = Branch(features)
        self.text_mlp = Branch(features)
        self.table = nn.Parameter(torch.zeros(1, 6, features))

    def forward(self, x, text, condition):
        with torch.autocast("cpu", enabled=False):
            e = (self.table + condition).chunk(6, dim=1)
        y = self.attention(self.norm1(x).float() * (1 + e[1]) + e[0], text)
        with torch.autocast("cpu", enabled=False):
            x = x + y * e[2]

        def cross_and_mlp(x, e):
            x = x + self.cross_attention(self.norm3(x))
            shift, scale = e[3].expand_as(x), e[4].expand_as(x)
            y = self.mlp(self.norm2(x).float() * (1 + scale) + shift)
            with torch.autocast("cpu", enabled=False):
                x = x + y * e[5]
            return x

        x = cross_and_mlp(x, e)
        gate_text = e[2].squeeze(1)
        text_update = gate_text.unsqueeze(1) * self.text_mlp(text)
        text = text + text_update
        text_normed = self.text_norm(text)
        text_normed = text_normed * (1 + e[4]) + e[3]
        return x, text, self.text_mlp(text_normed)
