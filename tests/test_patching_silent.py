"""Code that could be patched wrong without a word: patched equals unpatched, to the value."""

import copy
import importlib
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import register_parametrization

from al_deepspeed.patching import on_disk, runtime
from al_deepspeed.patching.in_memory import patch_model, unpatch

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn


class Base(nn.Module):
    def __init__(self, features=8):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.mlp = nn.Linear(features, features)
        self.lin = nn.Linear(features, 3 * features)
"""


@pytest.fixture
def load(tmp_path):
    """Imports the files of one folder anew, and takes them out again at the end."""
    names = set()

    def build(files: dict[str, str], patched: bool):
        folder = tmp_path / ("patched" if patched else "original")
        folder.mkdir()
        for name, text in files.items():
            (folder / f"{name}.py").write_text(HEAD + "\n\n" + textwrap.dedent(text))
        if patched:
            on_disk.apply(folder)
        for name in files:
            sys.modules.pop(name, None)
        names.update(files)
        sys.path.insert(0, str(folder))
        try:
            importlib.invalidate_caches()
            return {name: importlib.import_module(name) for name in files}
        finally:
            sys.path.remove(str(folder))

    yield build
    unpatch()
    for name in names:
        sys.modules.pop(name, None)


def outcome(model):
    """The output and the gradient of x, as they come out for fixed numbers."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 8, generator=draws).requires_grad_()
    modulations = torch.randn(3, 2, 1, 8, generator=draws)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        y = model(x, *modulations)
    y.square().sum().backward()
    return y.detach(), x.grad


def filled(model):
    draws = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=draws) / 2)
    return model


MODULATE = """
    class Block(Base):
        def modulate(self, x, shift, scale):
            return x * (1 + scale) + shift

        def forward(self, x, gate, shift, scale):
            y = gate * self.mlp(x)
            x = x + y
            return self.modulate(self.norm(x), shift, scale=scale)
"""
MODULE = """
    class Modulation(nn.Module):
        def forward(self, x, shift, scale):
            return x * (1 + scale) + shift

    class Tanh(nn.Module):
        def forward(self, x, shift, scale):
            return x * (1 + torch.tanh(scale)) + shift

    class Block(Base):
        def __init__(self):
            super().__init__()
            self.mod = Modulation()

        def forward(self, x, gate, shift, scale):
            return self.mod(self.norm(x), shift, scale)
"""
FORK = """
    import base

    class Block(base.Block):  # the same name as its base
        def modulate(self, x, shift, scale):
            return x * scale + shift
"""


def hooked(block):
    block.mod.register_forward_hook(lambda module, given, found: found * 2)
    return block


def held_otherwise(modules):
    block = modules["base"].Block()
    block.mod = modules["base"].Tanh()
    return block


def on_the_instance(modules):
    block = modules["base"].Block()
    block.modulate = lambda x, shift, scale: x * scale + shift
    return block


def replaced(modules):
    modules["base"].Block.modulate = staticmethod(lambda x, shift, scale: x * scale + shift)
    return modules["base"].Block()


HELPERS = {
    "as it is": ({"base": MODULATE}, lambda modules: modules["base"].Block()),
    "overridden elsewhere": ({"base": MODULATE, "fork": FORK}, lambda modules: modules["fork"].Block()),
    "set on the instance": ({"base": MODULATE}, on_the_instance),
    "replaced on the class": ({"base": MODULATE}, replaced),
    "a module": ({"base": MODULE}, lambda modules: modules["base"].Block()),
    "another module": ({"base": MODULE}, held_otherwise),
    "a module with a hook": ({"base": MODULE}, lambda modules: hooked(modules["base"].Block())),
}


