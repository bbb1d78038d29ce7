"""Style four: methods under fusing decorators, a norm passed in, norms built from a spec, tokens first."""

from torch import nn

from .megatron import Branch, MegatronModule, build_module, jit_fuser


class Submodules:
    input_layernorm = nn.LayerNorm
    mlp_layernorm = nn.LayerNorm


class Modulation(MegatronModule):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 6 * features)

    def forward(self, condition):
        return self.linear(condition).chunk(6, dim=-1)

    @jit_fuser
    def modulate(self, x, shift, scale):
        return x * (1 + scale) + shift

    @jit_fuser
    def modulated_layernorm(self, layernorm, x, shift, scale):
        normed = layernorm(x).type_as(x)
        return self.modulate(normed, shift, scale)

    @jit_fuser
    def scale_add(self, residual, x, gate):
        return residual + gate * x

    @jit_fuser
    def both(self, residual, x, gate, layernorm, shift, scale):
        x = self.scale_add(residual, x, gate)
        return x, self.modulated_layernorm(layernorm, x, shift, scale)


class MethodLayer(MegatronModule):
    def __init__(self, features: int, submodules=Submodules) -> None:
        super().__init__()
        self.adaln = Modulation(features)
        self.input_layernorm = build_module(submodules.input_layernorm, features)
        self.mlp_layernorm = build_module(submodules.mlp_layernorm, features, elementwise_affine=False)
        self.cross_layernorm = nn.LayerNorm(features)
        self.attention = Branch(features)
        self.cross_attention = Branch(features)
        self.mlp = Branch(features)

    def forward(self, hidden_states, condition):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaln(condition)
        normed = self.adaln.modulated_layernorm(self.input_layernorm, hidden_states, shift1, scale1)
        update = self.attention(normed)
        hidden_states = self.adaln.scale_add(hidden_states, x=update, gate=gate1)
        hidden_states = hidden_states + self.cross_attention(self.cross_layernorm(hidden_states))
        hidden_states, normed = self.adaln.both(
            hidden_states, self.mlp(hidden_states), gate2, self.mlp_layernorm, shift2, scale2
        )
        return self.adaln.scale_add(hidden_states, normed, gate2)
