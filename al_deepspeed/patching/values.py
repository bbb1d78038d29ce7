"""Symbolic values: what an expression of a function body computes, as far as AdaLN is concerned.

Names are resolved to definitions (one a binding, as in static single assignment), so that two reads of a
name are the same value exactly when nothing was assigned between them. Sums, products, casts, `1 + scale`
and norms keep their structure; all else is a View (a pure function of one value), or Opaque.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import libcst as cst

if TYPE_CHECKING:
    from al_deepspeed.patching.evaluate import Frame

# Methods that take `1 +` along: f(1 + scale) is 1 + f(scale).
SAME_VALUES = frozenset(
    [
        "[]",
        "unsqueeze",
        "squeeze",
        "view",
        "reshape",
        "expand",
        "chunk",
        "split",
        "unbind",
        "transpose",
        "permute",
        "contiguous",
        "flatten",
        "unflatten",
        "narrow",
        "select",
        "movedim",
        "clone",
        "detach",
        "repeat",
    ]
)


class Place(NamedTuple):
    """A statement: which block of the function, and where in it."""

    block: int
    index: int


@dataclass(eq=False)
class Definition:
    """One binding of a name.

    value: what was bound; None for a parameter, a loop variable, or a merge of several definitions.
    previous: what the name meant before.
    sources: for a merge, the definitions that can arrive there.
    statement: the `name = value` statement, when the binding is exactly that and may be removed.
    reads: the Name nodes that read it, with the frame that reads.
    """

    name: str
    place: Place
    value: Value | None = None
    previous: Definition | None = None
    sources: list[Definition] = field(default_factory=list)
    statement: cst.SimpleStatementLine | None = None
    reads: list[cst.Name] = field(default_factory=list)
    foreign: bool = False  # also read where the matcher does not follow: closures, merges
    parameter: bool = False
    looped: bool = False  # over what a loop goes through

    def read_elsewhere(self) -> None:
        if not self.foreign:
            self.foreign = True
            for source in self.sources:
                source.read_elsewhere()

    def add_source(self, source: Definition) -> None:
        self.sources.append(source)
        if self.reads or self.foreign:
            source.read_elsewhere()


@dataclass(eq=False)
class Value:
    """node: the expression; frame: whose names it uses; place: the statement that computes it."""

    node: cst.BaseExpression
    frame: Frame
    place: Place

    def parts(self) -> tuple[Value, ...]:
        return ()


@dataclass(eq=False)
class Read(Value):
    definition: Definition


@dataclass(eq=False)
class Global(Value):
    """A name that the function does not bind: `torch`, a function of the module."""

    name: str


@dataclass(eq=False)
class Scalar(Value):
    number: float


@dataclass(eq=False)
class Attribute(Value):
    base: Value
    name: str

    def parts(self):
        return (self.base,)


@dataclass(eq=False)
class View(Value):
    """A pure function of `base`: subscripts, unsqueeze, reshape, chunk."""

    base: Value
    others: tuple[Value, ...] = ()
    method: str = "[]"

    def parts(self):
        return (self.base, *self.others)


@dataclass(eq=False)
class Item(Value):
    """One of several results: `shift, scale = <source>`. It has no expression of its own."""

    source: Value
    index: int | None  # None: behind a starred name

    def parts(self):
        return (self.source,)


@dataclass(eq=False)
class DType:
    """kind "like": the dtype of `value`. "name": torch's `text`. "expression": what `value` evaluates to."""

    kind: str
    value: Value | None = None
    text: str = ""


@dataclass(eq=False)
class Cast(Value):
    base: Value
    dtype: DType

    def parts(self):
        return (self.base,) if self.dtype.value is None else (self.base, self.dtype.value)


@dataclass(eq=False)
class OnePlus(Value):
    base: Value

    def parts(self):
        return (self.base,)


@dataclass(eq=False)
class Sum(Value):
    left: Value
    right: Value
    in_place: bool = False

    def parts(self):
        return (self.left, self.right)


@dataclass(eq=False)
class Product(Value):
    left: Value
    right: Value

    def parts(self):
        return (self.left, self.right)


@dataclass(eq=False)
class Normed(Value):
    """norm(x); for F.layer_norm `norm` is None and `node` is the call."""

    norm: Value | None
    x: Value
    others: tuple[Value, ...] = ()
    rms: bool = False

    def parts(self):
        return (self.x, *self.others) if self.norm is None else (self.norm, self.x)


@dataclass(frozen=True)
class Held:
    """A function found through a name, or through an object: another may stand there at run time.

    holder: the free function itself, or the object whose method or forward it is.
    module, name: of the function that was read, "" for the module that is rewritten.
    """

    holder: Value
    module: str
    name: str


@dataclass(eq=False)
class Inlined(Value):
    """The result of a helper, seen through: `result` lives in the helper's frame, `node` is the call.

    held: for a method or a module's forward, the Held that says which function was read.
    """

    result: Value
    arguments: tuple[Value, ...] = ()
    held: Held | None = None

    def parts(self):
        return (self.result, *self.arguments)


@dataclass(eq=False)
class Opaque(Value):
    """pure: evaluating it has no effect. called: it calls something that the matcher does not know."""

    inner: tuple[Value, ...] = ()
    pure: bool = True
    called: bool = False

    def parts(self):
        return self.inner


def canonical(definition: Definition) -> Definition:
    """`b` for `a = b`."""
    while isinstance(definition.value, Read):
        definition = definition.value.definition
    return definition


def meaning(value: Value) -> Value:
    """The value without the names and helpers that it passed through."""
    while True:
        if isinstance(value, Inlined):
            value = value.result
        elif isinstance(value, Read) and value.definition.value is not None:
            value = value.definition.value
        else:
            return value


def is_receiver(value: Value) -> bool:
    """Whether it is the method's `self`, also seen from a function nested in the method."""
    name = value.frame.function.receiver
    if isinstance(value, Global):
        return value.name == name
    return isinstance(value, Read) and value.definition.parameter and value.definition.name == name


def same(one: Value, other: Value) -> bool:
    """Provably equal: the same definition, or the same pure function of equal values."""
    one, other = meaning(one), meaning(other)
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Read):
        return canonical(one.definition) is canonical(other.definition)
    if isinstance(one, Attribute):
        return one.name == other.name and same(one.base, other.base)
    if isinstance(one, Global):
        return one.name == other.name
    if isinstance(one, Scalar):
        return one.number == other.number
    return False


def walk(value: Value, seen: set[int] | None = None) -> Iterator[Value]:
    """The value and all that it depends on, through names."""
    seen = set() if seen is None else seen
    stack = [value]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        stack.extend(value.parts())
        if isinstance(value, Read):
            definition = value.definition
            stack.extend([] if definition.value is None else [definition.value])
            for source in definition.sources:
                stack.extend([] if source.value is None else [source.value])


def within(value: Value) -> Iterator[Value]:
    """The value and what its own expression computes, not what names stand for."""
    stack = [value]
    while stack:
        value = stack.pop()
        yield value
        stack.extend(value.parts())


def has_effects(value: Value) -> bool:
    """Whether the value's own expression calls something whose effects are unknown."""
    return any(isinstance(part, Opaque) and not part.pure for part in within(value))


def depends_on(value: Value, other: Value) -> bool:
    """Whether `value` is computed from the tensor `other`."""
    return any(same(part, other) for part in walk(value))
