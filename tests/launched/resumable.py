"""A run that can be killed: trains to --steps, saves every two steps, goes on from the last checkpoint.

    deepspeed resumable.py OUT_DIR [--first] --steps N

Each rank appends a line a step to OUT_DIR/steps_rankR.jsonl. `--first`, before that: the steps that must be
exact at every ZeRO stage (exactness.py), and a run to the end without any checkpoint, for comparison, whose
lines go to unbroken_rankR.jsonl. SIGTERM stops it cleanly.
"""

import json
from pathlib import Path

import torch.distributed as dist
from exactness import run_stages
from tiny import NumberDataset, Toy, command_line, ds_config, shared_manifest, start, trained

import al_deepspeed
from al_deepspeed.agreement import StopOnSignal

parser = command_line()
parser.add_argument("--first", action="store_true")
parser.add_argument("--steps", type=int, required=True)
arguments = parser.parse_args()


def train(name: str, num_workers: int, checkpoints: Path | None) -> None:
    config = ds_config(
        arguments.out / "manifest.csv",
        stage=3,
        sampling={"num_workers": num_workers},
        optimizer={"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 6}},
    )
    model = Toy()
    engine, _, loader, _ = al_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), dataset=NumberDataset(), config=config
    )
    if checkpoints and (checkpoints / "latest").is_file():
        _, client_state = engine.load_checkpoint(str(checkpoints))
        assert client_state["mine"] == {"steps": engine.global_steps} and "al_deepspeed" not in client_state
    record = (arguments.out / f"{name}_rank{dist.get_rank()}.jsonl").open("a")
    with StopOnSignal() as stop:
        while engine.global_steps < arguments.steps:
            ids, losses = [], []
            epoch, step = loader.epoch, engine.global_steps
            for batch in trained(engine, loader):
                ids.append(batch["sample_ids"].tolist())
                losses.append(batch["loss"])
                if engine.global_steps == step:
                    continue
                step = engine.global_steps
                line = {"step": step, "epoch": epoch, "ids": ids, "losses": losses}
                record.write(json.dumps(line) + "\n")
                record.flush()
                print("step", engine.global_steps, flush=True)
                ids, losses = [], []
                stopped = stop.agreed()
                if checkpoints and (engine.global_steps % 2 == 0 or stopped):
                    state = {"mine": {"steps": engine.global_steps}}
                    engine.save_checkpoint(str(checkpoints), client_state=state)
                    assert state == {"mine": {"steps": engine.global_steps}}
                if stopped or engine.global_steps == arguments.steps:
                    break
            if stopped:
                print("stopped at", engine.global_steps, flush=True)
                return


start(arguments.local_rank)
manifest = shared_manifest(arguments.out)
if arguments.first:
    run_stages(arguments.out, manifest)
    train("unbroken", 0, None)
train("steps", 4, arguments.out / "checkpoints")
