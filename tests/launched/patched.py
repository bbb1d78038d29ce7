"""Wan patched by the engine at ZeRO-3 against itself unpatched; then one rank computes a site wrong.

Before that, blocks with affine norms in eager, checkpointed and compiled code (patched_norms.py).

    deepspeed patched.py OUT_DIR

No parameter persists, so norm2's weight and bias are whole only inside its own forward. Writes
OUT_DIR/rankR.json.
"""

import copy
import json
from collections.abc import Callable

import deepspeed
import patched_norms
import torch
from tiny import NumberDataset, command_line, sample_losses, start, wan_model

import al_deepspeed
from al_deepspeed.errors import PatchError
from al_deepspeed.patching import in_memory, runtime

arguments = command_line().parse_args()
rank = start(arguments.local_rank)
batch = torch.utils.data.default_collate(
    [NumberDataset([(3, 8, 8)] * 8)[row] for row in (2 * rank, 2 * rank + 1)]
)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "steps_per_print": 1000000,
}


def train(**section) -> list[float]:
    """Losses of three steps on one batch: they tell the gradients of the first two."""
    used = config | {"fused_adaln": {"enabled": True, "backend": "auto", **section}}
    with deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(config)):
        model = wan_model()
    model.rope = type(model.rope)(12, (1, 2, 2), 32)  # made outside: zero.Init takes its float64 away
    engine, *_ = al_deepspeed.initialize(model=model, model_parameters=model.parameters(), config=used)
    losses = []
    for _ in range(3):
        loss = sample_losses(engine, batch).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if section.get("patch") == "off":
        seen["too late"] = refusal(lambda: in_memory.patch_model(model))
    return losses


def refusal(action: Callable) -> str | None:
    try:
        action()
    except PatchError as error:
        return str(error)
    return None


seen: dict[str, object] = {"norms": patched_norms.compared(rank)}
seen["off"] = train(patch="off")
seen["patched"] = train()
seen["functions"] = len(in_memory._patches)
if rank == 1:
    right = runtime._gated_residual
    runtime._gated_residual = lambda residual, branch, gate, dtype: right(residual, branch, -gate, dtype)
seen["refused"] = refusal(train)
(arguments.out / f"rank{rank}.json").write_text(json.dumps(seen))
