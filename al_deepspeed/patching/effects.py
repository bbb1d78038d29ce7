"""What a call may change besides its result: nothing, what it is given, or whatever it can see."""

from __future__ import annotations

import libcst as cst

from al_deepspeed.patching.flow import Frame
from al_deepspeed.patching.values import Attribute, Global, Read, Value, is_receiver

GRADIENTS = frozenset(["register_hook", "retain_grad", "torch.autograd.grad", "torch.autograd.backward"])
MODES = frozenset(["__enter__", "__exit__", "enter_context", "close", "seed", "manual_seed"])
RANDOM = frozenset(
    ["rand", "randn", "rand_like", "randn_like", "randint", "normal", "bernoulli", "dropout", "multinomial"]
)


def is_harmless(frame: Frame, node: cst.Call) -> bool:
    """torch functions, methods named like pure ones, and a few builtins change nothing."""
    if changes_in_place(frame, node) or changes_mode(frame, node):
        return False
    name = frame.module.stands_for(node.func)
    if name is None:
        return False
    last = name.rpartition(".")[2]
    if name.startswith("torch.") and not last.endswith("_") and last not in RANDOM and name not in GRADIENTS:
        return True
    return name in {"len", "int", "float", "bool", "isinstance", "getattr", "hasattr", "range", "tuple"}


def effect(evaluator, frame: Frame, node: cst.Call, callee: Value, given: tuple[Value, ...]) -> str:
    """What an unknown call may change: what it is told to, what it is given, or what else it sees."""
    if changes_in_place(frame, node):
        return "in place"
    if changes_mode(frame, node):
        return "mode"
    if {getattr(callee, "name", ""), frame.module.stands_for(node.func)} & GRADIENTS:
        return "gradient"
    if isinstance(callee, Read) and callee.definition.value is None and not callee.definition.parameter:
        return "closure"
    if isinstance(callee, Global) and callee.name == "setattr":
        frame.stored_attributes.add("")
    if any(map(is_receiver, given)):
        return "method"
    owner = evaluator.class_of(callee.base) if isinstance(callee, Attribute) else None
    if owner is None:
        return "call"
    holds_module = is_receiver(callee.base) and evaluator.norms.assigned(owner, callee.name)
    return "call" if holds_module else "method"


def changes_mode(frame: Frame, node: cst.Call) -> bool:
    """`torch.set_grad_enabled(...)` and its like, and a context entered or left by hand."""
    name = frame.module.stands_for(node.func) or ""
    last = name.rpartition(".")[2]
    return last in MODES or (name.startswith("torch.") and last.lstrip("_").startswith("set_"))


def changes_in_place(frame: Frame, node: cst.Call) -> bool:
    """`out=`, or `inplace=` unless it is False; of F's functions also a True without its keyword."""
    keywords = {a.keyword.value: a.value for a in node.args if a.keyword is not None}
    given = keywords.get("inplace")
    if "out" in keywords or (given is not None and getattr(given, "value", "") != "False"):
        return True
    if not (frame.module.stands_for(node.func) or "").startswith("torch.nn.functional."):
        return False
    return any(getattr(a.value, "value", "") == "True" for a in node.args[1:] if a.keyword is None)
