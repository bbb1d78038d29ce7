"""Style three: free functions, one of this file and two imported, samples first."""

from torch import nn

from . import modulation
from .megatron import Branch, MegatronModule
from .modulation import modulate as shift_and_scale


def scale_only(x, scale):
    """The last layer has no shift."""
    factor = 1 + scale[:, None, :]
    return x * factor


class FunctionLayer(MegatronModule):
    def __init__(self, features: int, norm_class=nn.LayerNorm) -> None:
        super().__init__()
        self.before_attention = norm_class(features, elementwise_affine=False)
        self.before_mlp = norm_class(features)
        self.final = nn.LayerNorm(features, elementwise_affine=False)
        self.attention = Branch(features)
        self.mlp = Branch(features)
        self.to_modulation = nn.Linear(features, 7 * features)

    def forward(self, x, condition):
        a, b, c, d, e, f, g = self.to_modulation(condition).chunk(7, dim=1)
        skip = x
        x = self.attention(shift_and_scale(self.before_attention(x), a, b))
        x = modulation.add_gated(skip, x, gate=c)
        update = self.mlp(shift_and_scale(self.before_mlp(x), shift=d, scale=e))
        x = x + f.unsqueeze(1) * update
        return scale_only(self.final(x), g)
