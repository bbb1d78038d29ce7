"""Rewritten blocks with affine norms at ZeRO-3 against the same blocks as written: a part of patched.py.

The persistence threshold is 0, so weight and bias of every norm are gathered and released around its forward.
"""

import linecache

import deepspeed
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from al_deepspeed.patching import runtime
from al_deepspeed.patching.rewriter import rewrite

SOURCE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.norm1 = nn.LayerNorm(features)
        self.norm2 = nn.LayerNorm(features)
        self.norm3 = nn.LayerNorm(features, elementwise_affine=False)
        self.attention = nn.Linear(features, features)
        self.mlp = nn.Linear(features, features)
        self.table = nn.Parameter(torch.randn(1, 6, features) / features**0.5)

    def forward(self, x, condition):
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.table + condition).chunk(6, dim=1)
        update = self.attention(self.norm1(x) * (1 + scale1) + shift1)
        x = x + gate1 * update
        update = self.attention(self.norm2(x))
        x = x + update
        update = self.mlp(self.norm3(x) * (1 + scale2) + shift2)
        return x + gate2 * update
"""

REWRITTEN = rewrite(SOURCE, file="block.py")
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def block_class(source: str, name: str) -> type:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names = {"__name__": name}
    exec(compile(source, name, "exec"), names)
    return names["Block"]


class Model(nn.Module):
    def __init__(self, block: type, mode: str, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(16) for _ in range(blocks)])
        self.checkpointed = mode == "checkpointed"

    def forward(self, x, condition):
        for block in self.blocks:
            x = (
                checkpoint(block, x, condition, use_reentrant=False)
                if self.checkpointed
                else block(x, condition)
            )
        return x


def trained(block: type, mode: str, blocks: int, rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Model(block, mode, blocks)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    if mode == "compiled":
        for module in model.modules():
            runtime.prepare(module)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    if mode == "compiled":
        engine.compile(backend="aot_eager")
    generator = torch.Generator().manual_seed(rank)
    left = {}
    for step in range(2):
        x, condition = (torch.randn(2, *shape, generator=generator) for shape in ((5, 16), (6, 16)))
        y = engine(x, condition)
        left[f"output {step}"] = y.detach().clone()
        engine.backward(y.square().mean())
        engine.step()
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            left[name] = parameter.detach().clone()
    left["prepared"] = torch.tensor(float(sum("forward" in m.__dict__ for m in model.modules())))
    engine.destroy()
    return left


def compared(rank: int) -> dict:
    """Mode -> what two steps of the rewritten model leave behind, against the other one run eagerly."""
    original, rewritten = (
        block_class(SOURCE, "original_block"),
        block_class(REWRITTEN.source, "rewritten_block"),
    )
    results = {"sites": [site.kind for site in REWRITTEN.sites]}
    expected = {blocks: trained(original, "eager", blocks, rank) for blocks in (1, 2)}
    for mode in ("eager", "checkpointed", "compiled"):
        blocks = 1 if mode == "compiled" else 2  # compiling takes its time
        found = trained(rewritten, mode, blocks, rank)
        results[mode] = {
            "prepared": found.pop("prepared").item(),
            "parameters": sum(not name.startswith("output") for name in found),
            "errors": {
                name: ((value - expected[blocks][name]).norm() / expected[blocks][name].norm()).item()
                for name, value in found.items()
            },
        }
    return results
