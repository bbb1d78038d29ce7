"""The patterns among values: a modulated norm, a gated or plain residual sum, and what they are made of.

Matching passes through names, helpers and casts. What it passed is kept (`Trail`): the names that were read
on the way, because their statements lose their purpose, and the expressions that the op's call replaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import libcst as cst

from al_deepspeed.patching.norms import is_role
from al_deepspeed.patching.values import (
    SAME_VALUES,
    Cast,
    Definition,
    DType,
    Held,
    Inlined,
    Item,
    Normed,
    OnePlus,
    Opaque,
    Product,
    Read,
    Scalar,
    Sum,
    Value,
    View,
    meaning,
    same,
)


@dataclass
class Trail:
    """absorbed: (definition, the Name that read it). nodes: expressions that are part of the pattern.

    helpers: calls of methods and modules whose source was read.
    """

    absorbed: list[tuple[Definition, cst.Name]] = field(default_factory=list)
    nodes: set[cst.BaseExpression] = field(default_factory=set)
    helpers: list[Held] = field(default_factory=list)

    def through(self, value: Value) -> None:
        self.nodes.add(value.node)
        if isinstance(value, Read) and value.frame.caller is None:
            self.absorbed.append((value.definition, value.node))
        if isinstance(value, Inlined) and value.held is not None:
            self.helpers.append(value.held)

    def add(self, other: Trail) -> None:
        self.absorbed += other.absorbed
        self.nodes |= other.nodes
        self.helpers += other.helpers

    def merged(self, *others: Trail) -> Trail:
        trail = Trail(list(self.absorbed), set(self.nodes), list(self.helpers))
        for other in others:
            trail.add(other)
        return trail


@dataclass
class Operand:
    """An argument of the op: `value`, where `inside` (a `1 + scale` under a view) gives way to its scale."""

    value: Value
    inside: OnePlus | None = None


@dataclass
class Modulated:
    """norm(x) * (1 + scale) + shift. The casts are the outermost at their place: of x, of the norm, of y."""

    norm: Normed
    trail: Trail
    scale: Operand | None = None
    shift: Operand | None = None
    in_dtype: DType | None = None
    norm_dtype: DType | None = None
    out_dtype: DType | None = None
    x: Value | None = None


@dataclass
class Residual:
    """residual + branch * gate; `product` says whether there is a gate at all."""

    sum: Sum
    trail: Trail
    residual: Value
    branch: Value
    gate: Value | None = None
    dtype: DType | None = None


class NoMatch(Exception):
    """The value looks like the pattern up to a point; the message says what is missing."""


def peel(value: Value, trail: Trail, through_names: bool = True) -> tuple[Value, DType | None]:
    """The value below casts, names and helpers, and the outermost cast's dtype."""
    dtype = None
    while True:
        if isinstance(value, Cast):
            dtype = dtype or value.dtype
            following = value.base
        elif isinstance(value, Inlined):
            following = value.result
        elif isinstance(value, Read) and value.definition.value is not None:
            if not through_names and value.frame.caller is None:
                return value, dtype
            following = value.definition.value
        else:
            return value, dtype
        trail.through(value)
        value = following


def match_modulated(value: Value) -> Modulated | None:
    """The value as a modulated norm; None when it is something else.

    Raises:
        NoMatch: there is a norm and arithmetic around it, but not the op's.
    """
    trail = Trail()
    core, out_dtype = peel(value, trail, through_names=False)
    if isinstance(core, Sum | Product):
        trail.through(core)
        found = _modulated_core(core, trail)
        if found is None:
            return None
        found.out_dtype = out_dtype
        if found.norm.rms:
            raise NoMatch("the norm is an RMS norm")
        if isinstance(core, Sum) and core.in_place:
            raise NoMatch("the shift is added in place")
        return _with_x(found)
    return None


def match_norm(value: Value) -> Modulated | None:
    """A norm without modulation, under casts."""
    trail = Trail()
    core, out_dtype = peel(value, trail, through_names=False)
    if not isinstance(core, Normed) or core.rms:
        return None
    trail.through(core)
    return _with_x(Modulated(core, trail, out_dtype=out_dtype))


def _modulated_core(core: Sum | Product, trail: Trail) -> Modulated | None:
    if isinstance(core, Product):
        scaled = _scaled(core, trail)
        return None if scaled is None else scaled
    for scaled_side, shift in ((core.left, core.right), (core.right, core.left)):
        inner_trail = Trail()
        inner, cast = peel(scaled_side, inner_trail)
        if not isinstance(inner, Product | Sum):
            continue
        inner_trail.through(inner)
        found = _scaled(inner, inner_trail)
        if found is None:
            continue
        if cast is not None and not _same_dtype(cast, found.norm_dtype):
            raise NoMatch("a cast lies between the scaled norm and the shift")
        found.trail = trail.merged(found.trail)
        found.shift = Operand(shift)
        return found
    own = _scaled(core, Trail())  # norm * scale + norm
    if own is not None:
        own.trail = trail.merged(own.trail)
    return own


