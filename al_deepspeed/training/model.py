"""A run's model, as its options and its ds_config say: the trainer and its calibration make the same one."""

import argparse

import torch
from diffusers import WanTransformer3DModel

from al_deepspeed.config import read_config
from al_deepspeed.training import wan


def source(arguments: argparse.Namespace, *, channels: int, text_dim: int) -> wan.Source:
    """Weights and sizes that the options name, for latents of `channels` and captions of `text_dim`."""
    sizes = {"channels": channels, "text_dim": text_dim}
    if arguments.pretrained:
        return wan.pretrained(arguments.pretrained, layers=arguments.layers, **sizes)
    return wan.preset(arguments.preset, layers=arguments.layers, **sizes)


def make(weights: wan.Source, arguments: argparse.Namespace, ds_config: dict) -> WanTransformer3DModel:
    """The model in training mode, checkpointed where asked for. Collective at ZeRO-3."""
    torch.manual_seed(read_config(ds_config).seed)
    model = wan.build(weights, ds_config).train()
    if arguments.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    return model
