"""Five steps of the tiny Wan at ZeRO-0, 1, 2 and 3 in turn: writes the parameters and what each rank ran.

deepspeed exactness.py OUT_DIR
"""

import json

import deepspeed
import torch
from tiny import NumberDataset, command_line, ds_config, shared_manifest, start, trained, wan_model

import al_deepspeed

arguments = command_line().parse_args()


def parameters(engine) -> dict[str, torch.Tensor]:
    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(
        list(named.values()), enabled=engine.zero_optimization_stage() == 3
    ):
        return {name: parameter.detach().cpu().clone() for name, parameter in named.items()}


rank = start(arguments.local_rank)
manifest = shared_manifest(arguments.out)
for stage in (0, 1, 2, 3):
    model = wan_model()
    engine, _, loader, _ = al_deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        dataset=NumberDataset(),
        config=ds_config(manifest, stage, batching={"run_dir": str(arguments.out / f"stage{stage}")}),
    )
    ran = [
        {"sample_ids": batch["sample_ids"].tolist(), "shape": batch["shape"], "filler": batch["filler"]}
        for batch in trained(engine, loader)
    ]
    left = parameters(engine)
    if rank == 0:
        torch.save(left, arguments.out / f"parameters{stage}.pt")
    (arguments.out / f"ran{stage}_rank{rank}.json").write_text(json.dumps(ran))
