"""Style two: addcmul, in function and method form, and sums prepared ahead."""

import torch
import torch.nn.functional as F
from torch import nn

from .megatron import Branch, MegatronModule


class MultiplyAddLayer(MegatronModule):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features
        self.ln = nn.ModuleList([nn.LayerNorm(features, elementwise_affine=False) for _ in range(2)])
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.attention = Branch(features)
        self.mlp = Branch(features)
        self.last = Branch(features)
        self.to_modulation = nn.Linear(features, 9 * features)

    def forward(self, x, condition):
        e = self.to_modulation(condition).chunk(9, dim=-1)
        one_plus = 1 + e[1]
        x = torch.addcmul(x, e[2], self.attention(torch.addcmul(e[0], self.ln[0](x), one_plus)))
        y = self.mlp(torch.addcmul(e[3], self.ln[1](x), 1 + e[4]))
        x = x.addcmul(y, e[5])
        plain = F.layer_norm(x, (self.features,), self.weight, self.bias, eps=1e-6)
        plain = torch.add(torch.mul(plain, e[7].add(1)), e[6])
        return torch.add(x, torch.mul(self.last(plain), e[8]))