@pytest.mark.parametrize("case", HELPERS)
@pytest.mark.parametrize("way", ["disk", "memory"])
def test_a_helper_that_is_another_at_run_time_runs_itself(load, case, way):
    files, make = HELPERS[case]
    model = filled(make(load(files, patched=False)))
    expected = outcome(model)
    if way == "disk":
        model = filled(make(load(files, patched=True)))
    else:
        assert patch_model(model).count == ("self.mod(" not in files["base"])
    torch.testing.assert_close(outcome(model), expected, rtol=2e-5, atol=2e-5)


def test_a_helper_as_it_was_read_runs_the_op_also_compiled(load, monkeypatch):
    model = filled(HELPERS["as it is"][1](load({"base": MODULATE}, patched=True)))
    expected = outcome(model)
    calls = []
    run = runtime._residual_adaln
    monkeypatch.setattr(runtime, "_residual_adaln", lambda *given: calls.append(1) or run(*given))
    outcome(model)
    assert calls
    runtime.prepare(model.norm)
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    torch.testing.assert_close(outcome(compiled), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", ["overridden elsewhere", "set on the instance", "another module"])
def test_a_helper_that_is_another_is_seen_in_compiled_code(load, case):
    files, make = HELPERS[case]
    expected = outcome(filled(make(load(files, patched=False))))
    modules = load(files, patched=True)
    torch.compiler.reset()
    outcome(torch.compile(filled(modules["base"].Block()), backend="eager"))  # as read: that graph is kept
    compiled = torch.compile(filled(make(modules)), backend="eager")
    torch.testing.assert_close(outcome(compiled), expected, rtol=2e-5, atol=2e-5)


# A norm that changes after it was recognised ---------------------------------------------------------------

PLAIN = """
    class Norm(nn.LayerNorm):
        def forward(self, x):
            weight, bias = self.weight.float(), self.bias.float()
            return F.layer_norm(x.float(), (8,), weight, bias, self.eps).to(self.weight.dtype)

    class Block(Base):
        def forward(self, x, gate, shift, scale):
            return self.norm(x) * (1 + scale) + shift
"""


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def tripled(self, x):
    return 3 * x


def own_norm(block, modules):
    block.norm = modules["base"].Norm(8)


CHANGES = {
    "eps": lambda block, modules: setattr(block.norm, "eps", 0.5),
    "parametrization": lambda block, modules: register_parametrization(block.norm, "weight", Doubled()),
    "no weight": lambda block, modules: setattr(block.norm, "weight", None),
    "weight's dtype": lambda block, modules: block.norm.bfloat16(),
    "class": lambda block, modules: setattr(modules["base"].Norm, "forward", tripled),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_norm_that_changed_since_it_was_recognised_runs_as_it_is(load, change):
    modules = load({"base": PLAIN}, patched=False)
    models = [modules["base"].Block() for _ in range(2)]
    for model in models:
        if change in ("weight's dtype", "class"):
            own_norm(model, modules)
        filled(model)
    assert patch_model(models[0]).count == 1
    first = outcome(models[0])
    for model in models:
        CHANGES[change](model, modules)
    found = outcome(models[0])
    unpatch()
    expected = outcome(models[1])
    tolerance = 2e-2 if change == "weight's dtype" else 2e-5  # bf16
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    if change != "weight's dtype":
        assert not torch.allclose(first[0], found[0], atol=1e-2)


@pytest.mark.parametrize("keeps", ["self.highest = x.detach().abs().max()", "self.calls = self.calls + 1"])
def test_a_norm_that_keeps_something_of_its_input_runs_as_it_is(load, keeps):
    line = "            weight, bias = self.weight.float(), self.bias.float()\n"
    text = PLAIN.replace("    class Block", "        calls = 0\n\n    class Block").replace(
        line, f"            {keeps}\n{line}"
    )
    modules = load({"base": text}, patched=False)
    model = modules["base"].Block()
    own_norm(model, modules)
    assert patch_model(filled(model)).count == 1
    outcome(model)
    assert model.norm.calls == 1 if "calls" in keeps else model.norm.highest > 0


def test_hooks_on_all_modules_see_the_norm(load):
    model = filled(load({"base": PLAIN}, patched=False)["base"].Block())
    assert patch_model(model).count == 1
    seen = []
    handle = register_module_forward_hook(lambda module, given, found: seen.append(module))
    try:
        outcome(model)
    finally:
        handle.remove()
    assert model.norm in seen


# Changes between the steps ---------------------------------------------------------------------------------

CHANGED = {
    "inplace": ["h = x + gate * self.mlp(x)", "F.relu(h, inplace=True)", "n = self.norm(h)"],
    "positional inplace": ["h = x + gate * self.mlp(x)", "F.relu(h, True)", "n = self.norm(h)"],
    "dropout": ["h = x.detach().clone()", "n = self.norm(h)", "F.dropout(h, 0.9, True, True)"],
    "out": ["h = x.detach().clone()", "n = self.norm(h)", "torch.sin(h, out=h)"],
    "out of the same storage": [
        "h = x.detach().clone()",
        "n = self.norm(h)",
        "torch.sin(h.detach(), out=h.detach())",
    ],
    "data": ["h = x.detach().clone()", "n = self.norm(h)", "h.data = h.data * h.data"],
    "eps": ["n = self.norm(x)", "self.norm.eps = 0.5"],
    "closure": [
        "h = x.detach().clone()",
        "def change():",
        "    h.mul_(h.clone())",
        "n = self.norm(h)",
        "change()",
    ],
    "method": ["h = x.detach().clone()", "self.kept = h", "n = self.norm(h)", "self.change()"],
}


KEEPING = """
    class Block(Base):
        def change(self):
            self.kept.mul_(self.kept.clone())

        @torch.no_grad()
        def forward(self, x, gate, shift, scale):
"""


@pytest.mark.parametrize("change", CHANGED)
def test_changes_between_norm_and_modulation_are_seen(load, change):
    lines = [*CHANGED[change], "y = n * (1 + scale) + shift", "self.norm.eps = 1e-5", "return y"]
    text = KEEPING + "".join(f"            {line}\n" for line in lines)
    operands = torch.randn(4, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    expected, found = (
        filled(load({"base": text}, patched)["base"].Block())(*operands.clone()) for patched in (False, True)
    )
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


CHOOSING = """
    class Block(Base):
        def __init__(self):
            super().__init__()
            self.other = nn.LayerNorm(8)
            self.first = True

        def change(self, x):
            self.first = not self.first
            return self.mlp(x)

        def forward(self, x, gate, shift, scale):
"""
CHOICES = {
    "before": [
        "n = (self.norm if self.first else self.other)(self.change(x))",
        "return n * (1 + scale) + shift",
    ],
    "after": [
        "return torch.addcmul(self.change(x), (self.norm if self.first else self.other)(x), 1 + scale)"
    ],
    "behind the sum": [
        "x = x + gate * self.change(x)",
        "return (self.norm if self.first else self.other)(x) * (1 + scale) + shift",
    ],
    "by name": [
        "norm = self.norm if self.first else self.other",
        "x = x + gate * self.change(x)",
        "return norm(x) * (1 + scale) + shift",
    ],
    "under another name": [
        "norm = self.norm if self.first else self.other",
        "n, norm = norm(self.change(x)), None",
        "return n * (1 + scale) + shift",
    ],
}


@pytest.mark.parametrize("case", CHOICES)
def test_a_norm_is_chosen_when_it_was(load, case):
    text = CHOOSING + "".join(f"            {line}\n" for line in CHOICES[case])
    expected, found = (
        outcome(filled(load({"base": text}, patched)["base"].Block())) for patched in (False, True)
    )
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_a_helper_still_asserts(load):
    text = """
        def modulate(x, shift, scale):
            assert x.shape[1] == 5, "five tokens"
            return x * (1 + scale) + shift

        class Block(Base):
            def forward(self, x, gate, shift, scale):
                return modulate(self.norm(x), shift, scale) + 0 * gate
    """
    for patched in (False, True):
        block = filled(load({"base": text}, patched)["base"].Block())
        assert outcome(block)[0].shape == (2, 5, 8)
        with pytest.raises(AssertionError, match="five tokens"):
            block(torch.ones(2, 4, 8), *torch.ones(3, 2, 1, 8))


# What runs once --------------------------------------------------------------------------------------------

COUNTING = """
    class Counted(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.calls = inner, 0

        def forward(self, x):
            self.calls += 1
            return self.inner(x)

    def cast_back(n, shift, scale):
        return (n * (1 + scale) + shift).to(n.dtype)

    def cast_up(n, shift, scale):
        dtype = n.dtype
        return (n.float() * (1 + scale) + shift).to(dtype)

    class Block(Base):
        def __init__(self):
            super().__init__()
            self.mlp = Counted(self.mlp)

        def forward(self, x, gate, shift, scale):
"""
ONCE = {
    "dtype of the sum": [
        "x = x + gate * self.mlp(x)",
        "return self.norm(x) * (1 + scale.to(x.dtype)) + shift.to(x.dtype)",
    ],
    "shape of the sum": [
        "h = x + gate * self.mlp(x)",
        "y = self.norm(h) * (1 + scale.expand(h.shape[0], h.size(1), -1)) + shift.to(h)",
        "return y + h",
    ],
    "of the norm's input": ["n = self.norm(self.mlp(x))", "return n * (1 + scale.to(n.dtype)) + shift"],
    "helper": ["return cast_back(self.norm(self.mlp(x)), shift, scale)"],
    "helper with casts": ["return cast_up(self.norm(self.mlp(x)), shift, scale)"],
    "helper of a cast": ["return cast_up(self.norm(self.mlp(x)).double(), shift, scale)"],
}


@pytest.mark.parametrize("case", ONCE)
def test_branch_and_norm_run_once(load, case):
    text = COUNTING + "".join(f"            {line}\n" for line in ONCE[case])
    original = filled(load({"base": text}, patched=False)["base"].Block())
    expected = outcome(original)
    patched = filled(load({"base": text}, patched=True)["base"].Block())
    normed = []
    patched.norm.register_forward_hook(lambda *given: normed.append(1))  # so it runs as a module
    torch.testing.assert_close(outcome(patched), expected, rtol=2e-5, atol=2e-5)
    assert (patched.mlp.calls, len(normed)) == (original.mlp.calls, 1) == (1, 1)


# Calls and dtypes ------------------------------------------------------------------------------------------


def test_the_layer_norm_with_one_argument_more_stays(load):
    text = """
        class Block(Base):
            def forward(self, x, gate, shift, scale):
                n = torch.layer_norm(x, (8,), self.norm.weight, self.norm.bias, 1e-5, False)
                return n * (1 + scale) + shift
    """
    expected, found = (
        outcome(filled(load({"base": text}, patched)["base"].Block())) for patched in (False, True)
    )
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


FLOATS, INTEGERS = torch.randn(2, 3, 8), torch.arange(48).reshape(2, 3, 8)


@pytest.mark.parametrize("gate", [torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64), 2, 0.5])
@pytest.mark.parametrize("branch", [FLOATS, FLOATS.bfloat16(), INTEGERS], ids=lambda one: str(one.dtype))
@pytest.mark.parametrize("residual", [FLOATS, FLOATS.bfloat16(), INTEGERS], ids=lambda one: str(one.dtype))
def test_sums_have_the_dtype_that_pytorch_gives_them(residual, branch, gate):
    expected = residual + branch * gate
    torch.testing.assert_close(runtime.gated_residual(residual, branch, gate), expected, rtol=1e-2, atol=1e-2)
    total, _ = runtime.residual_adaln(torch.relu, residual, branch, gate)
    assert total.dtype == expected.dtype
