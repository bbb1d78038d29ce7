"""Wan blocks with fused AdaLN against diffusers' own, in fp32 with the reference ops."""

import copy
import logging

import pytest
import torch

from al_deepspeed.ops.wan import use_fused_adaln

WanTransformer3DModel = pytest.importorskip("diffusers").WanTransformer3DModel


@pytest.fixture(params=[True, False], ids=["norm2", "no-norm2"])
def model(request):
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=48,
        num_layers=2,
        cross_attn_norm=request.param,
    )
    for parameter in model.parameters():  # as created, gates and shifts are too small to show a mistake
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def outputs_and_gradients(model, timestep):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, 3, 8, 8, generator=generator).requires_grad_()
    text = torch.randn(2, 7, 12, generator=generator)
    y = model(x, timestep, text, return_dict=False)[0]
    y.square().mean().backward()
    return {"y": y, "x": x.grad} | {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "timestep", [torch.tensor([3.0, 700.0]), torch.linspace(0, 999, 96).view(2, 48)], ids=["sample", "token"]
)
def test_blocks_equal_the_original(model, timestep, checkpointing):
    fused = copy.deepcopy(model)
    assert use_fused_adaln(fused) == 2 * 4
    if checkpointing:
        fused.enable_gradient_checkpointing()
    expected, found = (outputs_and_gradients(m.train(), timestep) for m in (model, fused))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm(), name


def test_a_second_call_changes_nothing(model):
    use_fused_adaln(model)
    forwards = [block.forward.__func__ for block in model.blocks]
    assert use_fused_adaln(model) == 8
    assert [block.forward.__func__ for block in model.blocks] == forwards


def test_a_block_that_does_not_fit_is_named_and_left(model, caplog):
    model.blocks[1].norm1 = torch.nn.RMSNorm(32)
    with caplog.at_level(logging.WARNING):
        assert use_fused_adaln(model) == 4
    assert "blocks.1" in caplog.text and "norm1" in caplog.text


def test_other_models_have_no_sites():
    assert use_fused_adaln(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))) == 0
