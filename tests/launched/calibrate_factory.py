"""Factories for `al_deepspeed.calibration`: the tiny Wan, and what can go wrong on one rank.

`--slow SECONDS` makes the last rank sleep in each forward; `--fail-above LOAD` makes an allocation on the
last rank fail where B*S is above it; `--die-after N` kills every rank after its N-th forward.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from tiny import CHANNELS, TEXT_LENGTH, TEXT_WIDTH, sample_losses, wan_model

from al_deepspeed.scheduling.shapes import latent_tokens


def factory(arguments, ds_config):
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--fail-above", type=int)
    parser.add_argument("--die-after", type=int)
    options = parser.parse_args(arguments)
    last = dist.get_rank() == dist.get_world_size() - 1
    forwards = 0

    def loss(engine, batch):
        nonlocal forwards
        forwards += 1
        if options.die_after and forwards > options.die_after:
            os._exit(9)
        if last and options.slow:
            time.sleep(options.slow)
        load = len(batch["noisy"]) * latent_tokens(*batch["noisy"].shape[2:])
        if last and options.fail_above and load > options.fail_above:
            raise torch.OutOfMemoryError(f"simulated at B*S = {load}")
        return sample_losses(engine, batch).mean()

    def synthetic(batch_size, shape):
        noise = torch.randn(2, batch_size, CHANNELS, *shape)
        batch = {
            "noisy": noise[0],
            "target": noise[1],
            "timestep": torch.rand(batch_size) * 1000,
            "text": torch.randn(batch_size, TEXT_LENGTH, TEXT_WIDTH),
        }
        return batch, loss

    return wan_model(), synthetic
