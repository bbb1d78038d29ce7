"""Writes a value as an expression at a given statement, or says why it cannot be written there.

A name stands for a value only while it is bound to it. Elsewhere the expression that made the value is
written out again, as long as it is cheap and has no effects; its own names are looked up in the same way.
"""

from __future__ import annotations

import libcst as cst

from al_deepspeed.patching.flow import Frame
from al_deepspeed.patching.patterns import Operand
from al_deepspeed.patching.values import (
    Attribute,
    Definition,
    Global,
    Inlined,
    Item,
    Normed,
    Place,
    Read,
    Sum,
    Value,
    View,
    canonical,
    has_effects,
    within,
)

ATOMS = (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.Integer, cst.Float, cst.List, cst.Dict)


class Unavailable(Exception):
    """The value cannot be written at that place. `value`: the part with effects that is in the way."""

    def __init__(self, reason: str, value: Value | None = None) -> None:
        super().__init__(reason)
        self.value = value


class Renderer:
    """place: the statement where the expression goes. within_root: the expression that it replaces.

    removed: definitions whose statements go, with the value that their names hold instead (None: nothing).
    replacements: expressions that are replaced themselves, by what builds the new one.
    """

    def __init__(self, frame: Frame, place: Place, roots: tuple, removed: dict, replacements: dict) -> None:
        self.frame, self.place, self.roots = frame, place, roots
        self.removed, self.replacements = removed, replacements
        self.once: dict[int, Value] = {}  # values written so far whose expressions call something

    def start(self, *computed: Value) -> None:
        """For a new expression, of which the op computes `computed` itself."""
        self.once = {id(value): value for value in computed}

    def operand(self, operand: Operand | None) -> cst.BaseExpression:
        if operand is None:
            return cst.Name("None")
        if operand.inside is None:
            return self.value(operand.value)
        return self._without_one(operand.value, operand.inside)

    def _without_one(self, value: Value, inside: Value) -> cst.BaseExpression:
        """The views and casts of a `1 + scale`, through the names in between, made of the scale instead."""
        if value is inside:
            return self.value(inside.base)
        if isinstance(value, Read):
            return self._without_one(value.definition.value, inside)
        if isinstance(value, Inlined):
            return self._without_one(value.result, inside)
        return self._rewritten(value, {value.base: lambda: self._without_one(value.base, inside)})

    def value(self, value: Value) -> cst.BaseExpression:
        if isinstance(value, Read):
            return self._read(value)
        if isinstance(value, Item):
            if value.frame.caller is not None and value.index is not None and isinstance(value.source, View):
                source = parenthesized(self.value(value.source))  # a helper's own names are none here
                index = cst.SubscriptElement(cst.Index(cst.Integer(str(value.index))))
                return cst.Subscript(source, [index])
            raise Unavailable(
                f"{self.code(value)} is not bound to its value any more where the call would be"
            )
        return self._rewritten(value, {})

    def code(self, value: Value) -> str:
        return cst.Module([]).code_for_node(value.node)

    def _read(self, value: Read) -> cst.BaseExpression:
        bound = self._bound_name(value.definition)
        if bound is not None:
            return cst.Name(bound)
        made = value.definition.value
        if made is None or (isinstance(made, Item) and made.frame.caller is None):
            raise Unavailable(f"{value.definition.name} has changed before the place of the call", value)
        if value.definition not in self.removed and any(
            what == "in place" for _, what, _ in self.frame.effects
        ):
            raise Unavailable(f"{value.definition.name} has changed, and a tensor is changed in place", value)
        return self.value(made)

    def _bound_name(self, definition: Definition) -> str | None:
        names = self.frame.snapshots[self.place]
        for name in (definition.name, *names):
            current = names.get(name)
            while current is not None and current in self.removed and self.removed[current] is None:
                current = current.previous
            if current is None:
                continue
            held = self.removed.get(current)
            if held is not None:
                if isinstance(held, Read) and canonical(held.definition) is canonical(definition):
                    return name
                if held is canonical(definition).value:
                    return name
            elif canonical(current) is canonical(definition):
                return name
        return None

    def _rewritten(self, value: Value, inside: dict) -> cst.BaseExpression:
        for current, held in self.removed.items():
            if held is value and self._bound_name_of_held(current):
                return cst.Name(current.name)
        self._check(value)
        renderer = self

        class Substitute(cst.CSTTransformer):
            def on_visit(self, node):
                return renderer._substitution(value.frame, node, inside) is None

            def on_leave(self, original, updated):
                build = renderer._substitution(value.frame, original, inside)
                if build is None:
                    return updated
                return parenthesized(build())

        built = value.node.visit(Substitute())
        return built

    def _bound_name_of_held(self, definition: Definition) -> bool:
        names = self.frame.snapshots[self.place]
        current = names.get(definition.name)
        while current is not None and current in self.removed and self.removed[current] is None:
            current = current.previous
        return current is definition

    def _substitution(self, frame: Frame, node, inside: dict):
        """How a node inside an expression is built anew; None where it stays."""
        if not isinstance(node, cst.BaseExpression):
            return None
        value = frame.values.get(node)
        if value is None:
            return None
        if value in inside:
            return inside[value]
        if node in self.replacements:
            return self.replacements[node]
        if isinstance(value, Read):
            return lambda: self._read(value)
        return None

    def _check(self, value: Value) -> None:
        """Whether the value's expression means the same at this place.

        Raises:
            Unavailable: it has effects and would move, or reads what may differ here.
        """
        moved = value.place != self.place
        if self.frame.around(value.place) != self.frame.around(self.place):
            raise Unavailable(f"{self.code(value)} is computed under another `with`", value)
        if (moved or value.frame is not self.frame) and has_effects(value):
            reason = f"{self.code(value)} is computed by an earlier statement, and more happens between"
            raise Unavailable(reason, value)
        calls = [part for part in within(value) if isinstance(part, Normed | Sum) or has_effects(part)]
        if any(id(part) in self.once for part in calls):
            raise Unavailable(f"{self.code(value)} would be computed twice")
        self.once |= {id(part): part for part in calls if not isinstance(part, Sum)}
        for part in within(value):
            if isinstance(part, Attribute) and moved and part.name in self.frame.stored_attributes:
                raise Unavailable(f"the attribute {part.name} is assigned in this function")
            if isinstance(part, Global) and not self._is_shared(part):
                raise Unavailable(f"the helper uses {part.name} of its own module")
            if isinstance(part, Global) and self._is_hidden(part):
                raise Unavailable(f"the helper uses the module's {part.name}, not this function's")

    def _is_hidden(self, name: Global) -> bool:
        """Whether a helper's global name is one of the function's own here."""
        own = name.frame is not self.frame and self.frame.definitions
        return any(definition.name == name.name for definition in own or ())

    def _is_shared(self, name: Global) -> bool:
        """Whether a helper's global name means the same in the module that is rewritten."""
        if name.frame.module is self.frame.module or name.name in ("None", "True", "False"):
            return True
        here = self.frame.module.imports.get(name.name)
        return here is not None and here == name.frame.module.imports.get(name.name)


def parenthesized(node: cst.BaseExpression) -> cst.BaseExpression:
    if isinstance(node, ATOMS) or node.lpar:
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def bare(node: cst.BaseExpression) -> cst.BaseExpression:
    """Without its outer parentheses, for a place between commas."""
    if getattr(node, "lpar", None) and not isinstance(
        node, cst.Tuple | cst.GeneratorExp | cst.NamedExpr | cst.Yield
    ):
        text = cst.Module([]).code_for_node(node)
        if "\n" not in text:
            return node.with_changes(lpar=[], rpar=[])
    return node
