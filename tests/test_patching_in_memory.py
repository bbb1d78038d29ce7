"""Classes patched in this process: the same functions run other code, and get their own back."""

import copy
import importlib
import inspect
import pickle
import sys
import traceback

import pytest
import torch

from al_deepspeed.errors import PatchError
from al_deepspeed.patching import in_memory, runtime
from al_deepspeed.patching.verification import Checker

BASE = '''
from torch import nn

from .parts import modulate


class Base(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.last = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, dim)

    def forward(self, x, shift, scale, gate):
        x = x + gate * self.linear(self.norm(x) * (1 + scale) + shift)
        return self.last(x)

    def save(self):
        return "2" + 2 * "2"


class Block(Base):
    def forward(self, x, shift, scale, gate=None):
        gate = shift if gate is None else gate
        y = super().forward(modulate(self.norm(x), shift, scale), shift, scale, gate)
        if self.fails:
            raise ValueError("as asked")
        return y

    fails = False


class Other(nn.Module):
    """No part of the model."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x, shift, scale):
        return self.norm(x) * (1 + scale) + shift
'''
PARTS = """
def modulate(normed, shift, scale):
    return normed * (1 + scale) + shift


def norm_and_modulate(norm, x, shift, scale):
    return norm(x) * (1 + scale) + shift
"""
DECORATED = """
import functools

import torch
from torch import nn

from .parts import norm_and_modulate


def jit_fuser(function):
    return torch.compile(function, backend="eager")


def wrapped(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


def bare(function):
    def wrapper(*args):
        return function(*args)

    return wrapper


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=False, eps=1e-6)

    @jit_fuser
    def fused(self, x, shift, scale):
        return self.norm(x) * (1 + scale) + shift

    @wrapped
    def with_wraps(self, x, shift, scale):
        return self.norm(x) * (1 + scale) + shift

    @bare
    def without_wraps(self, x, shift, scale):
        return self.norm(x) * (1 + scale) + shift

    def forward(self, x, shift, scale):
        y = self.fused(x, shift, scale) + self.with_wraps(x, shift, scale)
        y = y + self.without_wraps(x, shift, scale)
        return y * norm_and_modulate(self.norm, x, shift, scale)
"""


@pytest.fixture(autouse=True)
def restored():
    yield
    runtime.set_checker(None)
    in_memory.unpatch()