def _scaled(core: Product | Sum, trail: Trail) -> Modulated | None:
    """norm * (1 + scale), or norm * scale + norm."""
    sides = ((core.left, core.right), (core.right, core.left))
    if isinstance(core, Sum):
        for side, other in sides:
            one, two = Trail(), Trail()
            product, cast = peel(side, one)
            normed, norm_cast = peel(other, two)
            if not (isinstance(product, Product) and isinstance(normed, Normed)) or cast is not None:
                continue
            for factor, scale in ((product.left, product.right), (product.right, product.left)):
                three = Trail()
                again, again_cast = peel(factor, three)
                if again is normed and _same_dtype(norm_cast, again_cast):
                    one.through(product)
                    two.through(normed)
                    return Modulated(
                        normed, trail.merged(one, two, three), Operand(scale), norm_dtype=norm_cast
                    )
        return None
    for side, other in sides:
        inner = Trail()
        normed, cast = peel(side, inner)
        viewed = isinstance(normed, View) and isinstance(peel(normed.base, Trail())[0], Normed)
        if viewed and _one_plus(other, Trail()) is not None:
            raise NoMatch("the norm's output is cut or reshaped before it is modulated")
        if not isinstance(normed, Normed):
            if _one_plus(other, Trail()) is not None and may_be_normed(normed):
                raise NoMatch("the norm's output comes from another block, a condition or :=")
            continue
        inner.through(normed)
        scale = _one_plus(other, inner)
        if scale is None:
            return None
        return Modulated(normed, trail.merged(inner), scale, norm_dtype=cast)
    return None


def _one_plus(value: Value, trail: Trail) -> Operand | None:
    """1 + scale, also below views and casts: `(1 + scale)[:, None]`."""
    outer, passed = value, Trail()
    while True:
        value, _ = peel(value, passed)
        if isinstance(value, OnePlus):
            passed.through(value)
            trail.add(passed)
            whole = meaning(outer)
            return Operand(value.base) if whole is value else Operand(whole, value)
        if not isinstance(value, View) or value.method not in SAME_VALUES:
            return None
        if any(not _is_constant(other) for other in value.others):
            return None
        passed.through(value)
        value = value.base


def may_be(value: Value) -> Iterator[Value]:
    """What a value is below names, casts, views and conditions: one on each way through the code."""
    waiting, merges = [value], set()
    while waiting:
        value, _ = peel(waiting.pop(), Trail())
        if isinstance(value, View) and value.method in SAME_VALUES:
            waiting.append(value.base)
        elif isinstance(value, Opaque) and isinstance(value.node, cst.IfExp | cst.NamedExpr):
            waiting += value.inner
        elif isinstance(value, Read) and value.definition.sources:
            if value.definition not in merges:
                waiting += [replace(value, definition=source) for source in value.definition.sources]
            merges.add(value.definition)
        else:
            yield value


def may_be_normed(value: Value) -> bool:
    """Whether it is a norm's output on some way through the code."""
    return any(isinstance(one, Normed) or _may_call_norm(one) for one in may_be(value))


def _may_call_norm(value: Value) -> bool:
    if not (isinstance(value, Opaque) and value.called and len(value.inner) == 2):
        return False
    return any(map(value.frame.evaluator.is_norm, may_be(value.inner[0])))


def scaled(value: Value) -> list[Value]:
    """What is multiplied by 1 + scale, when the value is such a product."""
    if not isinstance(value, Product):
        return []
    sides = ((value.left, value.right), (value.right, value.left))
    return [side for side, other in sides if _one_plus(other, Trail()) is not None]


def modulates_in_place(value: Value | None) -> bool:
    """`norm(x).mul_(1 + scale)`, or `n *= 1 + scale`."""
    if not isinstance(value, Opaque) or len(value.inner) != 2:
        return False
    if isinstance(value.node, cst.Call) and getattr(value.node.func, "attr", cst.Name("_")).value != "mul_":
        return False
    normed, factor = value.inner
    return isinstance(peel(normed, Trail())[0], Normed) and _one_plus(factor, Trail()) is not None


