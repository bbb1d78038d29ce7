"""What the engine refuses, what its checkpoints carry, and which ranks share a batch, in one launch.

    deepspeed engine_checks.py OUT_DIR

Writes OUT_DIR/rankR.json: check -> what this rank saw. Ends on purpose by an error that nobody catches.
"""

import argparse
import json
from pathlib import Path

import deepspeed
import torch.distributed as dist
from deepspeed.utils import groups
from tiny import ROWS, NumberDataset, Toy, ds_config, sample_losses, write_manifest

import al_deepspeed
from al_deepspeed.calibration.assemble import calibrate, with_budget
from al_deepspeed.calibration.file import Setting, write_calibration
from al_deepspeed.calibration.points import Point
from al_deepspeed.data.manifest import read_manifest
from al_deepspeed.errors import AdaptiveLoadError

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--local_rank", type=int)
arguments = parser.parse_args()
out = arguments.out

deepspeed.init_distributed("gloo")
rank = dist.get_rank()
manifest, changed, empty = out / "manifest.csv", out / "changed.csv", out / "empty.csv"
if rank == 0:
    write_manifest(manifest)
    write_manifest(changed, [*ROWS, (1, 8, 8)])
    empty.write_text("latent_frames,latent_height,latent_width\n")
dist.barrier()
seen: dict[str, object] = {}


def start(config: dict, **arguments):
    model = Toy()
    arguments = {"dataset": NumberDataset(), **arguments}
    engine, _, loader, _ = al_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, **arguments
    )
    return engine, loader


def train(engine, loader, steps: int) -> list[list[int]]:
    """Sample ids of this rank's micro-batches until so many more steps are done."""
    ids, last = [], engine.global_steps + steps
    while engine.global_steps < last:
        for batch in loader:
            engine.backward(sample_losses(engine, batch).mean() * batch["loss_weight"])
            engine.step()
            ids.append(batch["sample_ids"].tolist())
            if engine.global_steps == last:
                break
    return ids


def refusal(action) -> list[str] | None:
    try:
        action()
    except AdaptiveLoadError as error:
        return [type(error).__name__, str(error)]
    return None


def not_a_dict(samples: list) -> list:
    return samples


REFUSED = {
    "unknown key": lambda: start(ds_config(manifest, 1, batching={"stratgy": "balanced"})),
    "max_tokens 0": lambda: start(ds_config(manifest, 1, batching={"max_tokens": 0})),
    "manifest missing": lambda: start(ds_config(out / "absent.parquet", 1)),
    "manifest missing on rank 1": lambda: start(ds_config(manifest if rank == 0 else out / "absent.csv", 1)),
    "other manifest on rank 1": lambda: start(
        ds_config(manifest if rank == 0 else changed, 1),
        dataset=NumberDataset(None if rank == 0 else [*ROWS, ROWS[0]]),
    ),
    "empty corpus": lambda: start(ds_config(empty, 1)),
    "dataset too short": lambda: start(ds_config(manifest, 1), dataset=NumberDataset(ROWS[:-1])),
    "training_data": lambda: start(ds_config(manifest, 1), training_data=NumberDataset()),
    "no shards": lambda: start(ds_config(manifest, 1), dataset=None),
    "calibration missing": lambda: start(ds_config(manifest, 1, batching={"calibration": "absent.json"})),
    "drop leaves nothing": lambda: start(
        ds_config(manifest, 1, accumulation=64, batching={"tail": "drop", "strategy": "dual_constraint"})
    ),
    "micro-batch 4": lambda: start(ds_config(manifest, 1, train_micro_batch_size_per_gpu=4)),
    "collate to a list": lambda: train(*start(ds_config(manifest, 1), collate_fn=not_a_dict), 1),
}
seen["refused"] = {name: refusal(action) for name, action in REFUSED.items()}

