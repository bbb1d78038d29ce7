"""What the matcher makes of one statement at a time, of helpers, and of hostile code."""

import pytest
import torch
from rewritten_source import as_tuple

from al_deepspeed.patching.rewriter import IMPORT, rewrite

HEAD = """import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.project = nn.Linear(8, 8)

"""


def body(*lines: str) -> str:
    """What the lines of a method become."""
    source = HEAD + "".join(f"    {line}\n" for line in lines)
    result = rewrite(source)
    compile(result.source, "layer", "exec")
    return result.source.partition("project = nn.Linear(8, 8)\n\n")[2]


def method(*lines: str) -> str:
    return body("def forward(self, x, shift, scale, gate):", *(f"    {line}" for line in lines))


@pytest.mark.parametrize(
    ("lines", "call"),
    [
        (["return self.norm(x) * (1 + scale) + shift"], "adaln(self.norm, x, shift, scale)"),
        (["return shift + self.norm(x) * (scale + 1.0)"], "adaln(self.norm, x, shift, scale)"),
        (["return self.norm(x) * scale + self.norm(x)"], None),  # two calls: not provably the same
        (["n = self.norm(x)", "return n * scale + n"], "adaln(self.norm, x, None, scale)"),
        (["n = self.norm(x)", "return n + n * scale + shift"], "adaln(self.norm, x, shift, scale)"),
        (
            ["return self.norm(x) * (1 + scale)[:, None] + shift[:, None]"],
            "adaln(self.norm, x, shift[:, None], scale[:, None])",
        ),
        (
            ["return self.norm(x) * (1 + scale).unsqueeze(1).to(x.dtype) + shift"],
            "adaln(self.norm, x, shift, scale.unsqueeze(1).to(x.dtype))",
        ),
        (
            ["return (self.norm(x.float()) * (1 + scale) + shift).half()"],
            'adaln(self.norm, x, shift, scale, out_dtype="float16")',
        ),
        (
            ["return self.norm(x.float()) * (1 + scale) + shift"],
            'adaln(self.norm, x, shift, scale, in_dtype="float32")',
        ),
        (["return x + gate * self.project(x)"], "gated_residual(x, self.project(x), gate)"),
        (["return self.project(x) * gate.tanh() + x"], "gated_residual(x, self.project(x), gate.tanh())"),
        (
            ["return self.norm(x + self.project(x)) * (1 + scale)"],
            "residual_adaln(self.norm, x, self.project(x), None, None, scale)[1]",
        ),
    ],
)
def test_expressions(lines, call):
    expected = f"return _al_adaln.{call}" if call else lines[-1]
    assert "".join(method(*lines).split()).endswith(
        "".join(expected.split())
    )  # a long call has its own lines


def test_a_norm_of_something_with_effects_stays_where_it_was_computed():
    assert method("n = self.norm(self.project(x))", "y = print(n is None)", "return n") == (
        "    def forward(self, x, shift, scale, gate):\n"
        "        n = self.norm(self.project(x))\n        y = print(n is None)\n        return n\n"
    )
    assert method("n = self.norm(self.project(x))", "print('between')", "return n * (1 + scale) + shift") == (
        "    def forward(self, x, shift, scale, gate):\n"
        "        n = self.project(x)\n        print('between')\n"
        "        return _al_adaln.adaln(self.norm, n, shift, scale)\n"
    )


def test_a_gate_applied_ahead_leaves_the_branch_in_its_place():
    assert method("y = gate * self.project(x)", "x = x + y", "return x") == (
        "    def forward(self, x, shift, scale, gate):\n"
        "        y = self.project(x)\n        x = _al_adaln.gated_residual(x, y, gate)\n        return x\n"
    )


def test_shift_and_scale_computed_after_the_sum():
    found = method(
        "y = self.project(x)",
        "x = x + gate * y",
        "shift, scale = scale.chunk(2)",
        "y = self.norm(x) * (1 + scale) + shift",
        "return x, y",
    )
    assert "        x, y = _al_adaln.residual_adaln(self.norm, x, y, gate, shift, scale)\n" in found
    assert found.index("chunk") < found.index("residual_adaln")


