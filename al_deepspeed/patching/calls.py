"""The call that a candidate becomes, and with `observe` beside it the expression that it replaces."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from al_deepspeed.patching.candidates import RUNTIME, Candidate
from al_deepspeed.patching.flow import Frame
from al_deepspeed.patching.nodes import descend
from al_deepspeed.patching.patterns import Operand
from al_deepspeed.patching.rendering import Renderer, Unavailable, bare, parenthesized
from al_deepspeed.patching.values import (
    SAME_VALUES,
    Attribute,
    Cast,
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
    canonical,
    is_receiver,
    meaning,
    same,
    walk,
)

LONG = 72  # of a call; behind its names and indentation it still fits a line
ARGUMENT = "_al_argument_"  # of an original, until all that its text reads is known
COMPACT = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


def operands(candidate: Candidate) -> list[tuple[str, Operand | None]]:
    """Names and values of the op's tensors, in the order of its signature."""
    found: list[tuple[str, Operand | None]] = []
    modulated, residual = candidate.modulated, candidate.residual
    if residual is not None:
        gate = None if residual.gate is None else Operand(residual.gate)
        found += [
            ("residual", Operand(residual.residual)),
            ("branch", Operand(residual.branch)),
            ("gate", gate),
        ]
    else:
        found += [("x", Operand(modulated.x))]
    if modulated is not None:
        found += [("shift", modulated.shift), ("scale", modulated.scale)]
        found = [(name, _without_expand(operand, candidate)) for name, operand in found]
    while found[-1][1] is None:
        found.pop()
    return found


def _without_expand(operand: Operand | None, candidate: Candidate) -> Operand | None:
    """`scale.expand_as(x)` says no more than broadcasting does."""
    if operand is None or operand.inside is not None:
        return operand
    value = meaning(operand.value)
    x = candidate.modulated.x
    if getattr(value, "method", "") == "expand_as" and len(value.others) == 1 and same(value.others[0], x):
        return Operand(value.base)
    return operand


def build_call(candidate: Candidate, renderer: Renderer, site: str | None) -> cst.Call:
    """The call; `site` is given when the original is to stand beside it."""
    arguments: list[cst.Arg] = []
    if candidate.modulated is not None:
        arguments.append(cst.Arg(bare(_norm(candidate, renderer))))
    given = operands(candidate)
    renderer.start(*_computed(candidate))
    in_order = _in_source_order(given, renderer.frame)
    for name, operand in in_order:
        node = bare(renderer.operand(operand))
        keyword = None if in_order == given else cst.Name(name)
        arguments.append(cst.Arg(node, keyword=keyword, equal=COMPACT) if keyword else cst.Arg(node))
    for name, dtype in dtypes(candidate):
        arguments.append(cst.Arg(_dtype(dtype, candidate, renderer), keyword=cst.Name(name), equal=COMPACT))
    helpers = candidate.helpers
    if helpers:
        arguments.append(cst.Arg(_helpers(helpers, renderer), keyword=cst.Name("helpers"), equal=COMPACT))
        otherwise = cst.parse_expression(Original(candidate, renderer, helpers=True).text())
        arguments.append(cst.Arg(otherwise, keyword=cst.Name("otherwise"), equal=COMPACT))
    if site is not None:
        arguments.append(cst.Arg(cst.SimpleString(repr(site)), keyword=cst.Name("site"), equal=COMPACT))
        original = cst.parse_expression(Original(candidate, renderer).text())
        arguments.append(cst.Arg(original, keyword=cst.Name("original"), equal=COMPACT))
    call = cst.Call(cst.Attribute(cst.Name(RUNTIME), cst.Name(candidate.kind)), arguments)
    return call if site is not None else _wrapped(call)


def _wrapped(call: cst.Call) -> cst.Call:
    """The arguments on a line of their own where one line would be long, or on one each."""
    text = cst.Module([]).code_for_node(call)
    if len(text) <= LONG or "\n" in text:
        return call
    inner, last = (
        cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(space))
        for space in ("    ", "")
    )
    if len(text) <= LONG + 36:
        *others, final = call.args
        arguments = [*others, final.with_changes(whitespace_after_arg=last)]
    else:
        arguments = [argument.with_changes(comma=cst.Comma(whitespace_after=inner)) for argument in call.args]
        arguments[-1] = arguments[-1].with_changes(comma=cst.Comma(whitespace_after=last))
    return call.with_changes(whitespace_before_args=inner, args=arguments)


