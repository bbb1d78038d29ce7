"""A tiny Wan transformer and a corpus made of numbers, for launched scripts and the tests that check them.

Every sample is a pure function of its row: latent, text, noise and timestep. So two runs that train on the
same rows must agree, however the rows were batched.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

CHANNELS, TEXT_LENGTH, TEXT_WIDTH = 4, 6, 16
SHAPES = ((1, 8, 8), (1, 8, 12), (3, 8, 8), (5, 8, 8))  # S = 16, 24, 48, 80
COUNTS = (26, 14, 10, 6)
ROWS = [shape for shape, count in zip(SHAPES, COUNTS, strict=True) for _ in range(count)]


def write_manifest(path: Path, rows=None) -> Path:
    lines = [f"{frames},{height},{width}" for frames, height, width in (rows or ROWS)]
    path.write_text("latent_frames,latent_height,latent_width\n" + "\n".join(lines) + "\n")
    return path


class NumberDataset(torch.utils.data.Dataset):
    """Row -> {noisy, target, timestep, text}, drawn from a generator seeded with the row."""

    def __init__(self, rows=None) -> None:
        self.rows = rows or ROWS

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict:
        draws = torch.Generator().manual_seed(1000 + row)
        shape = (CHANNELS, *self.rows[row])
        return {
            "noisy": torch.randn(shape, generator=draws),
            "target": torch.randn(shape, generator=draws),
            "timestep": torch.rand((), generator=draws) * 1000,
            "text": torch.randn(TEXT_LENGTH, TEXT_WIDTH, generator=draws),
        }


def wan_model() -> torch.nn.Module:
    """Two blocks of diffusers' WanTransformer3DModel, the same weights in every process."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=16,
        ffn_dim=48,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    ).float()


class Toy(torch.nn.Module):
    """Where any model will do: two linear maps over channels, one of the text; starts in a moment."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(CHANNELS, 8)
        self.text = torch.nn.Linear(TEXT_WIDTH, 8)
        self.last = torch.nn.Linear(8, CHANNELS)

    def forward(self, hidden_states, timestep, encoder_hidden_states, return_dict=False):
        hidden = self.first(hidden_states.movedim(1, -1)) + timestep.view(-1, 1, 1, 1, 1) / 1000
        hidden = hidden + self.text(encoder_hidden_states.mean(1)).view(len(hidden), 1, 1, 1, -1)
        return (self.last(torch.tanh(hidden)).movedim(-1, 1),)


def command_line() -> argparse.ArgumentParser:
    """OUT_DIR, and what the launcher adds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--local_rank", type=int)
    return parser


def start(local_rank: int) -> int:
    """Joins the process group of this rank's accelerator, gloo or NCCL on its own GPU; returns the rank."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    # To see that an optimizer is not Muon, ZeRO imports it, and Muon compiles functions as it is imported.
    # That loads Inductor: seconds a rank, for nothing.
    with mock.patch("deepspeed.runtime.compiler.compile", lambda: lambda function: function):
        from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401
    torch.backends.cudnn.allow_tf32 = False  # the patch embedding is a convolution
    get_accelerator().set_device(local_rank)
    deepspeed.init_distributed(get_accelerator().communication_backend_name())
    return dist.get_rank()


def shared_manifest(out: Path, rows=None) -> Path:
    """The manifest in OUT_DIR, written by rank 0 and there for every rank."""
    import torch.distributed as dist

    path = out / "manifest.csv"
    if dist.get_rank() == 0:
        write_manifest(path, rows)
    dist.barrier()
    return path


def trained(engine, loader) -> Iterator[dict]:
    """The batches of what is left of an epoch, each once the engine has trained on it."""
    for batch in loader:
        loss = sample_losses(engine, batch).mean()
        loader.record_loss(loss)
        engine.backward(loss * batch["loss_weight"])
        engine.step()
        yield batch | {"loss": loss.item()}


def sample_losses(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """Mean squared error of each sample, [B]."""
    device = getattr(model, "device", "cpu")  # an engine has one
    noisy, target, timestep, text = (
        batch[name].to(device) for name in ("noisy", "target", "timestep", "text")
    )
    prediction = model(hidden_states=noisy, timestep=timestep, encoder_hidden_states=text, return_dict=False)[
        0
    ]
    return (prediction - target).square().flatten(1).mean(1)


def ds_config(
    manifest: Path, stage: int, *, accumulation: int = 2, batching=None, sampling=None, **top
) -> dict:
    """fp32, SGD, no clipping: what exactness can be tested with."""
    return {
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1000000,
        "data_efficiency": {
            "enabled": True,
            "seed": 11,
            "data_sampling": {
                "enabled": True,
                **(sampling or {}),
                "dual_constraint_batching": {
                    "enabled": True,
                    "manifest": str(manifest),
                    "strategy": "dual_constraint",
                    "max_tokens": 160,
                    "max_cost": 6400.0,
                    "exponent": 2.0,
                    **(batching or {}),
                },
            },
        },
        **top,
    }
