"""Wan's transformer, from a preset or from pretrained weights, made so that no rank holds more than it must.

At ZeRO-3 a model is born partitioned (`deepspeed.zero.Init`) and pretrained weights are read by rank 0, one
parameter at a time. Gathering the weights again for export goes parameter by parameter as well.
"""

import os
import shutil
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import deepspeed
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from safetensors import safe_open

from al_deepspeed.config import with_one_micro_batch
from al_deepspeed.errors import ConfigError, CorpusError
from al_deepspeed.scheduling.shapes import Corpus

# Name -> what differs from WanTransformer3DModel's defaults. `tiny` is for CPUs, the others are Wan 2.1 T2V.
PRESETS = {
    "tiny": {
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "ffn_dim": 256,
        "num_layers": 3,
        "freq_dim": 64,
    },
    "1.3b": {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30},
    "14b": {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 40},
}


@dataclass(frozen=True)
class Source:
    """config: what differs from WanTransformer3DModel's defaults. weights: parameter -> safetensors file, or
    none for random weights."""

    config: dict
    weights: dict[str, Path] = field(default_factory=dict)


def preset(name: str, *, channels: int, text_dim: int, layers: int | None = None) -> Source:
    """Random weights for latents of `channels` and captions of `text_dim`; `layers` overrule the preset's."""
    if name not in PRESETS:
        raise ConfigError(f"preset is {name!r}; allowed: {', '.join(PRESETS)}.")
    sizes = {"in_channels": channels, "out_channels": channels, "text_dim": text_dim}
    return Source({**PRESETS[name], **sizes, **({"num_layers": layers} if layers else {})})


def pretrained(name_or_dir: str, *, channels: int, text_dim: int, layers: int | None = None) -> Source:
    """The weights of a diffusers folder, or of a hub repository (its `transformer` subfolder); of the first
    `layers` blocks alone, if given."""
    folder = _weights_folder(name_or_dir)
    config = dict(WanTransformer3DModel.load_config(folder))
    config["num_layers"] = layers or config["num_layers"]
    for key, found in (("in_channels", channels), ("text_dim", text_dim)):
        if config[key] != found:
            raise ConfigError(f"{name_or_dir} has {key} {config[key]}, but the corpus has {found}.")
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(os.fspath(file), framework="pt") as tensors:
            weights |= dict.fromkeys(tensors.keys(), file)
    with torch.device("meta"):
        needed = [name for name, _ in WanTransformer3DModel.from_config(config).named_parameters()]
    missing = [name for name in needed if name not in weights]
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} of the model's weights; the first is {missing[0]}.")
    return Source(config, weights)


def build(source: Source, ds_config: dict) -> WanTransformer3DModel:
    """The model; partitioned over the ranks from birth where the ds_config is at ZeRO-3. Collective then."""
    born_partitioned = ds_config.get("zero_optimization", {}).get("stage", 0) == 3
    config = with_one_micro_batch(deepcopy(ds_config))
    with deepspeed.zero.Init(config_dict_or_path=config) if born_partitioned else nullcontext():
        model = WanTransformer3DModel.from_config(source.config)
    if born_partitioned:  # zero.Init computes new tensors in the parameters' type; rotary angles need float64
        sizes = (model.rope.attention_head_dim, model.rope.patch_size, model.rope.max_seq_len)
        model.rope = WanRotaryPosEmbed(*sizes).to(get_accelerator().current_device_name())
    if source.weights:
        _read_weights(model, source.weights, shared=born_partitioned)
    return model


def check_shapes(corpus: Corpus, manifest: str) -> None:
    """Wan cuts a latent into patches of 1x2x2; an odd height or width does not come back in its output."""
    odd = np.flatnonzero((corpus.shapes[:, 1:] % 2).any(axis=1))
    if len(odd):
        raise CorpusError(
            f"{manifest} holds {corpus.bucket_name(odd[0])}, but Wan's patches need an even latent height "
            "and width. Encode with buckets whose sides are multiples of 16 pixels."
        )


def export(model: WanTransformer3DModel, folder: Path) -> None:
    """Writes a diffusers folder from weights that may be partitioned. Every rank calls it; rank 0 writes.

    The folder appears complete or not at all. Weights keep the type that training held them in.
    """
    state = {}
    writes = rank() == 0
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            if writes:
                state[name] = parameter.detach().cpu().clone()
    if writes:
        with torch.device("meta"):
            whole = WanTransformer3DModel.from_config(dict(model.config))
        whole.load_state_dict(state, strict=True, assign=True)
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        whole.save_pretrained(partial, safe_serialization=True)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def rank() -> int:
    """Of this process, also where there is one alone."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _weights_folder(name_or_dir: str) -> Path:
    folder = Path(name_or_dir)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name_or_dir, allow_patterns=["transformer/*"]))
    folder = folder / "transformer" if (folder / "transformer").is_dir() else folder
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{name_or_dir} holds no diffusers transformer: no config.json in {folder}.")
    return folder


def _read_weights(model: WanTransformer3DModel, weights: dict[str, Path], *, shared: bool) -> None:
    """Fills the model. Partitioned (shared) parameters are read by rank 0, for all."""
    for name, parameter in model.named_parameters():
        with (
            deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if shared else None),
            torch.no_grad(),
        ):
            if not shared or rank() == 0:
                with safe_open(os.fspath(weights[name]), framework="pt") as tensors:
                    parameter.copy_(tensors.get_tensor(name))
