"""Helpers seen through: `modulate(x, shift, scale)` means what its body computes from the arguments.

Only a straight line of assignments that ends in one `return`, made of arithmetic, casts and views. A helper
that calls a module or a norm is a place of its own: its sites are found there, once. One that is not read
and modulates a norm's output is reported at its call.
"""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from al_deepspeed.patching.flow import Frame
from al_deepspeed.patching.names import Function
from al_deepspeed.patching.nodes import dotted_name
from al_deepspeed.patching.patterns import may_be, may_be_normed, scaled
from al_deepspeed.patching.values import (
    Held,
    Inlined,
    Normed,
    Opaque,
    Read,
    Value,
    has_effects,
    walk,
    within,
)

TRANSPARENT = frozenset(
    {"staticmethod", "jit_fuser", "script", "compile"}
)  # decorators that change no result


def see_through(
    evaluator,
    caller: Frame,
    node: cst.Call,
    function: Function,
    receiver: Value | None,
    arguments,
    held: Held | None = None,
) -> Inlined | None:
    """What the call computes, or None when the helper is not that simple."""
    returned = _straight_line(function.node)
    if returned is None or function.node.asynchronous is not None or function.decorators - TRANSPARENT:
        return None
    bound = _bind(function.node.params, receiver, arguments)
    if bound is None:
        return None
    frame = Frame(function, evaluator, caller)
    frame.blocks = caller.blocks
    frame.stack = list(caller.stack)
    for name, value in bound.items():
        if isinstance(value, Value):
            frame.bind(name, value)
        elif _is_literal(value):
            frame.bind(name, evaluator.evaluate(frame, value))
        else:  # a default computed where the helper was defined
            frame.bind(name, None)
    for statement in _statements(function.node):
        for small in statement.body:
            frame._simple(small, None)
    result = frame.values.get(returned.value)
    if result is None or frame.effects or not _is_arithmetic(frame):
        return None
    given = tuple(value for _, value in arguments)
    needed = set(map(id, walk(result)))
    if any(has_effects(value) and id(value) not in needed for value in given):
        return None  # the call would be lost with the argument
    return Inlined(node, caller, caller.place, result, given, held)


def _is_literal(default: cst.BaseExpression) -> bool:
    if isinstance(default, cst.Name):
        return default.value in ("None", "True", "False")
    return isinstance(default, cst.Integer | cst.Float | cst.SimpleString)


def _is_arithmetic(frame: Frame) -> bool:
    return not any(
        isinstance(part, Normed) or (isinstance(part, Opaque) and not part.pure)
        for value in frame.values.values()
        for part in within(value)
        if part.frame is frame
    )


def _statements(node: cst.FunctionDef) -> list:
    body = node.body.body
    first = body[0] if body else None
    if isinstance(first, cst.SimpleStatementLine) and isinstance(first.body[0], cst.Expr):
        body = body[1:]  # the docstring
    return list(body)


def _straight_line(node: cst.FunctionDef) -> cst.Return | None:
    """The last statement, when it is the only way out."""
    if not isinstance(node.body, cst.IndentedBlock):
        return None
    statements = _statements(node)
    if not statements or len(statements) > 12:
        return None
    for statement in statements:
        if not isinstance(statement, cst.SimpleStatementLine):
            return None
        allowed = cst.Return if statement is statements[-1] else cst.Assign | cst.AnnAssign
        if len(statement.body) != 1 or not isinstance(statement.body[0], allowed):
            return None
        for target in getattr(statement.body[0], "targets", ()):
            if not isinstance(target.target, cst.Name | cst.Tuple):
                return None
    last = statements[-1].body[0]
    return last if last.value is not None else None