@pytest.fixture
def codebase(tmp_path, monkeypatch):
    """A package of a user's, imported anew for each test: its folder, and a function that imports from it."""
    folder = tmp_path / "codebase"
    folder.mkdir()
    for name, text in {"base": BASE, "parts": PARTS, "decorated": DECORATED, "__init__": ""}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder, lambda name: importlib.import_module(f"codebase.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "codebase"]:
        del sys.modules[name]


def operands(count=3):
    draws = torch.Generator().manual_seed(2)
    x = torch.randn(2, 5, 8, generator=draws).requires_grad_()
    return x, *(torch.randn(2, 1, 8, generator=draws).requires_grad_() for _ in range(count - 1))


def values(model, inputs):
    model.zero_grad()
    for one in inputs:
        one.grad = None
    y = model(*inputs)
    y.square().sum().backward()
    gradients = [one.grad for one in (*inputs, *model.parameters()) if one.grad is not None]
    return [y.detach(), *gradients]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def made(base):
    torch.manual_seed(0)
    return base.Block(8)


def test_methods_inherited_or_not_run_rewritten_code_and_go_back(codebase):
    folder, load = codebase
    base = load("base")
    model, inputs = made(base), operands()
    files = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    functions = base.Base.forward, base.Block.forward, base.Other.forward
    codes = [one.__code__ for one in functions]
    expected = values(model, inputs)
    report = in_memory.patch_model(model)
    assert {name: [site.kind for site in sites] for name, sites in report.sites.items()} == {
        "codebase.base.Base": ["adaln", "residual_adaln"],
        "codebase.base.Block": ["adaln"],
    }
    assert_equal(values(model, inputs), expected)
    assert (base.Base.forward, base.Block.forward, base.Other.forward) == functions  # the same objects
    assert [one.__code__ is code for one, code in zip(functions, codes, strict=True)] == [False, False, True]
    assert base.Base.save.__code__.co_filename == str(folder / "base.py")
    assert {path.name: path.read_bytes() for path in folder.glob("*.py")} == files
    in_memory.unpatch()
    assert [one.__code__ for one in functions] == codes
    assert all(map(torch.equal, values(model, inputs), expected))


def test_a_second_patch_changes_nothing_and_tells_the_same(codebase):
    base = codebase[1]("base")
    model = made(base)
    first = in_memory.patch_model(model)
    codes = base.Base.forward.__code__, base.Block.forward.__code__
    assert in_memory.patch_model(made(base)).sites == first.sites
    assert (base.Base.forward.__code__, base.Block.forward.__code__) == codes


def test_isinstance_pickle_copies_and_monkeypatches_still_work(codebase, monkeypatch):
    base, parts = codebase[1]("base"), codebase[1]("parts")
    model, inputs = made(base), operands()
    in_memory.patch_model(model)
    expected = values(model, inputs)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert isinstance(other, base.Block) and type(other) is base.Block
        assert_equal(values(other, inputs), expected)
    monkeypatch.setattr(
        base.nn.Linear, "forward", lambda self, x: x * 0
    )  # reached through the module's globals
    assert not torch.allclose(model(*inputs), expected[0])
    assert parts.modulate.__code__.co_filename.endswith("parts.py")  # modulation alone: its callers changed


def test_tracebacks_and_inspect_show_the_rewritten_source(codebase):
    base = codebase[1]("base")
    model = made(base)
    model.fails = True
    in_memory.patch_model(model)
    with pytest.raises(ValueError) as raised:
        model(*operands())
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert last.line == 'raise ValueError("as asked")' and "base.py" in last.filename
    assert "_al_adaln.adaln(" in inspect.getsource(base.Block.forward)


def test_a_free_function_with_norm_and_modulation_is_rewritten_where_it_stands(codebase):
    decorated, parts = codebase[1]("decorated"), codebase[1]("parts")
    held = decorated.norm_and_modulate
    model, inputs = decorated.Model(), operands()
    expected = values(model, inputs)
    report = in_memory.patch_model(model)
    assert len(report.sites["codebase.parts"]) == 1
    assert held is parts.norm_and_modulate and "fused AdaLN" in held.__code__.co_filename
    assert_equal(values(model, inputs), expected)


def test_decorators_stay_but_for_those_that_would_compile_the_op(codebase):
    decorated = codebase[1]("decorated")
    model = decorated.Model()
    before = dict(vars(decorated.Model))
    in_memory.patch_model(model)
    after = vars(decorated.Model)
    assert after["fused"] is not before["fused"] and not hasattr(after["fused"], "_torchdynamo_orig_callable")
    assert after["with_wraps"] is before["with_wraps"] and after["without_wraps"] is before["without_wraps"]
    assert "fused AdaLN" in after["with_wraps"].__wrapped__.__code__.co_filename
    in_memory.unpatch()
    assert vars(decorated.Model)["fused"] is before["fused"]


def test_a_class_with_a_forward_on_an_instance_is_left_and_reported(codebase):
    base = codebase[1]("base")
    plain, own = made(base), made(base)
    own.forward = lambda *inputs: inputs[0]
    code = base.Base.forward.__code__
    report = in_memory.patch_model(torch.nn.ModuleList([plain, own]))
    assert report.count == 0 and base.Base.forward.__code__ is code
    assert "codebase.base.Block: 1 has a forward of its own" in report.left


@pytest.mark.parametrize("kind", ["hook", "forward"])
def test_a_norm_with_hooks_or_an_own_forward_is_left_and_reported(codebase, kind):
    base = codebase[1]("base")
    model, inputs, calls = made(base), operands(), []
    if kind == "hook":
        model.norm.register_forward_hook(lambda module, args, output: calls.append(1) or output * 2)
    else:
        model.norm.forward = lambda x: calls.append(1) or x * 2
    expected = values(model, inputs)
    runs = len(calls)
    report = in_memory.patch_model(model)
    assert any(line.startswith("norm (LayerNorm): ") for line in report.left)
    assert_equal(values(model, inputs), expected)
    assert runs and len(calls) == 2 * runs


def too_late(kind, model):
    if kind == "compiled model":
        return torch.compile(model, backend="eager")
    if kind == "compiled module":
        model.compile(backend="eager")
    if kind == "compiled part":
        model.linear.compile(backend="eager")
    if kind == "engine":
        return type("DeepSpeedEngine", (torch.nn.Sequential,), {})(model)
    if kind == "ZeRO-3 hooks":

        def hook(*_):
            pass

        hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
        model.linear.register_forward_pre_hook(hook)
    return model


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("compiled model", "the model is compiled already"),
        ("compiled module", "the model is compiled already"),
        ("compiled part", "linear is compiled already"),
        ("engine", "the model is a DeepSpeed engine already"),
        ("ZeRO-3 hooks", "a DeepSpeed engine has its hooks on linear already"),
    ],
)
def test_too_late_is_refused_with_the_reason(codebase, kind, reason):
    base = codebase[1]("base")
    code = base.Base.forward.__code__
    model = too_late(kind, made(base))
    with pytest.raises(PatchError, match=f"comes too late: {reason}"):
        in_memory.patch_model(model)
    assert base.Base.forward.__code__ is code


