"""One rank of a comparison: an epoch of the same samples by each strategy with each AdaLN, in one launch.

    deepspeed benchmarks/multi_gpu.py OUT --config FILE [options of launch/train_wan.py]

Writes OUT/{eager,fused}/STRATEGY/telemetry.jsonl. Three steps before the first epoch of each op warm the
device up and are not kept; nothing is saved or exported between epochs. The eager op comes first, since
patches stay in a process.
"""

import argparse
import gc
import sys
import warnings
from pathlib import Path

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from al_deepspeed.training import options
from launch.train_wan import Trainer

FUSED = {"eager": "false", "fused": "true"}
STRATEGIES = ("equal_token", "dual_constraint", "balanced")
WARM_UP_STEPS = 3


def train(words: list[str], folder: Path, strategy: str, max_steps: int | None = None) -> None:
    """One epoch, or its first steps, into `folder`."""
    key = "data_efficiency.data_sampling.dual_constraint_batching.strategy"
    parser = options.parser(__doc__.splitlines()[0])
    trainer = Trainer(parser.parse_args([*words, "--run", str(folder), "--set", f"{key}={strategy}"]))
    trainer.dataset.epoch = 0
    for batch in trainer.loader:
        trainer.micro_step(batch)
        if trainer.engine.global_steps == max_steps:
            break
    if dist.get_rank() == 0:
        print(f"{folder.name}: {trainer.engine.global_steps} steps", flush=True)
    trainer.engine.destroy()
    del trainer, batch
    gc.unfreeze()  # initialize froze the heap, and with it this engine
    gc.collect()
    get_accelerator().empty_cache()


def main() -> None:
    launched = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    launched.add_argument("out", type=Path)
    launched.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # from the launcher
    arguments, words = launched.parse_known_args()
    out = arguments.out
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    get_accelerator().set_device(arguments.local_rank)
    deepspeed.init_distributed()
    for op, enabled in FUSED.items():
        own = [*words, "--set", f'fused_adaln={{"enabled": {enabled}}}']
        train(own, out / op / "warm_up", STRATEGIES[0], WARM_UP_STEPS)
        for strategy in STRATEGIES:
            train(own, out / op / strategy, strategy)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
