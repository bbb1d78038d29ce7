"""Fused AdaLN on the CPU: every test of adaln_suite.py, the rules for shapes, what an import brings in."""

import subprocess
import sys

import pytest
import torch
from adaln_cases import Case, call, tensors
from adaln_suite import Cases

from al_deepspeed.errors import ConfigError
from al_deepspeed.ops import (
    AdaLayerNorm,
    GatedResidualAdaLayerNorm,
    adaln,
    get_backend,
    residual_adaln,
    set_backend,
)


class TestOnCpu(Cases):
    device = "cpu"


@pytest.mark.parametrize(
    "x, shift, how",
    [
        ((2, 12, 8), (2, 5, 8), {}),  # 12 tokens are not 5 frames
        ((2, 12, 8), (3, 8), {}),  # neither 3 samples nor 3 frames a sample
        ((2, 12, 8), (2, 1, 9), {}),  # other features
        ((2, 12, 8), (8,), {}),
        ((1, 12, 8), (1, 24, 8), {}),  # more frames than tokens
        ((2, 12, 8), (2, 3, 8), {"token_offset": 2}),  # tokens a frame cannot be known
        ((2, 12, 8), (2, 3, 8), {"token_offset": 2, "tokens_per_group": 4}),  # tokens 12, 13 are in a frame 3
    ],
)
def test_a_shape_without_a_rule_is_refused_with_both_shapes(x, shift, how):
    with pytest.raises(ValueError) as error:
        adaln(torch.zeros(x), torch.zeros(shift), **how)
    assert str(list(x)) in str(error.value) and str(list(shift)) in str(error.value)


@pytest.mark.parametrize(
    "x, shift, layout",
    [
        ((3, 3, 8), (3, 8), None),  # samples first or tokens first?
        ((3, 3, 8), (1, 3, 8), None),
        ((6, 2, 8), (2, 2, 8), "sbd"),  # [B, F, D] or [F, B, D]?
    ],
)
def test_a_shape_with_two_rules_is_refused_with_both_shapes(x, shift, layout):
    with pytest.raises(ValueError, match="2 ways") as error:
        adaln(torch.zeros(x), torch.zeros(shift), layout=layout)
    assert str(list(x)) in str(error.value) and str(list(shift)) in str(error.value)


def test_the_ways_out_of_two_rules():
    x, shift = torch.randn(3, 3, 8), torch.randn(3, 8)
    by_sample = adaln(x, shift, layout="bsd")
    torch.testing.assert_close(by_sample - adaln(x), shift[:, None].expand(3, 3, 8))
    torch.testing.assert_close(adaln(x, shift, layout="sbd") - adaln(x), shift[None].expand(3, 3, 8))
    x, shift = (
        torch.randn(6, 2, 8),
        torch.randn(2, 2, 8),
    )  # 6 tokens, 2 samples, 2 frames; shift by sample, frame
    y = adaln(x, shift[:, :, None], layout="sbd")
    torch.testing.assert_close(y - adaln(x), shift.repeat_interleave(3, 1).transpose(0, 1))


def test_megatron_layout_is_recognised_from_the_modulation():
    x, shift = torch.randn(5, 3, 8), torch.randn(1, 3, 8)
    torch.testing.assert_close(adaln(x, shift) - adaln(x), shift.expand(5, 3, 8))


def test_per_frame_and_per_token_are_told_apart_by_the_number_of_rows():
    # [1, F, 1, D] against S = F * 1560, then F = 1, then F = S.
    for frames, tokens_per_frame in ((3, 1560), (1, 1560), (24, 1)):
        x = torch.randn(1, frames * tokens_per_frame, 8)
        shift = torch.randn(1, frames, 1, 8)
        expected = shift.expand(1, frames, tokens_per_frame, 8).reshape(x.shape)
        torch.testing.assert_close(adaln(x, shift) - adaln(x), expected)


def test_modulations_that_disagree_are_refused():
    with pytest.raises(ValueError, match="different groups"):
        adaln(torch.zeros(2, 12, 8), torch.zeros(2, 8), torch.zeros(2, 3, 8))


@pytest.mark.parametrize(
    "how, message",
    [
        ({"layout": "dsb"}, "'bsd', 'sbd'"),
        ({"norm": "batch"}, "'layer', 'rms'"),
        ({"backward": "atomic"}, "'one_pass', 'dtile'"),
        ({"weight": torch.ones(3)}, r"weight has shape \[3\]"),
        ({"tokens_per_group": 0}, "tokens_per_group 0"),
    ],
)
def test_options_are_checked(how, message):
    with pytest.raises(ValueError, match=message):
        adaln(torch.zeros(2, 4, 8), **how)


def test_branch_must_match_the_residual():
    with pytest.raises(ValueError, match=r"\[2, 4, 8\] and branch \[2, 5, 8\]"):
        residual_adaln(torch.zeros(2, 4, 8), torch.zeros(2, 5, 8))


def test_packed_lengths_must_cover_the_tokens():
    with pytest.raises(ValueError, match="covers 9 tokens, x has 12"):
        adaln(torch.zeros(1, 12, 8), torch.zeros(2, 8), cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32))


def test_backends():
    case = Case()
    given = tensors(case, "cpu")
    by_op = call(case, given, "cpu")
    try:
        set_backend("reference")
        assert get_backend() == "reference"
        plain = call(case, given, "cpu")
    finally:
        set_backend("auto")
    assert all(torch.equal(one, other) for one, other in zip(by_op, plain, strict=True))
    with pytest.raises(ConfigError, match="'auto', 'cuda', 'reference'"):
        set_backend("triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a CUDA device")
def test_backend_cuda_does_not_fall_back():
    from al_deepspeed.errors import AdaptiveLoadError

    with pytest.raises(AdaptiveLoadError, match="need a CUDA device"):
        set_backend("cuda")
    assert get_backend() == "auto"


def test_reference_can_be_differentiated_twice():
    given = {
        name: t.double().detach().requires_grad_() for name, t in tensors(Case(features=5), "cpu").items()
    }
    arguments = [given[name] for name in ("x", "branch", "gate", "shift", "scale")]
    try:
        set_backend("reference")
        assert torch.autograd.gradcheck(residual_adaln, arguments)
        assert torch.autograd.gradgradcheck(lambda *a: residual_adaln(*a)[1], arguments)
    finally:
        set_backend("auto")


def test_modules_hold_weight_and_bias():
    x, branch, (gate, shift, scale) = torch.randn(2, 6, 16), torch.randn(2, 6, 16), torch.randn(3, 2, 16)
    module = AdaLayerNorm(16, elementwise_affine=True)
    torch.nn.init.normal_(module.weight)
    expected = adaln(x, shift, scale, weight=module.weight, bias=module.bias)
    assert torch.equal(module(x, shift, scale), expected)
    chained = GatedResidualAdaLayerNorm(16, norm="rms", eps=1e-5)
    assert list(chained.parameters()) == []
    r, y = chained(x, branch, gate, shift, scale)
    torch.testing.assert_close(r, x + branch * gate[:, None])
    torch.testing.assert_close(y, adaln(r, shift, scale, norm="rms", eps=1e-5))


def test_importing_the_ops_brings_neither_deepspeed_nor_a_compiler():
    heavy = "[m for m in sys.modules if m.split('.')[0] in ('deepspeed', 'triton', 'diffusers')]"
    code = f"import sys, al_deepspeed; print('torch' in sys.modules); import al_deepspeed.ops; print({heavy})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == ["False", "[]"]