def test_classes_patched_before_may_be_compiled_then(codebase):
    base = codebase[1]("base")
    report = in_memory.patch_classes(base.Block)
    assert report.count == 3
    model, inputs = made(base), operands()
    assert in_memory.patch_model(torch.compile(model, backend="eager")).count == 3
    in_memory.unpatch()
    expected = values(model, inputs)
    in_memory.patch_classes(base.Block)
    assert_equal(values(model, inputs), expected)


EDITS = {
    "code": ("base", BASE.replace("gate * self.linear", "2 * gate * self.linear")),
    "a constant": ("base", BASE.replace("1 + scale", "3 + scale")),
    "another function": ("base", BASE.replace('2 * "2"', '3 * "2"')),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_file_that_changed_since_its_import_is_left(codebase, edit):
    folder, load = codebase
    name, text = EDITS[edit]
    base = load("base")
    (folder / f"{name}.py").write_text(text)
    report = in_memory.patch_model(made(base))
    assert "codebase.base.Base.forward: its file differs from what was imported" in report.left
    assert base.Base.forward.__code__.co_filename == str(folder / "base.py")


@pytest.mark.parametrize("form", ["\x0c{}", "{}" + " + x" * 900], ids=["form feed", "long"])
def test_a_file_that_the_matcher_cannot_parse_is_left_and_reported(codebase, form):
    folder, load = codebase
    line = "        return self.norm(x) * (1 + scale) + shift"
    (folder / "base.py").write_text(BASE.replace(line, form.format(line)))
    report = in_memory.patch_model(load("base").Other())
    assert report.count == 0
    assert any("Other.forward: the file was not parsed" in line for line in report.left)


def test_a_helper_is_what_was_imported_not_what_its_file_says_now(codebase):
    folder, load = codebase
    (folder / "parts.py").write_text(PARTS.replace("normed * (1 + scale)", "normed * scale"))
    base = load("base")
    (folder / "parts.py").write_text(PARTS)
    model, inputs = made(base), operands(4)
    expected = values(model, inputs)
    in_memory.patch_model(model)
    assert_equal(values(model, inputs), expected)


def test_a_free_helper_that_another_one_takes_the_place_of_runs_itself(codebase, monkeypatch):
    base = codebase[1]("base")
    model, inputs = made(base), operands(4)
    assert in_memory.patch_model(model).count == 3
    monkeypatch.setattr(base, "modulate", lambda normed, shift, scale: normed * scale)
    found = values(model, inputs)
    in_memory.unpatch()
    assert_equal(found, values(model, inputs))


def test_recipes_limit_the_classes_and_must_name_some(codebase):
    model = made(codebase[1]("base"))
    with pytest.raises(PatchError, match=r"names diffusers\.wan, but the model has none of its classes"):
        in_memory.patch_model(model, ["diffusers.wan"])
    with pytest.raises(PatchError, match=r"diffusers\.wann"):
        in_memory.patch_model(model, ["diffusers.wann"])


def test_a_model_without_sites_is_no_error():
    report = in_memory.patch_model(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)))
    assert report == in_memory.Report()


