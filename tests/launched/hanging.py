"""ZeRO-3 with a module that images skip: hangs as soon as an image and a video run side by side.

All layers have one size and the loss is averaged in a group of its own, so that gloo hangs as NCCL would.
Where sizes differ, gloo aborts by itself: "collective mismatch in your code".
"""

from pathlib import Path

import torch
import torch.distributed as dist
from tiny import CHANNELS, NumberDataset, ds_config, sample_losses, shared_manifest

import al_deepspeed

ROWS = [(1, 8, 8), (5, 8, 8)]


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


def hang(out: Path) -> None:
    """The watchdog must end the process."""
    logging_group = dist.new_group()
    config = ds_config(shared_manifest(out, ROWS), stage=3, accumulation=1, batching={"hang_timeout_s": 4.0})
    config["zero_optimization"] |= {
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    model = SkipsTime()
    engine, _, loader, _ = al_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), dataset=NumberDataset(ROWS), config=config
    )
    for batch in loader:
        loss = sample_losses(engine, batch).mean()
        dist.all_reduce(loss.detach(), group=logging_group)
        engine.backward(loss * batch["loss_weight"])
        engine.step()
    print("came through", flush=True)
