"""Sources that say something else than they seem to: rewritten or left, they compute what they did.

Each case runs as it stands and rewritten, in fp32: results, gradients, the tensors given, calls in their
order and the random state afterwards must agree.
"""

import pytest
from rewritten_source import HEAD, MODULATE, assert_computes_the_same, body

from al_deepspeed.patching.rewriter import rewrite

# 1 + scale through names and views -------------------------------------------------------------------------

RETURN = "return self.norm(x) * s + shift"
ONE_PLUS = {
    "a view of a name": ("s = 1 + scale[:, 0]\ns = s.unsqueeze(1)", 1),
    "a view of a name that stays": (
        "s = 1 + scale[:, 0]\nkept = s\ns = s[:, None]\nshift = shift + kept[:, None]",
        1,
    ),
    "a cast of a name": ("s = 1 + scale\ns = s.to(x.dtype)\nshift = shift * s", 1),
    "expanded": ("s = 1 + scale\ns = s.expand(-1, 5, -1)", 1),
    "tanh": ("s = (1 + scale).tanh()", 0),
    "sigmoid": ("s = 1 + scale\ns = s.sigmoid()", 0),
    "clamp": ("s = (1 + scale).clamp(0.8, 1.1)", 0),
    "size": ("s = (1 + scale).size(2)", 0),
    "changed in place": ("scale = scale.detach()\ns = 1 + scale\nscale.exp_()\nshift = shift + s", 0),
    "without gradients": ("with torch.no_grad():\n    s = 1 + scale", 0),
    "a view without gradients": ("with torch.no_grad():\n    s = 1 + scale\n    s = s[:, :]", 0),
}


@pytest.mark.parametrize("case", ONE_PLUS)
def test_one_plus_scale_is_followed_only_as_far_as_it_means_that(case):
    lines, sites = ONE_PLUS[case]
    assert assert_computes_the_same(body(f"{lines}\n{RETURN}")) == sites


def test_one_plus_scale_ahead_of_a_loop_that_changes_the_scale():
    lines = """
        scale = scale.detach()
        s = 1 + scale
        for _ in range(2):
            x = self.norm(x) * s + shift
            scale.exp_()
        return x, s
    """
    assert assert_computes_the_same(body(lines)) == 0


# What a name stands for ------------------------------------------------------------------------------------

