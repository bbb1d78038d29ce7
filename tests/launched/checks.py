"""What the scripts of many small checks share: engines of the toy, refusals, and an mpu."""

from collections.abc import Callable

import torch.distributed as dist
from tiny import NumberDataset, Toy

import al_deepspeed
from al_deepspeed.errors import AdaptiveLoadError


def make(config: dict, **arguments):
    """An engine of the toy, and its loader; `arguments` are more of `initialize`."""
    model = Toy()
    arguments = {"dataset": NumberDataset(), **arguments}
    engine, _, loader, _ = al_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, **arguments
    )
    return engine, loader


def refusal(action: Callable[[], object]) -> list[str] | None:
    """[class, message] of the package's error that the action ends by."""
    try:
        action()
    except AdaptiveLoadError as error:
        return [type(error).__name__, str(error)]
    return None


class PairsAreModels:
    """An mpu: ranks 0 and 1 are one model (tensor parallel), 2 and 3 the next one."""

    def __init__(self) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.model, self.side = divmod(rank, 2)
        self.models = ranks // 2
        self.data_group = [dist.new_group(list(range(side, ranks, 2))) for side in (0, 1)][self.side]
        pairs = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]
        self.model_group = pairs[self.model]

    def get_data_parallel_rank(self):
        return self.model

    def get_data_parallel_world_size(self):
        return self.models

    def get_data_parallel_group(self):
        return self.data_group

    def get_model_parallel_rank(self):
        return self.side

    def get_model_parallel_world_size(self):
        return 2

    def get_model_parallel_group(self):
        return self.model_group