def reads_as_modulation(node: cst.CSTNode) -> bool:
    """`norm(x) * (1 + scale)`, by the look of it alone."""
    if type(node) is not cst.BinaryOperation or type(node.operator) is not cst.Multiply:
        return False
    for one, other in ((node.left, node.right), (node.right, node.left)):
        if not (isinstance(one, cst.Call) and isinstance(other, cst.BinaryOperation)):
            continue
        name = one.func.attr if isinstance(one.func, cst.Attribute) else one.func
        ones = [term for term in (other.left, other.right) if isinstance(term, cst.Integer | cst.Float)]
        if (
            isinstance(name, cst.Name)
            and is_role(name.value)
            and isinstance(other.operator, cst.Add)
            and ones
        ):
            return True
    return False


def _is_constant(value: Value) -> bool:
    return (
        isinstance(value, Scalar)
        or (isinstance(value, Opaque) and value.pure and all(_is_constant(inner) for inner in value.inner))
        or type(value).__name__ == "Global"
    )


def _with_x(found: Modulated) -> Modulated:
    """x without the casts that only concern how the norm computes."""
    x, dtype = found.norm.x, None
    while True:
        if isinstance(x, Cast):
            dtype = dtype or x.dtype
            found.trail.through(x)
            x = x.base
        elif isinstance(x, Read) and x.definition.value is not None and _only_renames(x.definition.value):
            found.trail.through(x)
            x = x.definition.value
        else:
            break
    found.x, found.in_dtype = x, dtype
    return found


def _only_renames(value: Value) -> bool:
    """A cast of a name, or a helper's argument."""
    if isinstance(value, Read):
        return value.frame.caller is not None
    cast = isinstance(value, Cast)
    while isinstance(value, Cast):
        value = value.base
    return cast and isinstance(value, Read)


def _same_dtype(one: DType | None, other: DType | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.kind != other.kind or one.text != other.text:
        return False
    return one.value is None or same(one.value, other.value)


def match_sum(value: Value) -> Residual | None:
    """Any sum of two tensors, under casts; with a product as one term, that term is gate * branch."""
    trail = Trail()
    core, dtype = peel(value, trail, through_names=False)
    if not isinstance(core, Sum):
        return None
    trail.through(core)
    products = []
    for side, other in ((core.right, core.left), (core.left, core.right)):
        inner = Trail()
        product, cast = peel(side, inner)
        if isinstance(product, Product):
            inner.through(product)
            products.append((product, cast, inner, other))
    if len(products) == 2:
        return None
    if not products:
        return _without_upcasts(Residual(core, trail, core.left, core.right, None, dtype))
    product, cast, inner, residual = products[0]
    if any(isinstance(peel(factor, Trail())[0], OnePlus) for factor in (product.left, product.right)):
        return None  # a modulation, not a gate
    if cast is not None and dtype is None:
        if cast.kind != "like" or not same(cast.value, residual):
            return None
        dtype = cast
    return _without_upcasts(Residual(core, trail.merged(inner), residual, product.left, product.right, dtype))


def _without_upcasts(found: Residual) -> Residual:
    """`x.float() + y.float() * gate`, cast at the end: the op computes in fp32 anyway."""
    if found.dtype is not None:
        for name in ("residual", "branch", "gate"):
            value = getattr(found, name)
            while isinstance(value, Cast) and value.dtype.kind == "name" and value.dtype.text == "float32":
                found.trail.through(value)
                value = value.base
            setattr(found, name, value)
    return found


def is_scaled_norm(found: Residual) -> bool:
    """Whether the sum is norm * something + something, with no 1 + in the factor."""
    factors = (found.branch, found.gate)
    normed = [factor for factor in factors if isinstance(peel(factor, Trail())[0], Normed)]
    return len(normed) == 1


def is_item(value: Value) -> bool:
    """One of several results: an unpacked name, or `e[2]`, below views."""
    while True:
        value = meaning(value)
        if isinstance(value, Item):
            return True
        if isinstance(value, Read) and value.definition.sources:  # bound in several branches
            arriving = [source.value for source in value.definition.sources]
            return all(made is not None and is_item(made) for made in arriving)
        if isinstance(value, View):
            if value.method == "[]" and value.others and all(isinstance(o, Scalar) for o in value.others):
                return True
            value = value.base
        elif isinstance(value, Cast):
            value = value.base
        else:
            return False


def origin(value: Value) -> Value:
    """What a modulation was taken from: the tensor or tuple below views, items and casts."""
    while True:
        value = meaning(value)
        if isinstance(value, View | Cast | OnePlus):
            value = value.base
        elif isinstance(value, Item):
            value = value.source
        else:
            return value