def _in_source_order(given: list, frame: Frame) -> list:
    """As in the signature, unless that would move an operand over one that has effects."""
    order = {id(value): index for index, value in enumerate(frame.values.values())}
    written = {name: list(_written(operand.value)) for name, operand in given if operand is not None}
    effects = {name for name, parts in written.items() if any(map(_has_effect, parts))}
    moved = {name for name, parts in written.items() if name in effects or not all(map(_only_names, parts))}

    def position(pair: tuple) -> int:
        return max((order.get(id(part), 0) for part in written[pair[0]]), default=0)

    by_source = sorted((pair for pair in given if pair[0] in moved), key=position)
    if not effects or by_source == [pair for pair in given if pair[0] in moved]:
        return given
    return [pair for pair in given if pair[0] in written.keys() - moved] + by_source


def _written(value: Value) -> Iterator[Value]:
    """The value's own expression and those inside, the arguments of helpers that were seen through too."""
    stack = [value]
    while stack:
        value = stack.pop()
        yield value
        argument = value.definition.value if isinstance(value, Read) and value.frame.caller else None
        stack.extend(value.parts() if argument is None else [argument])


def _has_effect(part: Value) -> bool:
    return isinstance(part, Opaque) and not part.pure


def _only_names(part: Value) -> bool:
    """Whether it stands for the same memory whenever it is read: a local name, its attribute, or a view."""
    if isinstance(part, View):
        return part.method in SAME_VALUES
    if isinstance(part, Attribute):
        return not is_receiver(part.base)
    return isinstance(part, Read | Scalar | Item) or getattr(part, "name", "") == "None"


def dtypes(candidate: Candidate) -> list[tuple[str, DType]]:
    found = []
    if candidate.residual is not None and candidate.residual.dtype is not None:
        found.append(("residual_dtype", candidate.residual.dtype))
    modulated = candidate.modulated
    if modulated is not None:
        for name in ("out_dtype", "norm_dtype", "in_dtype"):  # each makes the following ones irrelevant
            dtype = getattr(modulated, name)
            if dtype is not None:
                found.append((name, dtype))
                break
    return found


def reads_new_residual(value: Value, candidate: Candidate) -> bool:
    return (
        candidate.sum_definition is not None
        and isinstance(value, Read)
        and canonical(value.definition) is candidate.sum_definition
    )


def _dtype(dtype: DType, candidate: Candidate, renderer: Renderer) -> cst.BaseExpression:
    if dtype.kind == "name":
        return cst.SimpleString(f'"{dtype.text}"')
    if dtype.kind == "expression":
        return renderer.value(dtype.value)
    if reads_new_residual(dtype.value, candidate):
        return cst.SimpleString('"residual"')
    core = meaning(dtype.value)
    if candidate.modulated is not None:
        if core is candidate.modulated.norm:
            return cst.SimpleString('"normed"')
        if isinstance(core, Cast) and any(part is candidate.modulated.norm for part in walk(core)):
            return _dtype(core.dtype, candidate, renderer)
    return cst.Attribute(renderer.value(dtype.value), cst.Name("dtype"))


def _norm(candidate: Candidate, renderer: Renderer) -> cst.BaseExpression:
    normed = candidate.modulated.norm
    if normed.norm is not None:
        built = renderer.value(normed.norm)
        if any(isinstance(part, cst.IfExp) for part in descend(built)):
            _may_choose(meaning(normed.norm), renderer)
        return built
    call = normed.node  # F.layer_norm(x, shape, weight, bias, eps)
    arguments = [a.with_changes(value=renderer.value(normed.frame.values[a.value])) for a in call.args[1:]]
    return cst.Call(cst.Attribute(cst.Name(RUNTIME), cst.Name("LayerNormCall")), arguments)


def _may_choose(choice: Value, renderer: Renderer) -> None:
    """A norm is the first that a call evaluates: what it is chosen by may not change before, nor move.

    Raises:
        Unavailable: the choice is made in another statement, or after something with effects in its own.
    """
    frame, place = renderer.frame, renderer.place
    before = frame.effects[: frame.marks[choice.node]]
    if choice.place != place or any(stack[-1] == place for stack, _, _ in before):
        raise Unavailable("the norm is chosen by a condition, which would move over other calls")


def _computed(candidate: Candidate) -> list[Value]:
    """What the op computes, which no operand or dtype may compute once more."""
    found = [] if candidate.residual is None else [candidate.residual.sum]
    return found if candidate.modulated is None else [*found, candidate.modulated.norm]


