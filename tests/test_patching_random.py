"""Random method bodies, rewritten: the same values and gradients, and the same calls in the same order.

Nobody would write these bodies. They shadow names, reuse intermediates, branch and loop, and change tensors
in place, between expressions that the matcher takes.
"""

import random

import pytest
import torch

from al_deepspeed.patching.rewriter import rewrite

HEAD = """import torch
from torch import nn


def modulate(x, shift, scale):
    return x * (1 + scale) + shift


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.plain = nn.LayerNorm(8, elementwise_affine=False)
        self.f = nn.Linear(8, 8)
        self.seen = []

    def scale_add(self, residual, y, gate):
        return residual + gate * y

    def note(self, x):
        self.seen.append(round(float(x.detach().sum()), 3))

    def forward(self, x, y, shift, scale, gate):
        n = x
"""
STATEMENTS = """
{a} = self.{norm}({b})
{a} = self.{norm}({b}) * (1 + {s}) + {t}
{a} = {b} * (1 + {s}) + {t}
{a} = {b} + gate * {c}
{a} = {b} + gate * self.f({c})
{a} = gate * self.f({b})
{a} = modulate(self.{norm}({b}), {s}, {t})
{a} = modulate({b}, {s}, {t})
{a} = self.scale_add({b}, {c}, gate)
{s} = 1 + {s}
{s} = {s} * 0.5
self.note({a})
{a} = {b}
{a} = {b} + self.f({b})
{a} += gate * {b}
{a} = {b} + self.f(self.{norm}({b}) * (1 + {s}) + {t}) * gate
{a} = (self.{norm}({b}.float()) * (1 + {s}) + {t}).type_as({b})
{a} = torch.addcmul({t}, self.{norm}({b}), 1 + {s})
{a}, {b} = {b}, {a}
{a} = {a}.clone().mul_(0.9)
{a} = self.{norm}({b} + self.f({b}))
{a} = self.{norm}({b}) * {s} + self.{norm}({b})
""".strip().splitlines()
BLOCKS = ["if len(self.seen) % 2 == 0:", "for _ in range(2):", "with torch.enable_grad():"]


def lines(choose: random.Random, count: int, depth: int = 0) -> list[str]:
    found = []
    for _ in range(count):
        if depth < 2 and choose.random() < 0.12:
            inner = lines(choose, choose.randrange(1, 4), depth + 1)
            found += [choose.choice(BLOCKS), *(f"    {line}" for line in inner)]
            continue
        names = {name: choose.choice("xyn") for name in "abc"}
        names |= {name: choose.choice(["shift", "scale", "gate"]) for name in "st"}
        found.append(choose.choice(STATEMENTS).format(norm=choose.choice(["norm", "plain"]), **names))
    return found


def run(source: str):
    names = {}
    exec(compile(source, "layer", "exec"), names)
    torch.manual_seed(0)
    layer = names["Layer"]().double()
    shapes = [(2, 3, 8), (2, 3, 8), (2, 1, 8), (2, 1, 8), (2, 1, 8)]
    inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    outputs = layer(*(x * 1 for x in inputs))
    total = sum((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() for y in outputs)
    wanted = [*inputs, *layer.parameters()]
    gradients = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
    return [*outputs, *gradients], layer.seen


@pytest.mark.parametrize("seed", range(24))
def test_random_bodies_compute_the_same(seed):
    choose = random.Random(seed)
    body = lines(choose, choose.randrange(4, 13))
    source = HEAD + "".join(f"        {line}\n" for line in body) + "        return x, y, n\n"
    try:
        expected, seen = run(source)
    except RuntimeError:
        pytest.skip("in-place changes that autograd refuses")
    for observe in (False, True):
        result = rewrite(source, observe=observe)
        found, found_seen = run(result.source)
        assert found_seen == seen, result.source
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape, result.source
            assert (one - other).norm() <= 1e-5 * max(1, other.norm()), result.source
        assert rewrite(result.source, observe=observe).source == result.source
