"""Five steps of the tiny Wan at ZeRO-0, 1, 2 and 3 in turn: writes the parameters and what each rank ran."""

import json
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from tiny import NumberDataset, ds_config, trained, wan_model

import al_deepspeed


def parameters(engine) -> dict[str, torch.Tensor]:
    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(
        list(named.values()), enabled=engine.zero_optimization_stage() == 3
    ):
        return {name: parameter.detach().cpu().clone() for name, parameter in named.items()}


def run_stages(out: Path, manifest: Path) -> None:
    """OUT/parametersSTAGE.pt, OUT/ranSTAGE_rankR.json, and telemetry in OUT/stageSTAGE."""
    for stage in (0, 1, 2, 3):
        model = wan_model()
        engine, _, loader, _ = al_deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            dataset=NumberDataset(),
            config=ds_config(manifest, stage, batching={"run_dir": str(out / f"stage{stage}")}),
        )
        ran = [
            {"sample_ids": batch["sample_ids"].tolist(), "shape": batch["shape"], "filler": batch["filler"]}
            for batch in trained(engine, loader)
        ]
        left = parameters(engine)
        if dist.get_rank() == 0:
            torch.save(left, out / f"parameters{stage}.pt")
        (out / f"ran{stage}_rank{dist.get_rank()}.json").write_text(json.dumps(ran))