# Checkpoints, with curriculum learning on and off, at ZeRO-0 and 2; `mine` is the user's own state.
CURRICULUM = {
    "enabled": True,
    "curriculum_metrics": {
        "seqlen": {
            "min_difficulty": 16,
            "max_difficulty": 80,
            "schedule_type": "fixed_discrete",
            "schedule_config": {"difficulty": [24, 48, 80], "max_step": [2, 4]},
        }
    },
}
for name, stage, sampling in (("plain", 0, {}), ("curriculum", 2, {"curriculum_learning": CURRICULUM})):
    config = ds_config(manifest, stage, sampling=sampling)
    engine, loader = start(config)
    first = train(engine, loader, 3)
    mine = {"mine": rank}
    engine.save_checkpoint(str(out / name), client_state=mine)
    after = train(engine, loader, 3)
    again, again_loader = start(config)
    _, client_state = again.load_checkpoint(str(out / name))
    seen[name] = {
        "ids": first + after,
        "ids_again": train(again, again_loader, 3),
        "mine": client_state.get("mine"),
        "mine_after": mine,
        "ours": "al_deepspeed" in client_state,
    }
weights_only, loader = start(ds_config(manifest, 0))
weights_only.load_checkpoint(str(out / "plain"), load_module_only=True)
seen["weights only"] = {"ids": train(weights_only, loader, 1), "first": seen["plain"]["ids"][:2]}
other, loader = start(ds_config(changed, 0), dataset=NumberDataset([*ROWS, (1, 8, 8)]))
seen["refused"]["fingerprint changed"] = refusal(lambda: other.load_checkpoint(str(out / "plain")))

# A custom schedule: nothing above 24 tokens until step 3, everything from then on.
custom = json.loads(json.dumps(CURRICULUM))
custom["curriculum_metrics"]["seqlen"] |= {"schedule_type": "custom", "schedule_config": {}}
engine, loader = start(ds_config(manifest, 1, sampling={"curriculum_learning": custom}))
engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 24 if step < 3 else 80})
seen["custom"] = train(engine, loader, 4)

# Telemetry: the file, DeepSpeed's CSV monitor, and learning rates scaled by the step's size.
engine, loader = start(
    ds_config(
        manifest,
        1,
        batching={"run_dir": str(out / "run"), "lr_scaling": "linear"},
        csv_monitor={"enabled": True, "output_path": str(out / "csv"), "job_name": "job"},
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 2}},
    )
)
train(engine, loader, 4)
seen["rates"] = [group["lr"] for group in engine.optimizer.param_groups]
seen["deepspeed samples"] = engine.global_samples


# A calibration that the run corrects after its first epoch, and a resume in the second.
if rank == 0:
    corpus = read_manifest(manifest).corpus()
    scan = [
        Point(size, int(s), 1 + size * s * (0.01 + s / 4000)) for s in corpus.tokens for size in (1, 2, 4, 8)
    ]
    scanned = with_budget(calibrate(scan, Setting(zero_stage=0), max_tokens=160), corpus, 2)
    write_calibration(scanned, out / "calibration.json")
dist.barrier()
config = ds_config(
    manifest,
    1,
    batching={
        "calibration": str(out / "calibration.json"),
        "recalibrate": "epoch",
        "run_dir": str(out / "recalibrated"),
        **dict.fromkeys(("max_tokens", "max_cost", "exponent")),
    },
)
engine, loader = start(config)
steps = len(loader) // 2
first = train(engine, loader, steps + 1)
engine.save_checkpoint(str(out / "recalibrated"))
after = train(engine, loader, 2)
again, again_loader = start(config)
again.load_checkpoint(str(out / "recalibrated"))
seen["recalibrated"] = {"steps": steps, "ids": after, "ids_again": train(again, again_loader, 2)}


class OnePipe:
    """An mpu under which both ranks are one model: tensor parallel of size 2, data parallel of size 1."""

    def __init__(self) -> None:
        self.alone = [dist.new_group([one]) for one in range(2)][rank]
        self.all = dist.new_group()

    def get_data_parallel_rank(self):
        return 0

    def get_data_parallel_world_size(self):
        return 1

    def get_data_parallel_group(self):
        return self.alone

    def get_model_parallel_rank(self):
        return rank

    def get_model_parallel_world_size(self):
        return 2

    def get_model_parallel_group(self):
        return self.all


engine, loader = start(ds_config(manifest, 0), mpu=OnePipe())
seen["tensor parallel"] = [batch["sample_ids"].tolist() for batch in loader]
groups.mpu = None
engine, loader = start(ds_config(manifest, 0, sequence_parallel_size=2, data_parallel_size=1))
seen["sequence parallel"] = [batch["sample_ids"].tolist() for batch in loader]
groups.mesh_device = None
(out / f"rank{rank}.json").write_text(json.dumps(seen))
start(ds_config(manifest, 1, batching={"lookahead": -1}))