def _helpers(helpers: list[Held], renderer: Renderer) -> cst.Tuple:
    """(object, module, "Class.method") of each, for the runtime to see that it is what was read."""
    found = []
    for helper in helpers:
        parts = (
            renderer.value(helper.holder),
            cst.parse_expression(_module_name(helper.module, renderer.frame.module.is_package)),
            cst.SimpleString(f'"{helper.name}"'),
        )
        found.append(cst.Element(cst.Tuple([cst.Element(part) for part in parts])))
    comma = cst.Comma(cst.SimpleWhitespace(""), cst.SimpleWhitespace("" if len(found) == 1 else " "))
    return cst.Tuple([found[0].with_changes(comma=comma), *found[1:]])


def _module_name(module: str, in_package: bool) -> str:
    """An expression for the name that a module has at run time, written as this one imports it."""
    name = module.lstrip(".")
    levels = len(module) - len(name) - in_package  # up from this module's own name
    name = name.removesuffix("__init__").removesuffix(".")
    if not module.startswith("."):
        return f'"{name}"' if name else "__name__"
    around = f'__name__.rsplit(".", {levels})[0]' if levels else "__name__"
    return f'{around} + ".{name}"' if name else around


class Original:
    """The replaced expression as a function of the op's operands, written from the values it was read as.

    helpers: methods and modules that it was found through are called, as they were.
    """

    def __init__(self, candidate: Candidate, renderer: Renderer, helpers: bool = False) -> None:
        self.candidate, self.renderer, self.helpers = candidate, renderer, helpers
        self.names = [(ARGUMENT + name, operand) for name, operand in operands(candidate)]
        renderer.start()

    def text(self) -> str:
        norm = [f"{ARGUMENT}norm"] if self.candidate.modulated is not None else []
        names = [*norm, *(name for name, _ in self.names)]
        text = f"lambda {', '.join(names)}: {self._body()}"
        others = set(re.findall(r"\w+", text))  # an argument may not hide a variable that the text reads
        for name in (*names, f"{ARGUMENT}x"):
            short = name.removeprefix(ARGUMENT)
            text = re.sub(rf"\b{name}\b", f"{short}_" if short in others else short, text)
        return text

    def _body(self) -> str:
        candidate = self.candidate
        if candidate.residual is None or candidate.modulated is None:
            return self._of(candidate.value)
        definition = candidate.sum_definition
        source = candidate.modulated.x if definition is None else definition.value
        total = self._of(source)
        self.names.append((f"{ARGUMENT}x", Operand(candidate.modulated.x)))
        return f"{RUNTIME}.then({total}, lambda {ARGUMENT}x: {self._of(candidate.value)})"

    def _of(self, value: Value) -> str:
        for name, operand in reversed(self.names):
            if operand is not None and self._is_operand(value, operand):
                return name if operand.inside is None else f"(1 + {name})"
        if isinstance(value, Inlined):
            return self._helper(value) if self.helpers and value.held else self._of(value.result)
        if isinstance(value, Read) and value.definition.value is not None and self._absorbed(value):
            return self._of(value.definition.value)
        if isinstance(value, Sum):
            return f"({self._of(value.left)} + {self._of(value.right)})"
        if isinstance(value, Product):
            return f"({self._of(value.left)} * {self._of(value.right)})"
        if isinstance(value, OnePlus):
            return f"(1 + {self._of(value.base)})"
        if isinstance(value, Normed):
            return f"{ARGUMENT}norm({self._of(value.x)})"
        if isinstance(value, Cast):
            return f"{RUNTIME}.cast({self._of(value.base)}, {self._dtype(value.dtype)})"
        return self._code(self.renderer.value(value))

    def _helper(self, value: Inlined) -> str:
        """The call of a method or module, with arguments that are made of the operands."""
        node, values = value.node, value.frame.values
        holder = self._code(parenthesized(self.renderer.value(value.held.holder)))
        if values[node.func] is not value.held.holder:
            holder = f"{holder}.{node.func.attr.value}"
        given = []
        for argument in node.args:
            keyword = "" if argument.keyword is None else f"{argument.keyword.value}="
            given.append(f"{keyword}{self._of(values[argument.value])}")
        return f"{holder}({', '.join(given)})"

    def _is_operand(self, value: Value, operand: Operand) -> bool:
        return (
            value is operand.value or meaning(value) is meaning(operand.value) or same(value, operand.value)
        )

    def _absorbed(self, value: Read) -> bool:
        return value.frame.caller is not None or any(
            definition is value.definition for definition, _ in self.candidate.absorbed
        )

    def _dtype(self, dtype: DType) -> str:
        if dtype.kind == "name":
            return f'"{dtype.text}"'
        if dtype.kind == "expression":
            return self._code(self.renderer.value(dtype.value))
        return f"{self._of(dtype.value)}.dtype"

    def _code(self, node: cst.BaseExpression) -> str:
        return cst.Module([]).code_for_node(node)
