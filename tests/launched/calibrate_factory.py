"""A factory for `al_deepspeed.calibration`: a toy or the trainer's model, and what can go wrong on one rank.

Every forward sleeps half a millisecond a token: models as small as these take as long for larger batches.
`--trainer=WORDS` takes the trainer's factory with these options in place of the toy.
`--slow SECONDS` makes the last rank sleep in each forward; `--fail-above LOAD` makes an allocation on the
last rank fail where B*S is above it; `--die-after N` kills every rank after its N-th forward.
"""

import argparse
import os
import shlex
import time

import torch
import torch.distributed as dist
from tiny import CHANNELS, TEXT_LENGTH, TEXT_WIDTH, Toy, sample_losses

from al_deepspeed.scheduling.shapes import latent_tokens

WORK_S_A_TOKEN = 5e-4


def factory(arguments, ds_config):
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer")
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--fail-above", type=int)
    parser.add_argument("--die-after", type=int)
    options = parser.parse_args(arguments)
    last = dist.get_rank() == dist.get_world_size() - 1
    forwards = 0

    if options.trainer:
        from launch.train_wan import calibration

        model, synthetic = calibration(shlex.split(options.trainer), ds_config)
    else:
        model, synthetic = Toy(), toy_batch

    def troubled(batch_size, shape):
        batch, loss = synthetic(batch_size, shape)

        def troubled_loss(engine, batch):
            nonlocal forwards
            forwards += 1
            if options.die_after and forwards > options.die_after:
                os._exit(9)
            load = batch_size * latent_tokens(*shape)
            time.sleep(WORK_S_A_TOKEN * load + (options.slow if last else 0.0))
            if last and options.fail_above and load > options.fail_above:
                raise torch.OutOfMemoryError(f"simulated at B*S = {load}")
            return loss(engine, batch)

        return batch, troubled_loss

    return model, troubled


def toy_batch(batch_size, shape):
    noise = torch.randn(2, batch_size, CHANNELS, *shape)
    batch = {
        "noisy": noise[0],
        "target": noise[1],
        "timestep": torch.rand(batch_size) * 1000,
        "text": torch.randn(batch_size, TEXT_LENGTH, TEXT_WIDTH),
    }
    return batch, lambda engine, batch: sample_losses(engine, batch).mean()
