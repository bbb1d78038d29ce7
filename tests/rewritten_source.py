"""A class Block in source form, run as it stands and rewritten, in fp32.

Results, gradients, the tensors given, calls in their order and the random state afterwards must agree.
"""

import linecache
import textwrap

import torch

from al_deepspeed.patching.rewriter import rewrite

HEAD = """
import contextlib

import torch
import torch.nn.functional as F
from torch import jit, nn
from torch.jit import script

CALLS = []


class Logged(nn.Linear):
    def __init__(self, name):
        super().__init__(8, 8)
        self.name = name

    def forward(self, x):
        CALLS.append(self.name)
        return super().forward(x)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.plain = nn.LayerNorm(8, elementwise_affine=False)
        self.f, self.g = Logged("f"), Logged("g")
"""
MODULATE = """
def modulate(x, shift, scale):
    return x * (1 + scale) + shift
"""
FORWARD = """
class Block(Base):
    def forward(self, x, gate, shift, scale):
"""


def body(lines: str, before: str = "") -> str:
    return textwrap.dedent(before) + FORWARD + textwrap.indent(textwrap.dedent(lines), " " * 8)


def run(source: str, gradients: bool):
    names = {"__name__": "layer"}
    linecache.cache["layer"] = (len(source), None, source.splitlines(keepends=True), "layer")
    exec(compile(source, "layer", "exec"), names)
    torch.manual_seed(0)
    block = names["Block"]()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    inputs = [0.7 * torch.randn(2, size, 8) for size in (5, 1, 1, 1)]
    given = [one.requires_grad_(gradients) * 1 for one in inputs]
    torch.manual_seed(1)
    with torch.set_grad_enabled(gradients):
        outputs = block(*given)
    outputs = as_tuple(outputs)
    found = {f"output {number}": one for number, one in enumerate(outputs)}
    found |= {f"operand {number}": one for number, one in enumerate(given)}
    if gradients:
        total = sum((one * torch.linspace(-1, 1, one.numel()).view_as(one)).sum() for one in outputs)
        leaves = {f"input {number}": one for number, one in enumerate(inputs)} | dict(
            block.named_parameters()
        )
        by = torch.autograd.grad(total, leaves.values(), allow_unused=True, materialize_grads=True)
        found |= {f"gradient of {name}": one for name, one in zip(leaves, by, strict=True)}
    return found, names["CALLS"], torch.get_rng_state()


def assert_computes_the_same(source: str, gradients: bool = True) -> int:
    """The number of sites."""
    source = HEAD + source
    rewritten = rewrite(source)
    expected, calls, state = run(source, gradients)
    found, found_calls, found_state = run(rewritten.source, gradients)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5, msg=lambda m: m + rewritten.source)
    assert found_calls == calls
    assert torch.equal(found_state, state)
    return len(rewritten.sites)


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)
