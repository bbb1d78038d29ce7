"""The matcher on a private fork of a Megatron-style transformer that no recipe names.

tests/data/private_fork holds five styles of the same layers, and what only looks like them. The sites below
were counted by hand. The rewritten package must import, and equal the original in fp32, forward and backward.
"""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch
from rewritten_source import as_tuple

from al_deepspeed.patching import runtime
from al_deepspeed.patching.rewriter import IMPORT, rewrite

FORK = Path(__file__).parent / "data" / "private_fork"
SITES = {
    "casts.py": [
        (33, "adaln", "CastLayer.forward"),
        (38, "residual_adaln", "CastLayer.forward"),
        (43, "residual_adaln", "CastLayer.forward"),
        (45, "gated_residual", "CastLayer.forward"),
    ],
    "multiply_add.py": [
        (25, "adaln", "MultiplyAddLayer.forward"),
        (26, "residual_adaln", "MultiplyAddLayer.forward"),
        (29, "residual_adaln", "MultiplyAddLayer.forward"),
        (30, "gated_residual", "MultiplyAddLayer.forward"),
    ],
    "functions.py": [
        (29, "adaln", "FunctionLayer.forward"),
        (31, "residual_adaln", "FunctionLayer.forward"),
        (33, "residual_adaln", "FunctionLayer.forward"),
    ],
    "modulation.py": [(10, "gated_residual", "add_gated")],
    "methods.py": [
        (28, "adaln", "Modulation.modulated_layernorm"),
        (32, "gated_residual", "Modulation.scale_add"),
        (56, "residual_adaln", "MethodLayer.forward"),
    ],
    "combined.py": [
        (25, "adaln", "CombinedLayer.forward"),
        (27, "gated_residual", "CombinedLayer.forward"),
        (32, "residual_adaln", "CombinedLayer.forward.cross_and_mlp"),
        (34, "gated_residual", "CombinedLayer.forward.cross_and_mlp"),
        (42, "residual_adaln", "CombinedLayer.forward"),
    ],
    "megatron.py": [],
    "lookalikes.py": [],
}
# Class, arguments of its constructor, shapes of forward's arguments. B = 2, S = 5, D = 8.
LAYERS = {
    "casts.CastLayer": ((8,), [(5, 2, 8), (1, 2, 8)]),
    "multiply_add.MultiplyAddLayer": ((8,), [(5, 2, 8), (1, 2, 8)]),
    "functions.FunctionLayer": ((8,), [(2, 5, 8), (2, 8)]),
    "methods.MethodLayer": ((8,), [(5, 2, 8), (1, 2, 8)]),
    "combined.CombinedLayer": ((8, True), [(2, 5, 8), (2, 5, 8), (2, 6, 8)]),
    "combined.CombinedLayer-identity": ((8, False), [(2, 5, 8), (2, 5, 8), (2, 6, 8)]),
}


def resolve(name: str) -> str | None:
    """The fork's imports are relative, from files of one folder."""
    path = FORK / f"{name.lstrip('.')}.py"
    return path.read_text() if name.startswith(".") and path.is_file() else None


def rewritten(file: str, *, observe: bool = False):
    return rewrite((FORK / file).read_text(), file=file, resolve=resolve, observe=observe)


def test_every_file_of_the_fork_is_counted():
    assert set(SITES) == {path.name for path in FORK.glob("*.py")} - {"__init__.py"}


@pytest.mark.parametrize("file", SITES)
def test_sites_are_those_counted_by_hand(file):
    found = [(site.line, site.kind, site.function) for site in rewritten(file).sites]
    assert found == SITES[file]


@pytest.mark.parametrize("file", SITES)
@pytest.mark.parametrize("observe", [False, True], ids=["plain", "observe"])
def test_rewriting_the_result_changes_no_byte(file, observe):
    once = rewritten(file, observe=observe)
    again = rewrite(once.source, file=file, resolve=resolve, observe=observe)
    assert (again.sites, again.source) == ((), once.source)
    assert once.source.count(IMPORT) == bool(SITES[file])


