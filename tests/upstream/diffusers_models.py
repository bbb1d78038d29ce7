"""Tiny models of a diffusers release, patched beside unpatched: prints one JSON object.

python diffusers_models.py ROOT FORM      FORM: observed (calls name their site) or plain (as on disk)
"""

import json
import sys
from pathlib import Path

ROOT, FORM = Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from diffusers.models import attention, normalization  # noqa: E402
from diffusers.models.transformers import (  # noqa: E402
    transformer_flux,
    transformer_hunyuan_video,
    transformer_sd3,
    transformer_wan,
)
from twins import Twins, difference  # noqa: E402

TRANSFORMERS = [
    f"diffusers/models/transformers/transformer_{n}.py" for n in ("wan", "flux", "sd3", "hunyuan_video")
]
FILES = ["diffusers/models/normalization.py", "diffusers/models/attention.py", *TRANSFORMERS]
twins = Twins(ROOT, FILES, observe=FORM == "observed")
errors: dict[str, float] = {}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def compare(case: str, module, name: str, settings: dict, *args, **kwargs) -> None:
    made = [getattr(m, name)(**settings) for m in (module, twins[module.__name__])]
    errors[case] = difference(*made, *args, **kwargs)


def wan() -> None:
    settings = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 32,
        "ffn_dim": 32,
        "num_layers": 1,
        "rope_max_seq_len": 32,
    }
    inputs = {"hidden_states": random(2, 4, 2, 4, 4), "encoder_hidden_states": random(2, 5, 16)}
    a_sample, a_token = torch.tensor([3, 700]), torch.arange(16).view(2, 8) * 50
    name = "WanTransformer3DModel"
    compare("Wan", transformer_wan, name, settings, timestep=a_sample, return_dict=False, **inputs)
    compare(
        "Wan, a row a token", transformer_wan, name, settings, timestep=a_token, return_dict=False, **inputs
    )
    without = {**settings, "cross_attn_norm": False}
    compare("Wan, no norm3", transformer_wan, name, without, timestep=a_sample, return_dict=False, **inputs)


def flux() -> None:
    settings = {
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": [4, 4, 8],
    }
    compare(
        "FLUX",
        transformer_flux,
        "FluxTransformer2DModel",
        settings,
        hidden_states=random(2, 6, 4),
        encoder_hidden_states=random(2, 5, 32),
        pooled_projections=random(2, 32),
        timestep=torch.tensor([0.1, 0.9]),
        img_ids=torch.arange(18).view(6, 3),
        txt_ids=torch.zeros(5, 3, dtype=torch.int64),
        return_dict=False,
    )


def sd3() -> None:
    settings = {
        "sample_size": 4,
        "patch_size": 1,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 3,  # with dual attention, without, and context only
        "dual_attention_layers": (0,),
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "caption_projection_dim": 32,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 64,
        "pos_embed_max_size": 8,
        "qk_norm": "rms_norm",
    }
    compare(
        "SD3",
        transformer_sd3,
        "SD3Transformer2DModel",
        settings,
        hidden_states=random(2, 4, 4, 4),
        encoder_hidden_states=random(2, 5, 32),
        pooled_projections=random(2, 64),
        timestep=torch.tensor([3, 700]),
        return_dict=False,
    )
    block = {"dim": 32, "num_attention_heads": 4, "attention_head_dim": 8}
    compare(
        "SD3 single", transformer_sd3, "SD3SingleTransformerBlock", block, random(2, 6, 32), random(2, 32)
    )


def hunyuan_video() -> None:
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 10,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "patch_size": 1,
        "guidance_embeds": True,
        "text_embed_dim": 16,
        "pooled_projection_dim": 8,
        "rope_axes_dim": (2, 4, 4),
    }
    for case, condition in (("HunyuanVideo", None), ("HunyuanVideo, token replaced", "token_replace")):
        compare(
            case,
            transformer_hunyuan_video,
            "HunyuanVideoTransformer3DModel",
            {**settings, "image_condition_type": condition},
            hidden_states=random(2, 4, 3, 2, 2),
            timestep=torch.tensor([3, 700]),
            encoder_hidden_states=random(2, 5, 16),
            encoder_attention_mask=torch.ones(2, 5, dtype=torch.int64),
            pooled_projections=random(2, 8),
            guidance=torch.tensor([1000, 6000]),
            return_dict=False,
        )


def norms() -> None:
    """Norms that the models above do not hold in this form: affine, RMS, without shift, of two inputs."""
    x, c, emb = random(2, 6, 8), random(2, 5, 8), random(2, 8)
    size = {"embedding_dim": 8, "conditioning_embedding_dim": 8}
    for kind in ("layer_norm", "rms_norm"):
        for name in ("AdaLayerNormContinuous", "LuminaLayerNormContinuous"):
            compare(f"{name} {kind}", normalization, name, {**size, "norm_type": kind}, x, emb)
    compare(
        "AdaLayerNorm",
        normalization,
        "AdaLayerNorm",
        {"embedding_dim": 8, "num_embeddings": 9},
        x[:1],
        torch.tensor(4),
    )
    compare(
        "AdaLayerNorm, rows", normalization, "AdaLayerNorm", {"embedding_dim": 8, "chunk_dim": 1}, x, temb=emb
    )
    compare(
        "CogVideoX",
        normalization,
        "CogVideoXLayerNormZero",
        {"conditioning_dim": 8, "embedding_dim": 8},
        x,
        c,
        emb,
    )
    cog_view = {"embedding_dim": 8, "dim": 8}
    compare("CogView3", normalization, "CogView3PlusAdaLayerNormZeroTextImage", cog_view, x, c, emb)


assert attention.JointTransformerBlock is not twins[attention.__name__].JointTransformerBlock
for run in (wan, flux, sd3, hunyuan_video, norms):
    run()
print(json.dumps([{"errors": errors, "reached": sorted(twins.reached)}]))
