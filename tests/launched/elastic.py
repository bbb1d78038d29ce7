"""One life of a run that is killed and goes on with another number of ranks, at ZeRO-1, 2 and 3 in turn.

    deepspeed elastic.py OUT_DIR --life N --accumulation G [--last]

Each stage loads what the life before saved, trains two steps, saves, and trains one more step that the next
life must do again; ZeRO-3 then trains on until somebody kills it. The last life trains to the epoch's end in
place of that, and then meets a checkpoint without Adam's state. Rank 0 writes the optimizer's whole state
after loading and before saving.
"""

import json
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from checks import make, refusal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tiny import CHANNELS, NumberDataset, Toy, command_line, ds_config, shared_manifest, start, trained

import al_deepspeed

parser = command_line()
parser.add_argument("--life", type=int, required=True)
parser.add_argument("--accumulation", type=int, required=True)
parser.add_argument("--last", action="store_true")
arguments = parser.parse_args()
out, life = arguments.out, arguments.life
rank = start(arguments.local_rank)
manifest = shared_manifest(out)


class Partly(Toy):
    """With a frozen layer and a buffer, whose values are those of the first life."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(CHANNELS, 7).requires_grad_(False)
        self.register_buffer("count", torch.tensor([float(life)]))
        torch.nn.init.constant_(self.frozen.weight, life)

    def forward(self, hidden_states, timestep, encoder_hidden_states, return_dict=False):
        inputs = (value.bfloat16() for value in (hidden_states, timestep, encoder_hidden_states))
        return tuple(value.float() for value in super().forward(*inputs, return_dict))


def whole_state(engine) -> dict[str, torch.Tensor]:
    """What a checkpoint must carry: master weights, moments, frozen weights, buffers, settings of groups."""
    state = dict(engine.module.named_buffers())
    if (
        engine.zero_optimization_stage() < 3
    ):  # DeepSpeed links states in the first group's step, others too early
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, value in engine.module.named_parameters():
        if not value.requires_grad:
            with deepspeed.zero.GatheredParameters([value], enabled=hasattr(value, "ds_id")):
                state[name] = value.detach().clone()
            continue
        state[name] = safe_get_full_fp32_param(value)
        for key in ("exp_avg", "exp_avg_sq"):
            state[f"{name}.{key}"] = safe_get_full_optimizer_state(value, key)
    for number, group in enumerate(engine.optimizer.param_groups):
        state[f"group {number}"] = torch.tensor([group["lr"], group["weight_decay"]])
    steps = {float(value["step"]) for value in engine.optimizer.optimizer.state.values()}
    state["step"] = torch.tensor(sorted(steps))
    return state


def write_state(engine, name: str) -> None:
    state = whole_state(engine)
    if rank == 0:
        torch.save(state, out / f"{name}.pt")


def train(engine, loader, steps: int | None, record) -> None:
    """So many steps, or the rest of the epoch."""
    step, ids = engine.global_steps, []
    last = step + (steps or 1000)
    for batch in trained(engine, loader):
        ids += [] if batch["filler"] else batch["sample_ids"].tolist()
        if engine.global_steps > step:
            step = engine.global_steps
            line = {"life": life, "step": step, "ids": ids, "epoch": loader.epoch}
            record.write(json.dumps(line) + "\n")
            record.flush()
            ids = []
        if step == last:
            break


def run(stage: int) -> None:
    folder = out / f"zero{stage}"
    model = Partly()
    decayed = [
        value for name, value in model.named_parameters() if value.requires_grad and "bias" not in name
    ]
    rest = [value for name, value in model.named_parameters() if value.requires_grad and "bias" in name]
    engine, _, loader, _ = al_deepspeed.initialize(
        model=model,
        model_parameters=[{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        dataset=NumberDataset(),
        config=ds_config(
            manifest,
            stage,
            accumulation=arguments.accumulation,
            batching={"run_dir": str(folder), "strategy": "balanced"},
            optimizer={"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 6}},
            bf16={"enabled": True},
        ),
    )
    with (folder / f"ids_life{life}_rank{rank}.jsonl").open("w") as record:
        if life > 1:
            path, _ = engine.load_checkpoint(str(folder))
            assert Path(path).is_file()
            write_state(engine, f"zero{stage}_loaded{life}")
        if arguments.last:
            train(engine, loader, None, record)
            return
        train(engine, loader, 2, record)
        write_state(engine, f"zero{stage}_saved{life}")
        engine.save_checkpoint(str(folder))
        train(engine, loader, 1, record)
        print(f"ZeRO-{stage} is past its checkpoint", flush=True)
        while stage == 3:
            train(engine, loader, 1, record)


def refused() -> str:
    """SGD's checkpoint, made to look like one of two ranks."""
    config = ds_config(manifest, 1)
    folder = out / "sgd"
    make(config)[0].save_checkpoint(str(folder))
    if rank == 0:
        file = folder / "global_step0" / "mp_rank_00_model_states.pt"
        torch.save(torch.load(file, weights_only=False) | {"dp_world_size": 2}, file)
    dist.barrier()
    _, message = refusal(lambda: make(config)[0].load_checkpoint(str(folder)))
    return message


for stage in (1, 2, 3):
    began = time.perf_counter()
    run(stage)
    print(f"ZeRO-{stage} took {time.perf_counter() - began:.1f} s", flush=True)
if arguments.last:
    (out / f"refused_rank{rank}.txt").write_text(refused())
