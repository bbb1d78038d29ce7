"""When things happen: jumps, calls and gradients between the steps that a call of the op takes together."""

import pytest
from rewritten_source import HEAD, MODULATE, assert_computes_the_same, body

from al_deepspeed.patching.rewriter import rewrite

# Jumps -----------------------------------------------------------------------------------------------------

JUMPS = {
    "break": """
        for number in range(2):
            x = x + gate * self.f(x)
            n = self.norm(x)
            if number == 1:
                break
            x = n * (1 + scale) + shift
        return x, n
    """,
    "continue": """
        for number in range(3):
            if number == 1:
                x = x + gate * self.g(x)
                continue
            x = self.norm(x) * (1 + scale) + shift
        return x
    """,
    "continue ahead of the norm": """
        for number in range(2):
            h = x + gate * self.f(x)
            if number == 0:
                continue
            x = self.norm(h) * (1 + scale) + shift
        return x, h
    """,
    "while": """
        n, number = shift, 0
        while True:
            number += 1
            x = x + gate * self.f(x)
            n = self.norm(x)
            if number > 1:
                break
            x = x + n
        else:
            x = shift
        return x, n
    """,
    "nothing to read": """
        h, rows = x + gate * self.f(x), ()
        if not rows:
            return h
        return self.norm(h) * (1 + rows[1]) + rows[0]
    """,
    "a sum of its own": """
        h = x + gate * self.f(x)
        rows = ()
        if not rows:
            return h
        y = self.norm(h) * (1 + rows[1]) + rows[0]
        return y
    """,
}


@pytest.mark.parametrize("case", JUMPS)
def test_jumps_out_of_a_block(case):
    assert_computes_the_same(body(JUMPS[case]))


# The order of operands -------------------------------------------------------------------------------------

INPLACE = "act = nn.ReLU(inplace=True)\n"
ORDER = {
    "keywords of a helper": body(
        "return modulate(self.norm(x), scale=self.f(scale), shift=self.g(shift))", MODULATE
    ),
    "a function of what another changes": body(
        "t = scale * 1\nreturn self.norm(x) * (1 + torch.tanh(t)) + act(t)", INPLACE
    ),
    "a cast of what another changes": body(
        "t = scale * 1\nreturn self.norm(x) * (1 + act(t)) + torch.tanh(t)", INPLACE
    ),
    "a function of what the branch changes": body(
        "t = gate * 1\nh = x + torch.sigmoid(t) * self.f(act(t))\nreturn self.norm(h) * (1 + scale) + shift",
        INPLACE,
    ),
    "a name that an operand binds": body("return gate * (x := self.f(x)) + x"),
    "two statements on a line": body("y = self.f(x); x = x + gate * y\nreturn x"),
}


@pytest.mark.parametrize("case", ORDER)
def test_operands_are_evaluated_in_the_order_of_the_source(case):
    assert_computes_the_same(ORDER[case], gradients=case.startswith("k"))


def test_operands_that_draw_random_numbers_draw_them_in_order():
    lines = "return self.norm(F.dropout(x)) * (1 + F.dropout(scale)) + F.dropout(shift)"
    assert assert_computes_the_same(body(lines)) == 1


def test_operands_without_effects_stay_in_the_order_of_the_signature():
    source = HEAD + body("return x + mod.gate[:, None] * self.f(x)").replace("gate, shift", "mod, shift")
    assert "gated_residual(x, self.f(x), mod.gate[:, None])" in rewrite(source).source


# Changes by what is not a plain call ------------------------------------------------------------------------

CHANGE = "def change(tensor):\n    tensor.exp_()\ndef call(function):\n    function()\n"
CALLED = "def change():\n    {}\ncall(change)"
HIDDEN = {
    "a function handed on": CALLED.format("x.exp_()"),
    "a function handed on that binds": CALLED.format("nonlocal x; x = x.exp()"),
    "a lambda": "f = lambda: x.exp_()\nf()",
    "a method": "f = x.exp_\nf()",
    "a partial function": "f = functools.partial(change, x)\nf()",
    "a comprehension": "[t.exp_() for t in [x]]",
    "a comprehension's call": "{key: change(x) for key in 'a'}",
    "a decorator": "@call\ndef now():\n    x.exp_()",
    "a class": "class Now:\n    x.exp_()",
    "a view by a function": "change(torch.reshape(x, (-1,)))",
    "a view by an attribute": "change(x.mT)",
    "a view by a method": "change(x.swapaxes(0, 1))",
    "a choice": "change(x if scale is not None else shift)",
}


MODES = {
    "by a function": ("torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)"),
    "by hand": ("mode = torch.no_grad()\nmode.__enter__()", "mode.__exit__(None, None, None)"),
}


@pytest.mark.parametrize("case", MODES)
def test_gradients_switched_between_the_steps(case):
    before, after = MODES[case]
    lines = f"{before}\nn, s = self.norm(x), 1 + scale\n{after}\nreturn x + n * s + shift"
    assert assert_computes_the_same(body(lines)) == 0


