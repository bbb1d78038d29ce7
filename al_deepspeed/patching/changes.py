"""Whether something that happens between the steps of a candidate could change what they read.

`n = self.norm(x)`, a call, then `n * (1 + scale) + shift`: the op reads x, scale and shift after the call. So
a change in place in between is always in the way, and a call is when it may see one of the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from al_deepspeed.patching.candidates import Candidate
from al_deepspeed.patching.flow import Frame
from al_deepspeed.patching.patterns import origin
from al_deepspeed.patching.values import (
    Attribute,
    Cast,
    Global,
    Normed,
    OnePlus,
    Opaque,
    Product,
    Read,
    Sum,
    Value,
    View,
    is_receiver,
    meaning,
    same,
)

COMPUTED = (Normed, OnePlus, Sum, Product, Cast)
LOOPS = (cst.For, cst.While)
NEW = (cst.BinaryOperation, cst.UnaryOperation, cst.Comparison)  # tensors of their own
VIEWS = frozenset(["T", "mT", "H", "mH", "data", "real"])


def changed_between(frame: Frame, candidate: Candidate) -> str | None:
    """The reason in words, None where nothing can."""
    first, last = _span(frame, candidate)
    steps = _steps(candidate)
    own = {definition.place for definition, _ in candidate.absorbed} | {candidate.place}
    if candidate.sum_definition is not None:
        own.add(candidate.sum_definition.place)
    leaves = [leaf for step in steps for leaf in _leaves(step)]
    consumed = list(_consumed(frame, candidate))
    shared: dict[int, list[Value]] = {}

    def memory(leaf: Value) -> list[Value]:
        if id(leaf) not in shared:
            shared[id(leaf)] = [] if is_receiver(leaf) else _memory_of(leaf)
        return shared[id(leaf)]

    for number, (stack, what, values) in enumerate(frame.effects[first:last], first):
        if what == "in place":
            return "a tensor is changed in place between its steps"
        if what == "mode":
            return "a setting of torch may change between its steps"
        # A call in a statement of the candidate's own matters to what was computed before it alone.
        seen = [leaf for mark, leaf in consumed if mark <= number] if stack[-1] in own else leaves
        if not seen:
            continue
        if any(_is_variable_of_module(frame, leaf) for leaf in seen):
            return "a variable of the module may change between its steps"
        sees = what == "closure" or any(map(_is_function_here, values))
        if sees and any(_name(leaf) in frame.held_back for leaf in seen if not is_receiver(leaf)):
            return "a function that sees its tensors is called between its steps"
        if what == "method" and (frame.stored_attributes or any(map(_is_held, seen))):
            return "a method that may see its tensors is called between its steps"
        handed = [one for value in values for one in _memory_of(value)]
        if any(same(one, other) for one in handed for leaf in seen for other in memory(leaf)):
            return "one of its tensors is passed to a call between its steps"
    return _changed_later(frame, candidate, last)


def _span(frame: Frame, candidate: Candidate) -> tuple[int, int]:
    """The effects from its first step to its last; to the end where a loop comes back to the last alone."""
    last = frame.marks[candidate.root]
    marks = [frame.marks[node] for node in candidate.trail.nodes if node in frame.marks]
    loops = frame.around(candidate.place, LOOPS)
    definitions = [definition for definition, _ in candidate.absorbed]
    if any(frame.around(definition.place, LOOPS) != loops for definition in definitions):
        last = len(frame.effects)
    steps = [definition.value.node for definition in definitions if definition.value is not None]
    return min([last, *marks, *(frame.marks[node] for node in steps if node in frame.marks)]), last


def _steps(candidate: Candidate) -> list[Value]:
    steps = [definition.value for definition, _ in candidate.absorbed if definition.value is not None]
    if candidate.sum_definition is not None:
        steps.append(candidate.sum_definition.value)
    return [*steps, candidate.value]


def _leaves(value: Value) -> Iterator[Value]:
    """Names and attributes that the value's own expression reads, but no norm and no function."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, Read | Global):
            yield value
        elif isinstance(value, Attribute):
            yield value
            stack.append(value.base)
        elif isinstance(value, Normed) and value.norm is not None:
            stack.append(value.x)
        elif isinstance(value, Opaque) and isinstance(value.node, cst.Call):
            stack.extend(value.inner[1:])
        else:
            stack.extend(value.parts())


