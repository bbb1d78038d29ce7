"""The contract check finds a wrong site by its output or by a gradient, and disturbs nothing."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import layer_norm
from torch.utils.checkpoint import checkpoint

from al_deepspeed.ops import adaln, gated_residual, residual_adaln
from al_deepspeed.patching.in_memory import Report
from al_deepspeed.patching.sites import Site
from al_deepspeed.patching.verification import ROWS, Checker, compare, few_rows

B, S, D = 2, 12, 32
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def norm(x, weight=None, bias=None):
    return layer_norm(x, x.shape[-1:], weight, bias, 1e-6)


def operands(dtype=torch.float32, *, modulation=None, tokens=S):
    draws = torch.Generator().manual_seed(3)
    x = torch.randn(B, tokens, D, generator=draws) + 0.5
    shift, scale = (torch.randn(B, 1, D, generator=draws) for _ in range(2))
    return x.to(dtype), shift.to(modulation or dtype), scale.to(modulation or dtype)


@pytest.mark.parametrize("modulation", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_op_equals_what_diffusers_writes(dtype, modulation):
    def original(x, shift, scale):
        return (norm(x.float()) * (1 + scale) + shift).type_as(x)

    def fused(x, shift, scale):
        return adaln(x, shift, scale, layout="bsd")

    assert compare("a.py:1", original, fused, operands(dtype, modulation=modulation)) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_op_equals_a_chain_in_one_low_precision(dtype):
    """Each operation of the original rounds; the op rounds once. That is rounding, not a difference."""

    def original(residual, branch, gate, shift, scale):
        residual = residual + gate * branch
        return residual, norm(residual) * (1 + scale) + shift

    def fused(residual, branch, gate, shift, scale):
        return residual_adaln(residual, branch, gate, shift, scale, layout="bsd")

    x, shift, scale = operands(dtype, tokens=100)
    assert compare("a.py:1", original, fused, (x, x.flip(0), shift.flip(0), shift, scale)) == []


def right(x, shift, scale):
    return norm(x) * (1 + scale) + shift


WRONG = {
    "swapped": (lambda x, shift, scale: norm(x) * (1 + shift) + scale, {"output 0", "gradient of shift"}),
    "no one plus": (lambda x, shift, scale: norm(x) * scale + shift, {"output 0", "gradient of x"}),
    "detached scale": (lambda x, shift, scale: right(x, shift, scale.detach()), {"gradient of scale"}),
    "another dtype": (lambda x, shift, scale: right(x, shift, scale).double(), {"output 0"}),
    "another shape": (lambda x, shift, scale: right(x, shift, scale)[:1], {"output 0"}),
    "not a number": (lambda x, shift, scale: right(x, shift, scale) / (shift * 0), {"output 0"}),
    "off by a thousandth": (lambda x, shift, scale: right(x, shift, scale) * 1.001, {"output 0"}),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_site_is_named_with_tensor_and_error(fault):
    wrong, tensors = WRONG[fault]
    differences = compare("block.py:77", right, wrong, operands())
    assert tensors <= {one.tensor for one in differences}
    assert all(str(one).startswith("block.py:77: ") for one in differences)


def test_zero_modulation_hides_a_swap_from_the_output_but_not_from_the_gradients():
    """adaLN-Zero starts with shift = scale = 0: both outputs are LN(x)."""
    x, shift, scale = operands()
    differences = compare("a.py:1", right, WRONG["swapped"][0], (x, shift * 0, scale * 0))
    assert {one.tensor for one in differences} == {"gradient of shift", "gradient of scale"}


def test_the_error_is_in_the_message():
    (output, *_) = compare("a.py:1", right, lambda x, shift, scale: right(x, shift, scale) * 2, operands())
    scale = right(*operands()).square().mean().sqrt().item()
    assert f"differs by {scale:.3g} " in str(output)  # 2y - y = y


def test_gradients_of_the_norms_own_weight_and_bias_are_compared():
    module = torch.nn.LayerNorm(D, eps=1e-6)
    x = operands()[0]

    def original(norm, x):
        return norm(x)

    def without_bias(norm, x):
        return adaln(x, weight=norm.weight, bias=norm.bias.detach())

    (difference,) = compare("a.py:1", original, without_bias, (module, x))
    assert difference.tensor.startswith("gradient of parameter")
    assert module.weight.grad is None and module.bias.grad is None


def test_a_failing_comparison_is_a_difference_too():
    def fused(x):
        raise ZeroDivisionError("no")

    (difference,) = compare("a.py:1", lambda x: x * 2, fused, (operands()[0],))
    assert "ZeroDivisionError: no" in str(difference)


@pytest.mark.parametrize(
    ("shapes", "kept"),
    [
        (((2, 5000, 8), (2, 1, 8)), ((2, 2048, 8), (2, 1, 8))),
        (((2, 5000, 8), (2, 5000, 8)), ((2, 2048, 8), (2, 2048, 8))),
        (((5000, 2, 8), (1, 2, 8)), ((2048, 2, 8), (1, 2, 8))),
        (((2, 5000, 8), (5000, 8)), ((2, 2048, 8), (2048, 8))),
        (((2, 5000, 8), (2, 8)), ((2, 2048, 8), (2, 8))),
        (((1, 4, 2000, 8), (1, 4, 1, 8)), ((1, 4, 1024, 8), (1, 4, 1, 8))),
        (((2, 100, 8), (2, 1, 8)), ((2, 100, 8), (2, 1, 8))),
        (((0, 100, 8),), ((0, 100, 8),)),
    ],
)
def test_at_most_4096_rows_are_taken_along_the_tokens(shapes, kept):
    cut = few_rows([torch.zeros(shape) for shape in shapes])
    assert tuple(tuple(one.shape) for one in cut) == kept
    assert math.prod(kept[0][:-1]) <= ROWS


def test_an_expression_that_needs_every_row_gets_them():
    """A view by frames cannot be made of the first rows alone."""
    x = torch.randn(1, 3 * 2000, 4)
    shift = torch.randn(1, 3, 1, 4)

    def original(x, shift):
        return (norm(x).view(1, 3, 2000, 4) + shift).flatten(1, 2)

    def fused(x, shift):
        return norm(x) + shift.repeat_interleave(2000, 1).flatten(1, 2)

    assert compare("a.py:1", original, fused, (x, shift)) == []


def test_each_kind_of_operands_is_compared_once():
    calls = []

    def original(x, shift, scale):
        calls.append(x.shape)
        return right(x, shift, scale)

    checker = Checker()
    for tokens in (S, S, S + 1):
        checker("a.py:1", original, right, operands(tokens=tokens))
    assert calls == [(B, S, D)]
    checker("a.py:1", original, right, operands(torch.bfloat16))
    checker("a.py:2", original, right, operands())
    assert len(calls) == 3 and checker.checked == {"a.py:1", "a.py:2"} and checker.differences == []


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_training_sees_nothing_of_the_check(reentrant):
    """Graph, gradients, random numbers; and a checkpoint counts the same saved tensors in both its passes."""
    x, shift, scale = operands()
    checker = Checker()

    def block(x, shift, scale):
        y = checker(
            "a.py:1", right, lambda x, shift, scale: adaln(x, shift, scale, layout="bsd"), (x, shift, scale)
        )
        return torch.dropout(y, 0.5, True)

    def plain(x, shift, scale):
        return torch.dropout(adaln(x, shift, scale, layout="bsd"), 0.5, True)

    results = []
    for function in (plain, block):
        leaves = [one.clone().requires_grad_() for one in (x, shift, scale)]
        torch.manual_seed(5)
        y = function(*leaves) if reentrant is None else checkpoint(function, *leaves, use_reentrant=reentrant)
        y.square().sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves), torch.rand(1)])
    assert checker.checked and not checker.differences
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_gated_residual():
    def original(residual, branch, gate):
        return (residual.float() + branch * gate).type_as(residual)

    def fused(residual, branch, gate):
        return gated_residual(residual, branch, gate, layout="bsd")

    x, gate, _ = operands(torch.bfloat16, modulation=torch.float32)
    assert compare("a.py:1", original, fused, (x, x.flip(1), gate)) == []


def test_compiled_code_is_checked_by_a_graph_break():
    checker = Checker()

    def block(x, shift, scale):
        y = checker("a.py:1", lambda x, shift, scale: right(x, shift, scale), right, (x * 2, shift, scale))
        return y + 1

    compiled = torch.compile(block, backend="eager")
    x, shift, scale = operands()
    assert torch.equal(compiled(x, shift, scale), right(x * 2, shift, scale) + 1)
    assert checker.checked == {"a.py:1"} and checker.differences == []


def test_a_first_step_that_compared_nothing_claims_nothing(monkeypatch, capsys):
    from al_deepspeed import contract

    monkeypatch.setattr(contract, "together", nullcontext)
    monkeypatch.setattr(contract.dist, "get_rank", lambda: 0)
    engine = SimpleNamespace(step=lambda: None)
    site = Site("adaln", "model.py", 3, "Block.forward", "")
    contract.FirstStep(engine, Report({"model.Block": (site,)}))
    engine.step()
    assert "equals" not in capsys.readouterr().err