LEFT = {
    "a product": ("n = self.norm(x)\nn *= 1 + scale\nreturn n + shift", "in place"),
    "a method": ("return self.norm(x).mul_(1 + scale) + shift", "in place"),
    "a comprehension": ("return sum([self.norm(t) * (1 + scale) for t in (x, 2 * x)])", "comprehension"),
    "a lambda": ("f = lambda t: self.norm(t) * (1 + scale) + shift\nreturn f(x)", "lambda"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_is_reported(case):
    lines, reason = LEFT[case]
    assert assert_computes_the_same(body(lines), gradients=False) == 0
    assert [item.reason for item in rewrite(HEAD + body(lines)).left if reason in item.reason]


def test_an_f_string_stays():
    source = HEAD + body("print(f'{(x + gate * self.f(x)).shape}')\nreturn self.norm(x) * (1 + scale)")
    observed = rewrite(source, observe=True)
    compile(observed.source, "layer", "exec")
    assert [site.kind for site in observed.sites] == ["adaln"]


@pytest.mark.parametrize("case", HIDDEN)
def test_changes_that_hide(case):
    lines = f"n = self.norm(x)\n{HIDDEN[case]}\nreturn n * (1 + scale) + shift"
    assert assert_computes_the_same(body(lines, f"import functools\n{CHANGE}"), gradients=False) == 0


def test_a_change_behind_a_view_that_a_function_made():
    lines = "h = flat(x)\nn = self.norm(h)\nchange(x)\nreturn n * (1 + scale[0]) + shift[0]"
    made = "def flat(x):\n    print(end='')\n    return x.view(-1, 8)\n"
    assert assert_computes_the_same(body(lines, CHANGE + made), gradients=False) == 0


def test_a_generator_that_changes_a_tensor_while_a_loop_asks_it():
    lines = "g = go(x)\nn = self.norm(x)\nfor _ in g:\n    pass\nreturn n * (1 + scale) + shift"
    made = "def go(x):\n    x.exp_()\n    yield\n"
    assert assert_computes_the_same(body(lines, made), gradients=False) == 0


def test_a_property_that_changes_a_tensor():
    source = """
class Block(Base):
    @property
    def change(self):
        self.kept.exp_()

    def forward(self, x, gate, shift, scale):
        self.kept = x
        n = self.norm(x)
        self.change
        return n * (1 + scale) + shift
"""
    assert assert_computes_the_same(source, gradients=False) == 0


# Gradients in between ---------------------------------------------------------------------------------------

GRADIENT = {
    "a hook": "h.register_hook(lambda g: 2 * g)",
    "a derivative": "y = y + torch.autograd.grad(y.sum(), h, retain_graph=True)[0]",
}


@pytest.mark.parametrize("case", GRADIENT)
def test_a_residual_whose_gradient_is_asked_for_is_no_output_of_the_norms_call(case):
    lines = f"h = x + gate * self.f(x)\ny = self.norm(h) * (1 + scale) + shift\n{GRADIENT[case]}\nreturn y, h"
    source = body(lines)
    assert_computes_the_same(source)
    assert [site.kind for site in rewrite(HEAD + source).sites] == ["gated_residual", "adaln"]


# Names of modules -------------------------------------------------------------------------------------------


def test_an_imported_name_that_the_module_gives_to_something_else():
    own = "class F:\n    @staticmethod\n    def layer_norm(x, shape):\n        return 2 * x\n"
    lines = "return F.layer_norm(x, (8,)) * (1 + scale) + shift"
    assert assert_computes_the_same(body(lines, own)) == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_function_that_a_call_scripts_is_left():
    made = "def one(x, shift, scale):\n    return F.layer_norm(x, [8]) * (1 + scale) + shift\n"
    made += "def two(x, shift, scale):\n    return one(x, shift, scale)\nthree = torch.jit.script(two)\n"
    source = body("return three(x, shift, scale)", made)
    assert assert_computes_the_same(source) == 0
    assert "scripted by a call" in rewrite(HEAD + source).left[0].reason


# Loops over modules -----------------------------------------------------------------------------------------

LOOPS = {
    "over streams": """
        done = []
        for stream, norm, layer in zip((x, 2 * x), (self.norm, self.plain), (self.f, self.g)):
            done.append(stream + gate * layer(norm(stream) * (1 + scale) + shift))
        return tuple(done)
    """,
    "over names": """
        done = []
        for name in self.norms:
            done.append(x + gate * self.f(self.norms[name](x) * (1 + scale) + shift))
        return tuple(done)
    """,
}


@pytest.mark.parametrize("case", LOOPS)
def test_norms_of_a_loop(case):
    norms = "        self.norms = nn.ModuleDict({name: nn.LayerNorm(8) for name in 'ab'})\n"
    source = HEAD + norms + body(LOOPS[case])
    assert_computes_the_same(source.removeprefix(HEAD))
    assert sorted(site.kind for site in rewrite(source).sites) == ["adaln", "gated_residual"]


def test_a_helper_that_cuts_the_modulation_itself():
    helper = (
        "def modulate(x, both):\n    shift, scale = both.chunk(2, -1)\n    return x * (1 + scale) + shift\n"
    )
    source = body("return modulate(self.norm(x), torch.cat([shift, scale], -1))", helper)
    assert assert_computes_the_same(source) == 1