def _consumed(frame: Frame, candidate: Candidate) -> Iterator[tuple[int, Value]]:
    """(when, what) of the operands of each operation that the op takes over."""
    stack, seen = list(_steps(candidate)), set()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        inner = meaning(value)
        if isinstance(inner, COMPUTED) and inner.node in candidate.trail.nodes:
            when = frame.marks.get(inner.node, frame.marks.get(value.node, 0))
            parts = (inner.x,) if isinstance(inner, Normed) else inner.parts()
            yield from ((when, part) for part in parts)
            stack += parts


def _changed_later(frame: Frame, candidate: Candidate, last: int) -> str | None:
    """The op saves operands for its backward that the expression did not need any more."""
    kept = (
        [
            operand.value
            for operand in (candidate.modulated.shift, candidate.modulated.scale)
            if operand is not None
        ]
        if candidate.modulated is not None
        else []
    )
    if candidate.residual is not None:
        kept += [part for part in (candidate.residual.branch, candidate.residual.gate) if part is not None]
    own = None if candidate.sum_definition is None else candidate.sum_definition.value
    for _, what, values in frame.effects[last:]:
        if what == "gradient" and any(one is own for value in values for one in _memory_of(value)):
            return "a gradient of the residual sum is asked for, which misses the norm's part in the op"
        if what == "in place" and any(same(origin(v), origin(one)) for v in values for one in kept):
            return "a tensor that its backward needs is changed in place afterwards"
    return None


def _memory_of(value: Value) -> list[Value]:
    """What it may share memory with: of what it is a view, what a tuple holds, what a function was given.

    What a module or method returns is taken for a tensor of its own, but for a method's own object.
    """
    found: dict[int, Value] = {}
    stack = [value]
    while stack:
        inner = origin(stack.pop())
        if id(inner) in found:
            continue
        found[id(inner)] = inner
        if isinstance(inner, Attribute) and inner.name in VIEWS:
            stack.append(inner.base)
        if not isinstance(inner, Opaque) or isinstance(inner.node, NEW):
            continue
        if not isinstance(inner.node, cst.Call):
            stack += inner.inner
            continue
        callee, *given = inner.inner
        root = callee
        while isinstance(root, Attribute | View):
            root = root.base
        if isinstance(root, Global):
            stack += given
        elif not is_receiver(root):
            stack.append(callee.base if isinstance(callee, Attribute) else callee)
    return list(found.values())


def _is_function_here(value: Value) -> bool:
    """Whether it may be a function that this one defines, or something bound where one cannot tell."""
    value = meaning(value)
    if isinstance(value, Read):
        return not value.definition.parameter
    return isinstance(value, Opaque) and isinstance(value.node, cst.Lambda)


def _is_variable_of_module(frame: Frame, leaf: Value) -> bool:
    """Whether other functions may give the name another value: it is none of Python's, and bound anew."""
    if not isinstance(leaf, Global):
        return _name(leaf) in frame.of_module
    module = leaf.frame.module
    return module.binds(leaf.name) and not module.defines_once(leaf.name)


def _name(leaf: Value) -> str:
    while isinstance(leaf, View | Cast | OnePlus):
        leaf = leaf.base
    return leaf.definition.name if isinstance(leaf, Read) else ""


def _is_held(leaf: Value) -> bool:
    """Whether it is taken from an attribute, as a method can take it."""
    return isinstance(origin(leaf), Attribute)
