"""Four ranks: who shares a batch under Ulysses and an mpu, streams of unequal length, plans that differ.

    deepspeed groups_and_streams.py OUT_DIR

Writes OUT_DIR/rankR.json: check -> what this rank saw. Ends on purpose by an error that nobody catches.
"""

import json
from dataclasses import replace
from itertools import islice

import deepspeed
import torch
from checks import PairsAreModels, make, refusal
from deepspeed.utils import groups
from tiny import NumberDataset, command_line, ds_config, shared_manifest, start, trained

import al_deepspeed

arguments = command_line().parse_args()
out = arguments.out
rank = start(arguments.local_rank)
manifest = shared_manifest(out)
seen: dict[str, object] = {}


def train(engine, loader, micro_steps: int | None = None) -> list[dict]:
    """What each batch was, of an epoch or of so many micro-steps of it."""
    return [
        {
            "ids": batch["sample_ids"].tolist(),
            "names": batch.get("name", torch.zeros(0)).tolist(),
            "shape": list(batch["shape"]),
            "latents": list(batch["noisy"].shape[2:]),
            "filler": batch["filler"],
        }
        for batch in islice(trained(engine, loader), micro_steps)
    ]


# Who shares a batch.
seen["mpu"] = train(*make(ds_config(manifest, 0), mpu=PairsAreModels()))
groups.mpu = None
sequences = {"sequence_parallel_size": 2, "data_parallel_size": 2}
seen["mesh"] = train(*make(ds_config(manifest, 1, **sequences)))
groups.mesh_device = None

# Ulysses as Megatron-like code sets it up, where the engine knows no data-parallel size.
from deepspeed.runtime.sequence_parallel import parallel_state_sp  # noqa: E402

parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=2)
seen["ulysses"] = train(*make(ds_config(manifest, 1), mpu=parallel_state_sp))
stream_config = ds_config(manifest, 1, batching={"strategy": "balanced", "lookahead": 4})
del stream_config["data_efficiency"]["data_sampling"]["dual_constraint_batching"]["manifest"]


class PartOfModel(torch.utils.data.IterableDataset):
    """Every second row, by model; only the first rank of a model may read it."""

    def __iter__(self):
        assert rank % 2 == 0
        for row in range(rank // 2, 56, 2):
            yield NumberDataset()[row] | {"name": row}


def grid_of(sample: dict) -> tuple[int, int, int]:
    return sample["noisy"].shape[1:]


models = {"mpu": parallel_state_sp, "dataset": PartOfModel(), "shape_of": grid_of}
seen["stream of models"] = train(*make(stream_config, **models))
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
    return make(stream_config, dataset=Part(), shape_of=grid_of)


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
other, loader = make(ds_config(manifest, 1, batching={"strategy": "balanced"}))
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
engine, loader = make(config)
assert engine.module.first.weight.shape[0] == 4
seen["autotp"] = train(engine, loader)
pipeline = deepspeed.pipe.PipelineModule(layers=[torch.nn.Linear(4, 4)] * 2, num_stages=2)
seen["pipeline"] = refusal(
    lambda: al_deepspeed.initialize(model=pipeline, config=ds_config(manifest, 1), dataset=NumberDataset())
)
(out / f"rank{rank}.json").write_text(json.dumps(seen))
make(ds_config(manifest, 1, batching={"lookahead": -1}))