def test_what_only_looks_like_it_is_left_with_the_reason():
    result = rewritten("lookalikes.py")
    assert result.source == (FORK / "lookalikes.py").read_text()
    reasons = {item.function.partition(".")[2]: item.reason for item in result.left}
    assert set(reasons) == {
        "other_norms",
        "other_arithmetic",
        "norm_used_elsewhere",
        "changed_in_place",
        "passed_on_between",
        "in_another_block",
        "added_in_place",
    }
    assert "RMS" in reasons["other_norms"]
    assert "1 + scale" in reasons["other_arithmetic"]
    assert "elsewhere" in reasons["norm_used_elsewhere"]
    assert "in place" in reasons["changed_in_place"] and "in place" in reasons["added_in_place"]
    assert "passed to a call" in reasons["passed_on_between"]
    assert "another block" in reasons["in_another_block"]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The fork as it is, rewritten, and rewritten with its originals beside the calls: three packages."""
    folder = tmp_path_factory.mktemp("forks")
    sys.path.insert(0, str(folder))
    for name, observe in (("fork_original", None), ("fork_plain", False), ("fork_observed", True)):
        shutil.copytree(FORK, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for file in SITES if observe is not None else ():
            (folder / name / file).write_text(rewritten(file, observe=observe).source)
    yield {"original": "fork_original", "plain": "fork_plain", "observed": "fork_observed"}
    sys.path.remove(str(folder))


def built(package: str, layer: str):
    module, name = layer.partition("-")[0].split(".")
    torch.manual_seed(0)
    made = getattr(importlib.import_module(f"{package}.{module}"), name)(*LAYERS[layer][0])
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def outputs_and_gradients(made, layer: str, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in LAYERS[layer][1]
    ]
    outputs = as_tuple(made.to(dtype)(*inputs))
    weights = [torch.randn(*y.shape, generator=generator).to(y.dtype) for y in outputs]
    torch.autograd.backward(outputs, weights)
    values = {f"output {i}": y for i, y in enumerate(outputs)}
    values |= {f"input {i}": x.grad for i, x in enumerate(inputs)}
    return values | {name: p.grad for name, p in made.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", ["plain", "observed"])
def test_rewritten_layers_equal_the_original(packages, layer, kind):
    expected = outputs_and_gradients(built(packages["original"], layer), layer)
    found = outputs_and_gradients(built(packages[kind], layer), layer)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm(), name


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if "combined" not in layer])  # needs autocast
def test_rewritten_layers_keep_every_dtype(packages, layer):
    expected = outputs_and_gradients(built(packages["original"], layer), layer, torch.bfloat16)
    found = outputs_and_gradients(built(packages["plain"], layer), layer, torch.bfloat16)
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in expected.items()}
    for name, value in expected.items():
        assert (found[name].double() - value.double()).norm() <= 0.05 * value.double().norm(), name


@pytest.mark.parametrize("layer", LAYERS)
def test_originals_beside_the_calls_equal_the_calls(packages, layer):
    seen = []

    def checker(site, original, fused, operands):
        for one, other in zip(as_tuple(original(*operands)), as_tuple(fused(*operands)), strict=True):
            assert one.dtype == other.dtype, site
            assert (one - other).norm() <= 1e-5 * one.norm(), site
        seen.append(site)
        return fused(*operands)

    made = built(packages["observed"], layer)
    runtime.set_checker(checker)
    try:
        outputs_and_gradients(made, layer)
    finally:
        runtime.set_checker(None)
    file = f"{layer.split('.')[0]}.py"
    assert {site for site in seen if site.startswith(file)} == {
        f"{file}:{line}" for line, _, _ in SITES[file]
    }


def test_methods_that_call_the_op_lose_the_fusing_decorator():
    source = rewritten("methods.py").source
    assert source.count("@jit_fuser") == 1  # `modulate` itself; `both` calls rewritten methods
    assert "    @jit_fuser\n    def modulate(" in source
