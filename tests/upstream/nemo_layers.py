"""NeMo's AdaLN classes, cut out of their files: NeMo itself wants more than a test machine has.

The classes are executed as they stand. What they import stands in: a plain linear layer for Megatron's, and
nothing for Transformer Engine and for jit_fuser.
"""

import ast
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

from al_deepspeed.patching.rewriter import rewrite
from al_deepspeed.patching.tree import resolver

LAYERS = "nemo/collections/diffusion/models/dit/dit_layer_spec.py"
MODEL = "nemo/collections/diffusion/models/dit/dit_model.py"
NAMES = {LAYERS: ("RMSNorm", "AdaLN", "AdaLNContinuous"), MODEL: ("modulate", "FinalLayer")}
FEATURES = 16


class MegatronModule(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


class ColumnParallelLinear(nn.Linear):
    """On one rank: the output, and no bias left to add."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, **_megatron: Any) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x):
        return super().forward(x), None


def settings() -> types.SimpleNamespace:
    return types.SimpleNamespace(hidden_size=FEATURES, layernorm_epsilon=1e-6, sequence_parallel=False)


def namespaces(root: Path, file: str) -> list[dict[str, Any]]:
    """The file's classes as written, and as rewritten."""
    source = (root / file).read_text(encoding="utf-8")
    rewritten = rewrite(source, file=file, resolve=resolver(root / file, root, {})).source
    return [_execute(text, NAMES[file]) for text in (source, rewritten)]


def _execute(source: str, names: tuple[str, ...]) -> dict[str, Any]:
    tree = ast.parse(source)
    assert set(names) <= {getattr(node, "name", None) for node in tree.body}
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names or _is_ours(node)]
    space: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "MegatronModule": MegatronModule,
        "ColumnParallelLinear": ColumnParallelLinear,
        "TransformerConfig": types.SimpleNamespace,
        "TENorm": None,
        "jit_fuser": lambda method: method,
        "repeat": lambda tensor, _pattern, t: tensor.repeat_interleave(t, dim=0),
        "__name__": "cut_out",
    }
    exec(compile(tree, "cut_out", "exec"), space)
    return space


def _is_ours(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom) and "al_deepspeed" in ast.unparse(node)