def test_observed_code_is_checked_and_then_runs_without_originals(codebase):
    base = codebase[1]("base")
    model, inputs = made(base), operands()
    expected = values(model, inputs)
    report = in_memory.patch_model(model, observe=True)
    checker = Checker()
    runtime.set_checker(checker)
    assert_equal(values(model, inputs), expected)
    assert checker.differences == [] and len(checker.checked) == report.count == 3
    in_memory.stop_observing()
    checker.checked.clear()
    checker._seen.clear()
    assert_equal(values(model, inputs), expected)
    assert checker.checked == set()


@pytest.fixture(params=[True, False], ids=["norm2", "no-norm2"])
def wan(request):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=48,
        num_layers=2,
        cross_attn_norm=request.param,
    )
    for parameter in model.parameters():  # as created, gates and shifts are too small to show a mistake
        torch.nn.init.normal_(parameter, std=0.2)
    return model.train()


def wan_values(model, timestep) -> dict:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, 3, 8, 8, generator=draws).requires_grad_()
    model.zero_grad()
    y = model(x, timestep, torch.randn(2, 7, 12, generator=draws), return_dict=False)[0]
    y.square().mean().backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return {"y": y.detach(), "x": x.grad} | gradients


def test_diffusers_wan_equals_itself_and_goes_back(wan):
    steps = {"sample": torch.tensor([3.0, 700.0]), "token": torch.linspace(0, 999, 96).view(2, 48)}
    expected = {name: wan_values(wan, step) for name, step in steps.items()}
    assert in_memory.patch_model(wan, ["diffusers.wan"], observe=True).count == 5
    checker = Checker()
    runtime.set_checker(checker)
    for checkpointing in (False, True):
        if checkpointing:
            in_memory.stop_observing()
            wan.enable_gradient_checkpointing()
        for name, step in steps.items():
            found = wan_values(wan, step)
            assert found.keys() == expected[name].keys()
            for key, value in expected[name].items():
                assert (found[key] - value).norm() <= 1e-5 * value.norm(), (checkpointing, name, key)
    assert len(checker.checked) == 5 and checker.differences == []
    in_memory.unpatch()
    for name, step in steps.items():
        found = wan_values(wan, step)
        assert all(torch.equal(found[key], value) for key, value in expected[name].items())


def test_recipes_name_classes_to_patch_before_there_is_a_model():
    pytest.importorskip("diffusers")
    report = in_memory.patch_classes("diffusers.wan")
    assert {name.rpartition(".")[2]: len(sites) for name, sites in report.sites.items()} == {
        "WanTransformerBlock": 4,
        "WanTransformer3DModel": 1,
    }


@pytest.mark.parametrize("target", [3, torch.nn.Identity()])
def test_what_is_neither_class_nor_recipe_cannot_be_patched(target):
    with pytest.raises(PatchError, match="patch_classes takes classes and names"):
        in_memory.patch_classes(target)
