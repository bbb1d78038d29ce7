"""What the engine refuses, what its checkpoints carry, and which ranks share a batch, in one launch.

    deepspeed engine_checks.py OUT_DIR

Writes OUT_DIR/rankR.json: check -> what this rank saw. Ends by a hang, which the watchdog must report.
"""

import json

import torch.distributed as dist
from checks import PairsAreModels, make, refusal
from deepspeed.utils import groups
from hanging import hang
from tiny import ROWS, NumberDataset, command_line, ds_config, shared_manifest, start, trained, write_manifest

from al_deepspeed.calibration.assemble import calibrate, with_budget
from al_deepspeed.calibration.file import Setting, write_calibration
from al_deepspeed.calibration.points import Point
from al_deepspeed.data.manifest import read_manifest

arguments = command_line().parse_args()
out = arguments.out
rank = start(arguments.local_rank)
changed, empty = out / "changed.csv", out / "empty.csv"
if rank == 0:
    write_manifest(changed, [*ROWS, (1, 8, 8)])
    empty.write_text("latent_frames,latent_height,latent_width\n")
manifest = shared_manifest(out)
seen: dict[str, object] = {}


def train(engine, loader, steps: int) -> list[list[int]]:
    """Sample ids of this rank's micro-batches until so many more steps are done."""
    ids, last = [], engine.global_steps + steps
    while engine.global_steps < last:
        for batch in trained(engine, loader):
            ids.append(batch["sample_ids"].tolist())
            if engine.global_steps == last:
                break
    return ids


def not_a_dict(samples: list) -> list:
    return samples


REFUSED = {
    "unknown key": lambda: make(ds_config(manifest, 1, batching={"stratgy": "balanced"})),
    "max_tokens 0": lambda: make(ds_config(manifest, 1, batching={"max_tokens": 0})),
    "manifest missing": lambda: make(ds_config(out / "absent.parquet", 1)),
    "manifest missing on rank 1": lambda: make(ds_config(manifest if rank == 0 else out / "absent.csv", 1)),
    "other manifest on rank 1": lambda: make(
        ds_config(manifest if rank == 0 else changed, 1),
        dataset=NumberDataset(None if rank == 0 else [*ROWS, ROWS[0]]),
    ),
    "empty corpus": lambda: make(ds_config(empty, 1)),
    "dataset too short": lambda: make(ds_config(manifest, 1), dataset=NumberDataset(ROWS[:-1])),
    "training_data": lambda: make(ds_config(manifest, 1), training_data=NumberDataset()),
    "no shards": lambda: make(ds_config(manifest, 1), dataset=None),
    "calibration missing": lambda: make(ds_config(manifest, 1, batching={"calibration": "absent.json"})),
    "drop leaves nothing": lambda: make(
        ds_config(manifest, 1, accumulation=64, batching={"tail": "drop", "strategy": "dual_constraint"})
    ),
    "micro-batch 4": lambda: make(ds_config(manifest, 1, train_micro_batch_size_per_gpu=4)),
    "collate to a list": lambda: train(*make(ds_config(manifest, 1), collate_fn=not_a_dict), 1),
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
    engine, loader = make(config)
    first = train(engine, loader, 3)
    mine = {"mine": rank}
    engine.save_checkpoint(str(out / name), client_state=mine)
    after = train(engine, loader, 3)
    again, again_loader = make(config)
    _, client_state = again.load_checkpoint(str(out / name))
    seen[name] = {
        "ids": first + after,
        "ids_again": train(again, again_loader, 3),
        "mine": client_state.get("mine"),
        "mine_after": mine,
        "ours": "al_deepspeed" in client_state,
    }
weights_only, loader = make(ds_config(manifest, 0))
weights_only.load_checkpoint(str(out / "plain"), load_module_only=True)
seen["weights only"] = {"ids": train(weights_only, loader, 1), "first": seen["plain"]["ids"][:2]}
other, loader = make(ds_config(changed, 0), dataset=NumberDataset([*ROWS, (1, 8, 8)]))
seen["refused"]["fingerprint changed"] = refusal(lambda: other.load_checkpoint(str(out / "plain")))

# A custom schedule: nothing above 24 tokens until step 3, everything from then on.
custom = json.loads(json.dumps(CURRICULUM))
custom["curriculum_metrics"]["seqlen"] |= {"schedule_type": "custom", "schedule_config": {}}
engine, loader = make(ds_config(manifest, 1, sampling={"curriculum_learning": custom}))
engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 24 if step < 3 else 80})
seen["custom"] = train(engine, loader, 4)

# Telemetry: the file, DeepSpeed's CSV monitor, and learning rates scaled by the step's size.
engine, loader = make(
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
engine, loader = make(config)
steps = len(loader) // 2
first = train(engine, loader, steps + 1)
engine.save_checkpoint(str(out / "recalibrated"))
after = train(engine, loader, 2)
again, again_loader = make(config)
again.load_checkpoint(str(out / "recalibrated"))
seen["recalibrated"] = {"steps": steps, "ids": after, "ids_again": train(again, again_loader, 2)}

engine, loader = make(ds_config(manifest, 0), mpu=PairsAreModels())
seen["tensor parallel"] = [batch["sample_ids"].tolist() for batch in loader]
groups.mpu = None
engine, loader = make(ds_config(manifest, 0, sequence_parallel_size=2, data_parallel_size=1))
seen["sequence parallel"] = [batch["sample_ids"].tolist() for batch in loader]
groups.mesh_device = None
(out / f"rank{rank}.json").write_text(json.dumps(seen))
(out / "hang").mkdir(exist_ok=True)
hang(out / "hang")