def _bind(parameters: cst.Parameters, receiver: Value | None, arguments) -> dict | None:
    """Values or default expressions by parameter name; None when the call does not fit."""
    if isinstance(parameters.star_arg, cst.Param) or parameters.star_kwarg is not None:
        return None
    order = [*parameters.posonly_params, *parameters.params]
    everything = [*order, *parameters.kwonly_params]
    bound: dict = {}
    waiting = list(order)
    if receiver is not None:
        if not waiting:
            return None
        bound[waiting.pop(0).name.value] = receiver
    for name, value in arguments:
        if name in ("*", "**"):
            return None
        if name:
            if name not in {p.name.value for p in everything} or name in bound:
                return None
            bound[name] = value
            waiting = [p for p in waiting if p.name.value != name]
        elif waiting:
            bound[waiting.pop(0).name.value] = value
        else:
            return None
    for parameter in everything:
        if parameter.name.value not in bound:
            if parameter.default is None:
                return None
            bound[parameter.name.value] = parameter.default
    return bound


# Helpers that stay calls ------------------------------------------------------------------------------------


def why_unread(value: Value | None) -> str | None:
    """Why a call that modulates a norm's output stays one; None for all else."""
    given = _given(value, may_be_normed)
    if not given:
        return None
    name = (dotted_name(value.node.func) or "").rpartition(".")[2]
    known = _called(value)
    if known is None:
        named = "modulat" in name.lower() and len(value.node.args) > 1
        return f"what the helper {name} does is not known" if named else None
    if not _modulates(value, given):
        return None
    if any(argument.star for argument in value.node.args):
        return f"the helper {name} is called with * arguments"
    if _straight_line(known[0].node) is None:
        return f"the helper {name} is more than assignments and a return"
    return f"the helper {name} does more than arithmetic, or another may run in its place"


def _given(value: Value | None, is_wanted: Callable[[Value], object]) -> list[cst.Arg]:
    """The wanted arguments of a call that was not understood."""
    if not (isinstance(value, Opaque) and value.called and isinstance(value.node, cst.Call)):
        return []
    return [one for one in value.node.args if is_wanted(value.frame.values[one.value])]


def _called(value: Opaque) -> tuple[Function, Value | None, Value | None] | None:
    frame, call = value.frame, value.node
    return frame.evaluator.called_function(frame, call, frame.values[call.func])


def _modulates(value: Opaque, given: list[cst.Arg]) -> bool:
    """Whether the function called multiplies one of these arguments by 1 + something."""
    known = _called(value)
    if known is None:
        return False
    function, receiver, _ = known
    names = set().union(*(_taken_by(function, receiver, value.node, argument) for argument in given))
    return bool(names & _scaled_parameters(value.frame.evaluator, function))


def _taken_by(function: Function, receiver: Value | None, call: cst.Call, argument: cst.Arg) -> set[str]:
    """The parameters that may get an argument."""
    if argument.keyword is not None:
        return {argument.keyword.value}
    parameters = function.node.params
    names = [one.name.value for one in (*parameters.posonly_params, *parameters.params)]
    names = names[receiver is not None :]
    position = call.args.index(argument)
    known = not any(one.star for one in call.args[: position + 1])
    return set(names[position : position + 1] if known else names)


def _scaled_parameters(evaluator, function: Function) -> set[str]:
    """Those that the function, or one that it calls, multiplies by 1 + something."""
    if function.node in evaluator.scaled:
        return evaluator.scaled[function.node]
    names = evaluator.scaled[function.node] = set()  # for a function that calls itself
    frame = Frame(function, evaluator)
    frame.run()
    for value in {id(part): part for one in frame.values.values() for part in within(one)}.values():
        for one in scaled(value):
            names |= _parameters(one)
        for argument in _given(value, _parameters):
            if _modulates(value, [argument]):
                names |= _parameters(value.frame.values[argument.value])
    return names


def _parameters(value: Value) -> set[str]:
    """The function's parameters that a value may be."""
    return {
        one.definition.name
        for one in may_be(value)
        if isinstance(one, Read) and one.definition.parameter and one.frame.caller is None
    }
