"""Whether a function's argument is a norm: what its callers in the module pass decides, else its name."""

from __future__ import annotations

import libcst as cst

from al_deepspeed.patching.names import Function
from al_deepspeed.patching.nodes import descend
from al_deepspeed.patching.norms import is_role


def argument_is_norm(evaluator, function: Function, name: str) -> bool:
    passed = _passed(function, name)
    known = [answer for caller, node in passed if (answer := _answer(evaluator, caller, node)) is not None]
    if known:
        return all(known)
    return is_role(name)


def _answer(evaluator, caller: Function, node: cst.BaseExpression) -> bool | None:
    """Whether the expression in the caller's body is a norm; None when nothing is known about it."""
    if not (
        isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and caller.owner is not None
    ):
        return None
    parameters = caller.node.params.params
    if not parameters or parameters[0].name.value != node.value.value:
        return None
    return evaluator.norms.attribute_is_norm(caller.owner, node.attr.value)


def _passed(function: Function, name: str) -> list[tuple[Function, cst.BaseExpression]]:
    """The expressions given for the argument in calls `name(...)` and `anything.name(...)` of the module."""
    names = [p.name.value for p in function.node.params.params]
    if name not in names:
        return []
    position = names.index(name) - (function.owner is not None)
    called = function.node.name.value
    module = function.module
    callers = [*module.functions(), *(m for c in module.classes() for m in c.methods.values())]
    found = []
    for caller in callers:
        for call in _calls(caller.node, called):
            keywords = {a.keyword.value: a.value for a in call.args if a.keyword is not None}
            plain = [a.value for a in call.args if a.keyword is None and not a.star]
            if name in keywords:
                found.append((caller, keywords[name]))
            elif 0 <= position < len(plain):
                found.append((caller, plain[position]))
    return found


def _calls(node: cst.CSTNode, name: str) -> list[cst.Call]:
    found = []
    for call in descend(node):
        if isinstance(call, cst.Call):
            last = call.func.attr if isinstance(call.func, cst.Attribute) else call.func
            if isinstance(last, cst.Name) and last.value == name:
                found.append(call)
    return found
