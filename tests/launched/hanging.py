"""ZeRO-3 with a module that images skip: hangs as soon as an image and a video run side by side.

    deepspeed hanging.py OUT_DIR

All layers have one size and the loss is averaged in a group of its own, so that gloo hangs as NCCL would.
Where sizes differ, gloo aborts by itself: "collective mismatch in your code".
"""

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from tiny import CHANNELS, NumberDataset, ds_config, sample_losses, write_manifest

import al_deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--local_rank", type=int)
arguments = parser.parse_args()


class SkipsTime(torch.nn.Module):
    """A temporal layer that only videos go through."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.first, self.second = (torch.nn.Linear(CHANNELS, CHANNELS) for _ in range(3))

    def forward(self, hidden_states, timestep, encoder_hidden_states, return_dict):
        hidden = hidden_states.movedim(1, -1)
        if hidden_states.shape[2] > 1:
            hidden = self.time(hidden)
        return (self.second(self.first(hidden)).movedim(-1, 1),)


deepspeed.init_distributed("gloo")
logging_group = dist.new_group()
rows = [(1, 8, 8), (5, 8, 8)]
if dist.get_rank() == 0:
    write_manifest(arguments.out / "manifest.csv", rows)
dist.barrier()
model = SkipsTime()
config = ds_config(arguments.out / "manifest.csv", stage=3, accumulation=1, batching={"hang_timeout_s": 4.0})
config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
engine, _, loader, _ = al_deepspeed.initialize(
    model=model, model_parameters=model.parameters(), dataset=NumberDataset(rows), config=config
)
for batch in loader:
    loss = sample_losses(engine, batch).mean()
    dist.all_reduce(loss.detach(), group=logging_group)
    engine.backward(loss * batch["loss_weight"])
    engine.step()
print("came through", flush=True)