HELPERS = """
@{decorator}
def modulate(x, shift, scale):
    return x * (1 + scale) + shift


class Base:
    def modulate(self, x, shift, scale):
        return x * (1 + scale) + shift

    def forward(self, norm, x, shift, scale):
        return {call}(norm(x), shift, scale)


class Derived({base}):
    def modulate(self, x, shift, scale):
        return x
"""


@pytest.mark.parametrize(
    ("decorator", "base", "call", "sites"),
    [
        ("jit_fuser", "object", "modulate", 1),
        ("torch.no_grad()", "object", "modulate", 0),
        ("jit_fuser", "object", "self.modulate", 1),
        ("jit_fuser", "Base", "self.modulate", 0),  # a derived class may run another one
    ],
)
def test_helpers_are_seen_through_only_where_they_are_what_runs(decorator, base, call, sites):
    assert len(rewrite(HELPERS.format(decorator=decorator, base=base, call=call)).sites) == sites


NOT_READ = """import torch
from elsewhere import modulate_tokens
from torch import nn


def modulate(x, shift=None, scale=None):
    if scale is None and shift is None:
        return x
    elif shift is None:
        return x * (1 + scale.unsqueeze(1))
    elif scale is None:
        return x + shift.unsqueeze(1)
    else:
        return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def checked(x, shift, scale):
    assert x.ndim == 3
    return x * (1 + scale) + shift


def each(x, *scales):
    for scale in scales:
        x = torch.addcmul(x * 0, x.float(), 1 + scale)
    return x


def wrapped(x, shift, scale):
    y = x.float()
    return modulate(y, scale=scale, shift=shift).type_as(x)


def plain(x, shift, scale):
    return x * (1 + scale) + shift


def heated(x, scale):
    for _ in range(2):
        x = torch.softmax(x, -1) + scale * (1 + x)
    return x


@torch.no_grad()
def without_gradients(x, shift, scale):
    return x * (1 + scale) + shift


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.identity = nn.Identity()
        self.project = nn.Linear(8, 8)
        self.modulation = Modulation()

    def modulated(self, x, shift, scale):
        return x * (1 + scale) + shift

    def overridden(self, x, shift, scale):
        return x * (1 + scale) + shift

    def forward(self, x, shift, scale, gate, flag, mods, named):
{body}

class Modulation(nn.Module):
    def forward(self, x, shift, scale):
        if shift is not None:
            x = x * (1 + scale) + shift
        return x


class Derived(Layer):
    def overridden(self, x, shift, scale):
        return x
"""
MORE = "is more than assignments and a return"
STARS = "is called with * arguments"
ELSEWHERE = "comes from another block, a condition or :="


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["return modulate(self.norm(x), shift=shift, scale=scale)"], f"the helper modulate {MORE}"),
        (["n = self.norm(x).to(x.dtype)", "return modulate(n, shift, scale)"], f"the helper modulate {MORE}"),
        (["return checked(self.norm(x), shift, scale)"], f"the helper checked {MORE}"),
        (["return each(self.norm(x), scale, scale)"], f"the helper each {MORE}"),
        (["return wrapped(self.norm(x), shift, scale)"], "the helper wrapped does more than arithmetic"),
        (["return without_gradients(self.norm(x), shift, scale)"], "does more than arithmetic"),
        (["return self.overridden(self.norm(x), shift, scale)"], "another may run in its place"),
        (["return self.modulation(self.norm(x), shift, scale) + 0"], f"the helper modulation {MORE}"),
        (["return modulate_tokens(self.norm(x), shift, scale)"], "modulate_tokens does is not known"),
        (["return plain(self.norm(x), *mods)"], f"the helper plain {STARS}"),
        (["return plain(*mods, x=self.norm(x))"], f"the helper plain {STARS}"),
        (["return self.modulated(self.norm(x), **named)"], f"the helper modulated {STARS}"),
        (["return (n := self.norm(x)) * (1 + scale) + shift"], ELSEWHERE),
        (["if (n := self.norm(x)) is not None:", "    x = n * (1 + scale) + shift", "return x"], ELSEWHERE),
        (["x = self.norm(x) if flag else x", "return x * (1 + scale) + shift"], ELSEWHERE),
        (["if flag:", "    x = self.norm(x)", "return x * (1 + scale) + shift"], ELSEWHERE),
        (["y, z = self.norm(x) if flag else x, x", "return y * (1 + scale) + shift + z"], ELSEWHERE),
        (["return (self.norm if flag else self.identity)(x) * (1 + scale) + shift"], ELSEWHERE),
        (["norm = self.norm if flag else self.identity", "return norm(x) * (1 + scale) + shift"], ELSEWHERE),
        # Not AdaLN: what is scaled is no norm's output.
        (["return modulate(self.project(x), shift, scale)"], None),
        (["return modulate(shift, self.norm(x), scale)"], None),
        (["return heated(self.norm(x), scale)"], None),
        (["return modulate_tokens(x, shift, scale) + self.norm(x)"], None),
        (["if flag:", "    x = self.project(x)", "return x * (1 + scale) + shift + self.norm(x)"], None),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_modulations_that_are_not_read_are_reported(lines, reason):
    source = NOT_READ.replace("{body}", "".join(f"        {line}\n" for line in lines))
    result = rewrite(source, file="layer.py")
    assert (result.sites, result.source) == ((), source)
    if reason is None:
        assert result.left == ()
        return
    (left,) = result.left
    marks = ("norm(x) *", "n *", "x *", "*mods", "*named", "shift", "scale, scale", "(x) *")
    (number,) = [n for n, line in enumerate(lines) if "return" in line or "x = n" in line][:1]
    assert any(mark in lines[number] for mark in marks)
    first = source[: source.index("def forward(self, x, shift, scale, gate")].count("\n") + 2
    assert (left.file, left.line, left.function) == ("layer.py", first + number, "Layer.forward")
    assert reason in left.reason