NESTED = "def inner(x):\n    return modulate(self.norm(x), shift, scale)\nreturn inner(x)"
NAMES = {
    "a helper of the function around": body(f"modulate = lambda x, a, b: x * b + a\n{NESTED}", MODULATE),
    "torch of the function around": body(
        """
        class torch:
            addcmul = staticmethod(lambda a, b, c: a + b)
        def inner(x):
            return torch.addcmul(shift, self.norm(x), 1 + scale)
        return inner(x)
        """
    ),
    "a method of a class inside": body(
        """
        modulate, norm = lambda x, a, b: x * b, self.norm
        class Inner:
            def go(self, x):
                return modulate(norm(x), shift, scale)
        return Inner().go(x)
        """,
        MODULATE,
    ),
    "an import of its own": body(
        "from operator import call as modulate\nreturn modulate(lambda n, a: n * a, self.norm(x), scale)"
        if hasattr(__import__("operator"), "call")
        else "from math import gcd as modulate\nreturn self.norm(x) * modulate(4, 6)",
        MODULATE,
    ),
    "two definitions": body(
        "return modulate(self.norm(x), shift, scale)",
        "if True:\n    def modulate(x, shift, scale):\n        return x * scale + shift\n"
        "else:\n    def modulate(x, shift, scale):\n        return x * (1 + scale) + shift\n",
    ),
    "assigned anew": body(
        "return modulate(self.norm(x), shift, scale)", MODULATE + "modulate = lambda x, a, b: x * b\n"
    ),
    "replaced": body(
        "return modulate(self.norm(x), shift, scale)",
        MODULATE + "globals()['modulate'] = lambda x, a, b: x * b + a\n",
    ),
    "two methods": """
class Block(Base):
    def modulate(self, x, shift, scale):
        return x * (1 + scale) + shift

    if True:
        def modulate(self, x, shift, scale):
            return x * scale + shift

    def forward(self, x, gate, shift, scale):
        return self.modulate(self.norm(x), shift, scale)
""",
    "a default computed earlier": body(
        "return modulate(self.norm(x), shift)",
        "KEPT = torch.ones(8)\ndef modulate(x, shift, scale=KEPT):\n    return x * (1 + scale) + shift\n"
        "KEPT = torch.zeros(8)\n",
    ),
    "a default of the class": """
class Block(Base):
    kept = torch.ones(8)

    def modulate(self, x, shift, scale=kept):
        return x * (1 + scale) + shift

    def forward(self, x, gate, shift, scale):
        return self.modulate(self.norm(x), shift)
""",
    "a variable of the helper's module": body(
        "factor = 0.5\nreturn modulate(self.norm(x), shift, scale) * factor",
        "factor = 3.0\ndef modulate(x, shift, scale):\n    return x * (1 + scale * factor) + shift\n",
    ),
    "a comprehension binds": body(
        "n = self.norm(x)\n[x := x.exp() for _ in 'a']\nreturn n * (1 + scale) + shift"
    ),
    "deleted": body("h = x * 1\nn = self.norm(h)\ndel h\nreturn n * (1 + scale) + shift"),
    "the scale is deleted": body("n = self.norm(x)\ns = 1 + scale\ndel scale\nreturn n * s + shift"),
    "a guard reads": body(
        """
        n = self.norm(x)
        match x.dim():
            case 3 if n.sum() < 1e9:
                x = 2 * x
        return n * (1 + scale) + shift, x
        """
    ),
    "a cause reads": body(
        """
        n = self.norm(x)
        try:
            raise ValueError from (None if n is not None else KeyError())
        except (ValueError if n is not None else KeyError):
            pass
        return n * (1 + scale) + shift
        """
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_stand_for_what_python_takes_them_for(case):
    assert_computes_the_same(NAMES[case])


def test_an_original_reads_the_variables_that_it_read():
    # The call's own x is h here: the helper's cast must still look at the other one.
    source = """
class Block(Base):
    def modulate(self, n, shift, scale, like):
        return (n * (1 + scale) + shift).to(like.dtype)

    def forward(self, x, gate, shift, scale):
        h, x = x, x.double()
        return self.modulate(self.norm(h), shift, scale, x).float()


setattr(Block, "modulate", lambda self, n, shift, scale, like: (n * scale).to(like.dtype))
"""
    assert assert_computes_the_same(source) == 1
    assert "lambda norm, x_, shift, scale" in rewrite(HEAD + source).source


# What happens in between -----------------------------------------------------------------------------------

CHANGE = "def change(tensors):\n    tensors[0].exp_()\n"
BETWEEN = {
    "in the same statement": body("n = self.norm(x)\nreturn x.exp_(), n * (1 + scale) + shift"),
    "by a call in the same statement": body(
        "n = self.norm(x)\nreturn F.elu(x, inplace=True), n * (1 + scale) + shift"
    ),
    "by an operand": body("return self.norm(x) * (1 + x.exp_().mean(1, keepdim=True)) + shift"),
    "of the sum by an operand": body(
        "h = x + gate * self.f(x)\nn = self.norm(h)\nreturn n * (1 + h.exp_().mean(1, keepdim=True)) + shift"
    ),
    "by a function around": body(
        """
        def change():
            nonlocal x
            x = x.exp()
        def inner():
            n = self.norm(x)
            change()
            return n * (1 + scale) + shift
        return inner()
        """
    ),
    "of a variable of the module": body(
        "global kept\nkept = x\nn = self.norm(kept)\nchange()\nreturn n * (1 + scale) + shift",
        "def change():\n    global kept\n    kept = kept.exp()\n",
    ),
    "of an attribute by a method": """
class Block(Base):
    def change(self):
        self.kept = self.kept.exp()

    def forward(self, x, gate, shift, scale):
        self.kept = x
        return self.go(shift, scale)

    def go(self, shift, scale):
        n = self.norm(self.kept)
        self.change()
        return n * (1 + scale) + shift
""",
    "of an attribute by a module": """
class Change(nn.Module):
    def forward(self, holder):
        holder.kept = holder.kept.exp()

class Block(Base):
    def __init__(self):
        super().__init__()
        self.change = Change()

    def forward(self, x, gate, shift, scale):
        self.kept = x
        return self.go(shift, scale)

    def go(self, shift, scale):
        n = self.norm(self.kept)
        self.change(self)
        return n * (1 + scale) + shift
""",
    "of an attribute set by name": """
class Block(Base):
    def change(self):
        self.kept.exp_()

    def forward(self, x, gate, shift, scale):
        setattr(self, "kept", x)
        n = self.norm(x)
        self.change()
        return n * (1 + scale) + shift
""",
    "in a list": body("n = self.norm(x)\nchange([x])\nreturn n * (1 + scale) + shift", CHANGE),
    "in a tuple with a name": body(
        "kept = (x, 1)\nn = self.norm(x)\nchange(kept)\nreturn n * (1 + scale) + shift", CHANGE
    ),
    "while it yields": """
class Block(Base):
    def go(self, x, shift, scale):
        n = self.norm(x)
        yield
        yield n * (1 + scale) + shift

    def forward(self, x, gate, shift, scale):
        steps = self.go(x, shift, scale)
        next(steps)
        x.exp_()
        return next(steps)
""",
}


@pytest.mark.parametrize("case", BETWEEN)
def test_changes_between_the_steps(case):
    assert_computes_the_same(BETWEEN[case], gradients=False)


LATER = {
    "shift": "shift = shift * 1\ny = self.norm(x) * (1 + scale) + shift\nshift.exp_()\nreturn y, shift",
    "scale": "scale = scale * 1\ny = self.norm(x) * (1 + scale) + shift\nscale.exp_()\nreturn y, scale",
    "branch": "b = self.f(x)\ny = x + gate.detach() * b\nb.mul_(2)\nreturn y, b",
    "sum": "h = x + gate * self.f(x)\nh.add_(1)\ny = self.plain(h) * (1 + scale) + shift\nreturn h, 2 * y",
}


@pytest.mark.parametrize("case", LATER)
def test_operands_and_results_may_be_changed_in_place_afterwards(case):
    assert_computes_the_same(body(LATER[case]))


# What is evaluated, and when -------------------------------------------------------------------------------

UNUSED = "def modulate(x, shift, scale, unused):\n    return x * (1 + scale) + shift\n"
EVALUATED = {
    "an argument that nobody reads": body("return modulate(self.norm(x), shift, scale, self.g(x))", UNUSED),
    "random numbers that nobody reads": body(
        "return modulate(self.norm(x), shift, scale, torch.rand(3))", UNUSED
    ),
    "a norm that is not there": body(
        """
        self.norm = None
        h = x + gate * self.f(x)
        y = self.norm(h) * (1 + scale) + shift if self.norm is not None else h
        return y, h
        """
    ),
    "a norm behind and": body(
        """
        self.norm = None
        h = x + gate * self.f(x)
        y = self.norm is not None and self.norm(h) * (1 + scale) + shift
        return h
        """
    ),
    "a context that catches": body(
        """
        h = x
        with contextlib.suppress(ValueError):
            h = x + gate * self.f(x)
            s = 1 + scale[:, int("a")]
            h = self.norm(h) * s + shift
        return h
        """
    ),
    "scripted functions": body(
        "return one(x, shift, scale), two(x, shift, scale), three(x, shift, scale)",
        "".join(
            f"@{decorator}\ndef {name}(x, shift, scale):\n"
            "    return F.layer_norm(x, (8,)) * (1 + scale) + shift\n"
            for decorator, name in (("script", "one"), ("jit.script", "two"), ("torch.jit.script", "three"))
        ),
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("case", EVALUATED)
def test_what_was_evaluated_still_is(case):
    assert_computes_the_same(EVALUATED[case])
