"""What `al-deepspeed calibrate` scans: the trainer's own model and loss, on random latents of any shape.

    al-deepspeed calibrate --deepspeed-config launch/configs/zero3.json \
        --factory launch.train_wan:calibration -- --preset 1.3b --gradient-checkpointing

After `--` stand the options of the run. The corpus that the ds_config names gives channels and captions.
"""

from collections.abc import Callable

import torch
from deepspeed.accelerator import get_accelerator

from al_deepspeed.config import BATCHING_KEY, read_config
from al_deepspeed.data.manifest import read_manifest
from al_deepspeed.data.shards import LatentDataset
from al_deepspeed.errors import ConfigError
from al_deepspeed.training import model as models
from al_deepspeed.training import options
from al_deepspeed.training.objective import TIMESTEPS_A_LEVEL, flow_loss


def calibration(words: list[str], ds_config: dict) -> tuple[torch.nn.Module, Callable]:
    """The factory. Collective at ZeRO-3.

    Args:
        words: the run's options; those that bear on model and ds_config count.
        ds_config: the scan's, which receives what these options change.
    Returns:
        the model of such a run; and for (B, shape) a batch as its loss holds it on the device, and the loss.
    """
    arguments = options.parser("What a scan of the trainer takes.", for_a_run=False).parse_args(words)
    changed = options.changed_config(ds_config, arguments.set, arguments.precision)
    ds_config.clear()
    ds_config.update(changed)
    batching = read_config(ds_config).batching
    if batching is None:
        raise ConfigError(f"the ds_config does not enable {BATCHING_KEY}, which names the corpus.")
    latents = LatentDataset(read_manifest(batching.manifest))
    latent, text = (latents[0][name] for name in ("latent", "text"))
    weights = models.source(arguments, channels=latent.shape[0], text_dim=text.shape[1])
    model = models.make(weights, arguments, ds_config)
    device, dtype = placement = (
        torch.device(get_accelerator().current_device_name()),
        next(model.parameters()).dtype,
    )

    def loss(engine, batch: dict) -> torch.Tensor:
        return flow_loss(engine, batch, *placement).mean()

    def synthetic(batch_size: int, shape: tuple[int, int, int]) -> tuple[dict, Callable]:
        noisy, target = (torch.randn(batch_size, latent.shape[0], *shape, device=device) for _ in range(2))
        batch = {
            "noisy": noisy.to(dtype),
            "target": target,
            "timestep": TIMESTEPS_A_LEVEL * torch.rand(batch_size, device=device),
            "text": text.to(device, dtype).repeat(batch_size, 1, 1),
        }
        return batch, loss

    return model, synthetic
