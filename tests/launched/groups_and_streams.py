"""Four ranks: who shares a batch under Ulysses and an mpu, streams of unequal length, plans that differ.

    deepspeed groups_and_streams.py OUT_DIR

Writes OUT_DIR/rankR.json: check -> what this rank saw.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from tiny import NumberDataset, Toy, ds_config, sample_losses, write_manifest

import al_deepspeed
from al_deepspeed.errors import AdaptiveLoadError

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--local_rank", type=int)
arguments = parser.parse_args()
out = arguments.out
deepspeed.init_distributed("gloo")
rank = dist.get_rank()
manifest = out / "manifest.csv"
if rank == 0:
    write_manifest(manifest)
dist.barrier()
seen: dict[str, object] = {}


def start(config: dict, **arguments):
    model = Toy()
    engine, _, loader, _ = al_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, **arguments
    )
    return engine, loader


def train(engine, loader, micro_steps: int | None = None) -> list[dict]:
    """An epoch, or so many micro-steps of it: what each batch was, and the sum of its noise."""
    ran = []
    for batch in loader:
        loss = sample_losses(engine, batch).mean()
        loader.record_loss(loss)
        engine.backward(loss * batch["loss_weight"])
        engine.step()
        ran.append(
            {
                "ids": batch["sample_ids"].tolist(),
                "names": batch.get("name", torch.zeros(0)).tolist(),
                "shape": list(batch["shape"]),
                "latents": list(batch["noisy"].shape[2:]),
                "filler": batch["filler"],
            }
        )
        if len(ran) == micro_steps:
            break
    return ran


def refusal(action) -> list[str]:
    try:
        action()
    except AdaptiveLoadError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", "was refused"]


class TwoModels:
    """An mpu: ranks 0 and 1 are one model (tensor parallel), 2 and 3 another."""

    def __init__(self) -> None:
        self.data = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        self.model = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]

    def get_data_parallel_rank(self):
        return rank // 2

    def get_data_parallel_world_size(self):
        return 2

    def get_data_parallel_group(self):
        return self.data

    def get_model_parallel_rank(self):
        return rank % 2

    def get_model_parallel_world_size(self):
        return 2

    def get_model_parallel_group(self):
        return self.model


# Who shares a batch.
seen["mpu"] = train(*start(ds_config(manifest, 0), mpu=TwoModels(), dataset=NumberDataset()))
groups.mpu = None
sequences = {"sequence_parallel_size": 2, "data_parallel_size": 2}
seen["mesh"] = train(*start(ds_config(manifest, 1, **sequences), dataset=NumberDataset()))
groups.mesh_device = None

# Ulysses as Megatron-like code sets it up, where the engine knows no data-parallel size.
from deepspeed.runtime.sequence_parallel import parallel_state_sp  # noqa: E402

parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=2)
seen["ulysses"] = train(*start(ds_config(manifest, 1), mpu=parallel_state_sp, dataset=NumberDataset()))
stream_config = ds_config(manifest, 1, batching={"strategy": "balanced", "lookahead": 4})
del stream_config["data_efficiency"]["data_sampling"]["dual_constraint_batching"]["manifest"]
seen["stream of models"] = refusal(
    lambda: start(stream_config, mpu=parallel_state_sp, dataset=iter(()), shape_of=len)
)
groups.mpu = None


class Part(torch.utils.data.IterableDataset):
    """Every fourth row from this rank's own on, of which rank 3 reads five alone."""

    def __iter__(self):
        rows = range(rank, 56, 4)
        data = NumberDataset()
        for row in rows if rank < 3 else rows[:5]:
            yield data[row] | {"name": row}


# A stream: two epochs, a break inside the first, a checkpoint inside the second.
run_dir = out / "stream"
stream_config["data_efficiency"]["data_sampling"]["dual_constraint_batching"]["run_dir"] = str(run_dir)


def start_stream():
    return start(stream_config, dataset=Part(), shape_of=lambda sample: sample["noisy"].shape[1:])


engine, loader = start_stream()
first = train(engine, loader, 3)  # in the middle of a step
seen["first epoch"] = first + train(engine, loader)
seen["epoch after"] = loader.epoch
seen["second epoch"] = train(engine, loader, 2)
engine.save_checkpoint(str(out / "checkpoint"))
again, again_loader = start_stream()
again.load_checkpoint(str(out / "checkpoint"))
seen["resumed"] = [again.global_steps - engine.global_steps, again_loader.epoch]
seen["second epoch again"] = train(again, again_loader)

# A machine whose arithmetic differs: rank 2 plans by another cost.
other, loader = start(ds_config(manifest, 1, batching={"strategy": "balanced"}), dataset=NumberDataset())
sampler = loader._sampler
if rank == 2:
    sampler.cost, sampler._plan = replace(sampler.cost, exponent=1.5), None
seen["plans differ"] = refusal(lambda: train(other, loader))

# Tensor parallelism by DeepSpeed, which cuts the layers up; and its pipelines, which step by themselves.
layers = [
    {"patterns": [".*first\\.weight$", ".*text\\.weight$"], "partition_type": "column"},
    {"patterns": [".*last\\.weight$"], "partition_type": "row"},
]
partition = {"use_default_specs": False, "layer_specs": layers}
config = ds_config(manifest, 1, tensor_parallel={"autotp_size": 2, "partition_config": partition})
engine, loader = start(config, dataset=NumberDataset())
assert engine.module.first.weight.shape[0] == 4
seen["autotp"] = train(engine, loader)
pipeline = deepspeed.pipe.PipelineModule(layers=[torch.nn.Linear(4, 4)] * 2, num_stages=2)
seen["pipeline"] = refusal(
    lambda: al_deepspeed.initialize(model=pipeline, config=ds_config(manifest, 1), dataset=NumberDataset())
)
(out / f"rank{rank}.json").write_text(json.dumps(seen))
