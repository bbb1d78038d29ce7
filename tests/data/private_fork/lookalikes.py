"""What resembles the five styles and is something else. Nothing here is a site."""

import torch
import torch.nn.functional as F
from torch import nn

from .megatron import Branch, MegatronModule


class ChannelNorm(nn.Module):
    """Over the channels of [B, C, N]: not the last dim."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, channels)

    def forward(self, x):
        return F.layer_norm(x.transpose(1, 2), x.shape[1:2]).transpose(1, 2)


class Lookalikes(MegatronModule):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.group = nn.GroupNorm(1, 4)
        self.batch = nn.BatchNorm1d(4)
        self.channel_norm = ChannelNorm(4)
        self.image_norm = nn.LayerNorm([4, features])
        self.norm = nn.LayerNorm(features)
        self.rms = nn.RMSNorm(features)
        self.attention = Branch(features)
        self.gamma = nn.Parameter(torch.ones(features))
        self.to_modulation = nn.Linear(features, 2 * features)

    def feature_wise(self, x, condition):
        shift, scale = self.to_modulation(condition).chunk(2, dim=-1)
        return self.attention(x) * (1 + scale) + shift

    def other_norms(self, x, shift, scale):
        a = self.group(x) * (1 + scale) + shift
        b = self.batch(x) * (1 + scale) + shift
        c = self.channel_norm(x) * (1 + scale) + shift
        d = self.image_norm(x) * (1 + scale) + shift
        e = self.rms(x) * (1 + scale) + shift
        return a + b + c + d + e

    def other_arithmetic(self, x, shift, scale):
        a = self.norm(x) * scale + shift
        b = self.norm(x) * (2 + scale) + shift
        c = self.norm(x) * (1 - scale) + shift
        d = self.norm(x) + shift
        return a + b + c + d

    def norm_used_elsewhere(self, x, shift, scale):
        normed = self.norm(x)
        y = normed * (1 + scale) + shift
        return y + self.attention(normed)

    def changed_in_place(self, x, shift, scale):
        normed = self.norm(x)
        x.mul_(2)
        return normed * (1 + scale) + shift + x

    def passed_on_between(self, x, shift, scale, update):
        normed = self.norm(x)
        update(x)
        return normed * (1 + scale) + shift

    def in_another_block(self, x, shift, scale, modulated: bool):
        normed = self.norm(x)
        if modulated:
            normed = normed * (1 + scale) + shift
        return normed

    def added_in_place(self, x, gate):
        x += gate * self.attention(x)
        return x

    def layer_scale(self, x):
        return x + self.gamma * self.attention(x)

    def guidance(self, conditional, unconditional, strength):
        return unconditional + strength * (conditional - unconditional)

    def noise(self, mean, deviation):
        return mean + deviation * torch.randn_like(mean)

    def rotation(self, x, cos, sin):
        return x * cos + x.flip(-1) * sin

    def mixture(self, gate, a, b):
        return gate * a + (1 - gate) * b

    def dropped_path(self, x, gate):
        return x + F.dropout(gate * self.attention(x), 0.1)

    def positions(self, x):
        return self.norm(x + self.gamma)
