"""Five steps of the tiny Wan at ZeRO-0, 1, 2 and 3 in turn: writes the parameters and what each rank ran.

deepspeed exactness.py OUT_DIR
"""

import argparse
import json
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from tiny import NumberDataset, ds_config, sample_losses, start, wan_model, write_manifest

import al_deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--local_rank", type=int)
arguments = parser.parse_args()


def parameters(engine) -> dict[str, torch.Tensor]:
    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(
        list(named.values()), enabled=engine.zero_optimization_stage() == 3
    ):
        return {name: parameter.detach().cpu().clone() for name, parameter in named.items()}


start(arguments.local_rank)
rank = dist.get_rank()
manifest = arguments.out / "manifest.csv"
if rank == 0:
    write_manifest(manifest)
dist.barrier()
ran = []
for stage in (0, 1, 2, 3):
    model = wan_model()
    engine, _, loader, _ = al_deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        dataset=NumberDataset(),
        config=ds_config(manifest, stage, batching={"run_dir": str(arguments.out / f"stage{stage}")}),
    )
    ran = []
    for batch in loader:
        loss = sample_losses(engine, batch).mean()
        loader.record_loss(loss)
        engine.backward(loss * batch["loss_weight"])
        engine.step()
        ran.append(
            {"sample_ids": batch["sample_ids"].tolist(), "shape": batch["shape"], "filler": batch["filler"]}
        )
    trained = parameters(engine)
    if rank == 0:
        torch.save(trained, arguments.out / f"parameters{stage}.pt")
    (arguments.out / f"ran{stage}_rank{rank}.json").write_text(json.dumps(ran))
