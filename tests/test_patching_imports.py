"""Helpers and bases of other files: what was read is what Python imports there, or it runs itself."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from al_deepspeed.patching import on_disk, runtime

MODULATE = "def modulate(x, shift, scale):\n    return x * (1 + scale) + shift\n"
OTHER = "def modulate(x, shift, scale):\n    return x * scale + shift\n"
LAYER = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def modulate(self, x, shift, scale):
        return x * (1 + scale) + shift
"""
BLOCK = """
from {layer} import Layer
{imports}


class Block(Layer):
    def forward(self, x, shift, scale):
        return {call}(self.norm(x), shift, scale)
"""
FREE = {"layer": "layer", "call": "modulate"}
INSIDE = {"layer": ".layer", "call": "modulate"}
FILES = {"layer.py": LAYER, "al_pkg/__init__.py": "", "al_pkg/layer.py": LAYER}
# (files, module that holds Block, folders to import from as well, whether the op runs)
CASES = {
    "passed on by a package": (
        {
            "al_own/__init__.py": "from .parts import modulate\n",
            "al_own/parts.py": MODULATE,
            "model.py": BLOCK.format(imports="from al_own import modulate", **FREE),
        },
        "model",
        [],
        True,
    ),
    "another file of that name beside the package": (
        {
            "al_own/__init__.py": "from .parts import modulate\n",
            "al_own/parts.py": OTHER,
            "parts.py": MODULATE,
            "model.py": BLOCK.format(imports="from al_own import modulate", **FREE),
        },
        "model",
        [],
        False,
    ),
    "passed on by a package inside a package": (
        {
            "al_pkg/own/__init__.py": "from ..parts import modulate\n",
            "al_pkg/parts.py": MODULATE,
            "al_pkg/own/parts.py": OTHER,
            "al_pkg/model.py": BLOCK.format(
                imports="from .own import modulate", **FREE | {"layer": ".layer"}
            ),
        },
        "al_pkg.model",
        [],
        True,
    ),
    "written in a package itself": (
        {
            "al_pkg/own/__init__.py": MODULATE,
            "al_pkg/model.py": BLOCK.format(
                imports="from .own import modulate", **FREE | {"layer": ".layer"}
            ),
        },
        "al_pkg.model",
        [],
        True,
    ),
    "imported by a package": (
        {
            "al_pkg/own/__init__.py": BLOCK.format(imports="from ..parts import modulate", **FREE),
            "al_pkg/parts.py": MODULATE,
        },
        "al_pkg.own",
        [],
        True,
    ),
    "a package and a file of one name": (
        {
            "own.py": MODULATE,
            "own/__init__.py": OTHER,
            "model.py": BLOCK.format(imports="from own import modulate", **FREE),
        },
        "model",
        [],
        False,
    ),
    "a package's file that is not what is imported": (
        {
            "al_pkg/parts.py": MODULATE,
            "al_pkg/model.py": BLOCK.format(imports="from parts import modulate", **FREE),
            "library/parts.py": OTHER,
        },
        "al_pkg.model",
        ["library"],
        False,
    ),
    "two files that may be imported": (
        {
            "parts.py": MODULATE,
            "library/parts.py": OTHER,
            "library/model.py": BLOCK.format(imports="from parts import modulate", **FREE),
        },
        "model",
        ["library"],
        False,
    ),
    "a base of a package inside": (
        {
            "al_pkg/model.py": BLOCK.format(imports="", layer=".layer", call="self.modulate"),
            "al_fork/__init__.py": "",
            "al_fork/al_pkg/__init__.py": "",
            "al_fork/al_pkg/layer.py": "from al_pkg.model import Block\n\n\nclass Layer(Block):\n    "
            + OTHER.replace("(x", "(self, x").replace("\n    ", "\n        "),
        },
        "al_fork.al_pkg.layer",
        [],
        False,
    ),
    "a base of another package": (
        {
            "al_pkg/model.py": BLOCK.format(imports="", layer=".layer", call="self.modulate"),
            "al_fork/__init__.py": "",
            "al_fork/layer.py": "from al_pkg.model import Block\n\n\nclass Layer(Block):\n    "
            + OTHER.replace("(x", "(self, x").replace("\n    ", "\n        "),
        },
        "al_fork.layer",
        [],
        False,
    ),
}


def output(folder: Path, name: str, folders: list[str]) -> torch.Tensor:
    """Of the class that the module holds last, imported anew."""
    before = set(sys.modules)
    added = [str(folder / one) for one in ["", *folders][::-1]]
    sys.path[:0] = added
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
        torch.manual_seed(0)
        layer = (vars(module).get("Block") if "fork" not in name else module.Layer)()
        operands = (torch.randn(2, 5, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8))
        return layer(*operands).detach()
    finally:
        sys.path[:] = sys.path[len(added) :]
        for one in set(sys.modules) - before:
            del sys.modules[one]


@pytest.mark.parametrize("case", CASES)
def test_the_helper_that_was_read_is_the_one_that_runs(tmp_path, monkeypatch, case):
    files, name, folders, fused = CASES[case]
    for file, text in {**FILES, **files}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    expected = output(tmp_path, name, folders)
    on_disk.apply(tmp_path)
    calls, run = [], runtime._adaln
    monkeypatch.setattr(runtime, "_adaln", lambda *given: calls.append(1) or run(*given))
    torch.testing.assert_close(output(tmp_path, name, folders), expected, rtol=2e-5, atol=2e-5)
    assert bool(calls) == fused


def test_an_import_from_above_all_folders_is_unknown(tmp_path):
    (tmp_path / "model.py").write_text(
        "from " + "." * 40 + "parts import modulate\n" + MODULATE.replace("x", "norm")
    )
    assert on_disk.examine(tmp_path).unreadable == ()