CHOSEN = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.LayerNorm(2)
        self.other = nn.LayerNorm(2)
        self.other.weight.data.fill_(3.0)

    def forward(self, x, shift, scale, flag):
{body}
"""


@pytest.mark.parametrize(
    "lines",
    [
        ["return (self.one if flag else self.other)(x) * (1 + scale) + shift"],
        ["norm = self.one if flag else self.other", "return norm(x) * (1 + scale) + shift"],
        [
            "if flag:",
            "    norm = self.one",
            "else:",
            "    norm = self.other",
            "return norm(x) * (1 + scale) + shift",
        ],
    ],
    ids=len,
)
@pytest.mark.parametrize("observe", [False, True])
def test_a_norm_chosen_by_a_condition_is_the_one_that_runs(lines, observe):
    source = CHOSEN.replace("{body}", "".join(f"        {line}\n" for line in lines))
    result = rewrite(source, observe=observe)
    assert [site.kind for site in result.sites] == ["adaln"]
    names = {}
    exec(compile(result.source, "layer", "exec"), names)
    layer, x = names["Layer"](), torch.tensor([[1.0, 5.0]])
    shift, scale = torch.tensor([[10.0, 20.0]]), torch.tensor([[1.0, 1.0]])
    # The mean of 1 and 5 is 3, their deviation 2: -1 and 1. Times the weight (1 or 3) and 2, plus the shift.
    for flag, expected in ((True, [[8.0, 22.0]]), (False, [[4.0, 26.0]])):
        found = layer(x, shift, scale, flag)
        torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-4)


def test_attributes_assigned_together_are_each_what_they_are_given():
    source = CHOSEN.replace("{body}", "        return self.one(self.first(x)) * (1 + scale) + shift")
    source = source.replace(
        "self.one = nn.LayerNorm(2)",
        "(self.first, self.one), self.two = (nn.Linear(2, 2), nn.LayerNorm(2)), 3",
    )
    result = rewrite(source)
    assert [(site.kind, site.line) for site in result.sites] == [("adaln", 14)]
    assert "adaln(self.one, self.first(x), shift, scale" in result.source
    swapped = source.replace("nn.Linear(2, 2), nn.LayerNorm(2)", "nn.LayerNorm(2), nn.Linear(2, 2)")
    assert rewrite(swapped).sites == ()


def test_comments_above_statements_that_go_stay():
    found = method(
        "x = x + gate * self.project(x)",
        "# the norm",
        "y = self.norm(x) * (1 + scale) + shift",
        "return x, y",
    )
    assert found.count("# the norm") == 1


@pytest.mark.parametrize(
    "lines",
    [
        ["n = self.norm(x)", "x = self.project(x)", "shift = x", "return n * (1 + scale) + shift, x"],
        ["n = self.norm(x)", "scale = scale * 2", "return n * (1 + scale) + shift"],
        ["scale = 1 + scale", "n = self.norm(x) * scale + shift", "return n, scale"],
        [
            "for _ in range(2):",
            "    x = x + gate * self.project(x)",
            "    shift = x.mean()",
            "return self.norm(x) * (1 + scale) + shift",
        ],
        ["y = gate * self.project(x)", "gate = gate * 0", "return x + y, gate"],
        ["n = self.norm(x)", "f = lambda: n", "return n * (1 + scale) + shift, f()"],
        [
            "x = x + gate * self.project(x)",
            "z = x * 2",
            "x = self.norm(x) * (1 + scale) + shift",
            "return x, z",
        ],
        [
            "y = x",
            "x = x + gate * self.project(x)",
            "y = self.norm(x) * (1 + scale) + shift + y",
            "return x, y",
        ],
        [
            "try:",
            "    n = self.norm(x)",
            "    y = n * (1 + scale) + shift",
            "except ValueError:",
            "    y = n",
            "return y",
        ],
        ["n = self.norm(x)", "while n.sum() > 1e9:", "    n = n / 2", "return n * (1 + scale) + shift"],
        ["x, y = self.project(x), x", "return y + gate * x"],
        ["n = m = self.norm(x)", "return n * (1 + scale) + shift, m"],
        ["n = self.norm(x); y = n * (1 + scale) + shift", "return y"],
        ["if (n := self.norm(x)) is not None:", "    n = n * (1 + scale) + shift", "return n"],
        ["return [self.norm(t) * (1 + scale) + shift for t in (x, x * 2)][1]"],
        ["scale = scale.expand(3, 8)", "y = self.norm(x) * (1 + scale) + shift.expand_as(x)", "return y"],
        ["y = self.norm(x) * (1 + 0.5) + shift", "return y"],
        ["return self.norm(x) * (1 + scale.mean()) + shift.mean()"],
    ],
    ids=lambda lines: lines[-2] if len(lines) > 1 else lines[0],
)
def test_whatever_becomes_of_hostile_statements_computes_the_same(lines):
    source = (
        HEAD
        + "    def forward(self, x, shift, scale, gate):\n"
        + "".join(f"        {line}\n" for line in lines)
    )
    values = []
    for text in (source, rewrite(source).source, rewrite(source, observe=True).source):
        names = {}
        exec(compile(text, "layer", "exec"), names)
        torch.manual_seed(0)
        layer = names["Layer"]()
        inputs = [torch.randn(3, 8).requires_grad_() for _ in range(4)]
        outputs = as_tuple(layer(*inputs))
        sum(y.square().sum() for y in outputs).backward()
        values.append([*outputs, *(x.grad for x in inputs if x.grad is not None), layer.norm.weight.grad])
    for found in values[1:]:
        torch.testing.assert_close(found, values[0])


def test_the_import_goes_behind_docstring_and_future_imports():
    code = "def forward(norm, x, shift, scale):\n    return norm(x) * (1 + scale) + shift\n"
    head = '"""Text."""\n\nfrom __future__ import annotations\n'
    assert rewrite(head + code).source.startswith(f"{head}\n{IMPORT}\n")
    assert rewrite(f"# Licence\n\n{code}").source.startswith(f"# Licence\n\n{IMPORT}\n")
