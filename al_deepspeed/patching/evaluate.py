"""Expressions become values: arithmetic in its forms, casts, views, norms, helpers seen through.

What is not understood becomes Opaque, with what was evaluated inside it, so that nothing is ever assumed
about it. A call that may do anything (a module, an unknown function) counts as having effects.
"""

from __future__ import annotations

import libcst as cst

from al_deepspeed.patching.effects import effect, is_harmless
from al_deepspeed.patching.flow import Frame
from al_deepspeed.patching.helpers import see_through
from al_deepspeed.patching.names import Class, Function, Library
from al_deepspeed.patching.nodes import children, descend, is_expression
from al_deepspeed.patching.norms import Norms, is_role
from al_deepspeed.patching.scopes import names_in
from al_deepspeed.patching.values import (
    SAME_VALUES,
    Attribute,
    Cast,
    Definition,
    DType,
    Global,
    Held,
    Normed,
    OnePlus,
    Opaque,
    Product,
    Read,
    Scalar,
    Sum,
    Value,
    View,
    is_receiver,
    meaning,
)

CASTS = {"float": "float32", "half": "float16", "bfloat16": "bfloat16"}
DTYPES = frozenset(["float32", "float", "float16", "half", "bfloat16"])
ARITHMETIC = {"add": Sum, "mul": Product, "multiply": Product}
# Methods whose result depends on their receiver alone.
VIEWS = SAME_VALUES - {"[]"} | {"expand_as", "size", "dim", "numel", "tanh", "sigmoid", "clamp", "clip"}


class Evaluator:
    """Shared by all functions of one rewrite."""

    def __init__(self, library: Library, norms: Norms) -> None:
        self.library, self.norms = library, norms
        self.depth = 0  # of helpers seen through
        self.scaled: dict[cst.FunctionDef, set[str]] = {}  # see helpers.py
        self._properties: dict[tuple[int, str], bool] = {}

    # Entry points of flow.py ----------------------------------------------------------------------------

    def evaluate(self, frame: Frame, node: cst.CSTNode) -> Value:
        method = getattr(self, f"_{type(node).__name__}", None)
        value = method(frame, node) if method is not None else self._other(frame, node)
        frame.values[node] = value
        frame.marks[node] = len(frame.effects)
        return value

    def children(self, frame: Frame, node: cst.CSTNode) -> tuple[Value, ...]:
        """Evaluates the expressions directly below a node."""
        found = []
        for child in children(node):
            if is_expression(type(child)):
                found.append(self.evaluate(frame, child))
            else:
                found += self.children(frame, child)
        return tuple(found)

    def augmented(self, frame: Frame, node: cst.AugAssign, before: Value, value: Value) -> Value:
        if isinstance(node.operator, cst.AddAssign):
            return Sum(node.value, frame, frame.place, before, value, in_place=True)
        return Opaque(node.value, frame, frame.place, (before, value))

    def is_number(self, value: Value) -> bool:
        value = meaning(value)
        if isinstance(value, Sum):
            return self.is_number(value.left) and self.is_number(value.right)
        return isinstance(value, Scalar)

    # Expressions ----------------------------------------------------------------------------------------

    def _Name(self, frame: Frame, node: cst.Name) -> Value:
        definition = frame.names.get(node.value)
        if definition is None:
            return Global(node, frame, frame.place, node.value)
        frame.reads[node] = definition
        frame.paths[node] = tuple(frame.stack)
        definition.reads.append(node)
        for source in definition.sources:
            source.read_elsewhere()
        return Read(node, frame, frame.place, definition)

    def _Integer(self, frame: Frame, node) -> Value:
        return Scalar(node, frame, frame.place, float(node.evaluated_value))

    _Float = _Integer

    def _Attribute(self, frame: Frame, node: cst.Attribute) -> Value:
        base = self.evaluate(frame, node.value)
        if is_receiver(base) and self._is_property(frame.owner, node.attr.value):
            frame.record("method", (base,))
        return Attribute(node, frame, frame.place, base, node.attr.value)

    def _Subscript(self, frame: Frame, node: cst.Subscript) -> Value:
        base = self.evaluate(frame, node.value)
        others = tuple(value for element in node.slice for value in self.children(frame, element))
        return View(node, frame, frame.place, base, others)

    def _BinaryOperation(self, frame: Frame, node: cst.BinaryOperation) -> Value:
        left, right = self.evaluate(frame, node.left), self.evaluate(frame, node.right)
        if isinstance(node.operator, cst.Add):
            return self._sum(frame, node, left, right)
        if isinstance(node.operator, cst.Multiply):
            return Product(node, frame, frame.place, left, right)
        return Opaque(node, frame, frame.place, (left, right))

    def _sum(self, frame: Frame, node, left: Value, right: Value) -> Value:
        for one, other in ((left, right), (right, left)):
            if isinstance(one, Scalar) and one.number == 1 and not isinstance(other, Scalar):
                return OnePlus(node, frame, frame.place, other)
        return Sum(node, frame, frame.place, left, right)

    def _NamedExpr(self, frame: Frame, node: cst.NamedExpr) -> Value:
        value = self.evaluate(frame, node.value)
        name, earlier = node.target.value, frame.names.get(node.target.value)
        bound = frame.bind(name, None)  # or it is not reached, behind an `and`
        bound.sources += [earlier] if earlier is not None else []
        bound.sources.append(Definition(name, frame.place, value))
        return Opaque(node, frame, frame.place, (value,), pure=False)

    def _other(self, frame: Frame, node: cst.CSTNode) -> Value:
        if isinstance(node, cst.Lambda | cst.BaseComp):
            names = names_in(node)
            frame.held_back |= names
            for walrus in descend(node):
                if type(walrus) is cst.NamedExpr and not isinstance(node, cst.Lambda):
                    frame.bind_target(walrus.target, None)
            inner = tuple(
                Read(node, frame, frame.place, frame.names[name]) for name in names if name in frame.names
            )
            calls = () if isinstance(node, cst.Lambda) else descend(node)
            if any(type(one) is cst.Call and not self._is_plain(frame, one) for one in calls):
                frame.record("closure", inner)
            return Opaque(node, frame, frame.place, inner, pure=False)
        inner = self.children(frame, node)
        effects = isinstance(node, cst.Await | cst.Yield)
        if effects:  # others run meanwhile
            frame.record("in place" if isinstance(node, cst.Yield) else "closure", inner)
        return Opaque(node, frame, frame.place, inner, pure=not effects)

    def _is_plain(self, frame: Frame, call: cst.Call) -> bool:
        """Whether a call that is not evaluated goes by a name that changes nothing."""
        method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        return is_harmless(frame, call) or method in VIEWS or method in CASTS

    # Calls ----------------------------------------------------------------------------------------------

    def _Call(self, frame: Frame, node: cst.Call) -> Value:
        callee = self.evaluate(frame, node.func)
        arguments = [
            (a.keyword.value if a.keyword else a.star, self.evaluate(frame, a.value)) for a in node.args
        ]
        given = tuple(value for _, value in arguments)
        positional = [value for name, value in arguments if name == ""]
        found = None
        if len(positional) == len(arguments) or isinstance(callee, Attribute | Global):
            found = self._known_call(frame, node, callee, arguments, positional)
        alone = len(given) == 1 and not node.args[0].star
        if found is None and alone and self.is_norm(callee):
            return Normed(node, frame, frame.place, callee, given[0], rms=self.is_rms(callee))
        if found is None:
            found = self._helper(frame, node, callee, arguments)
        if found is None:
            if not (isinstance(callee, Global | Attribute) and is_harmless(frame, node)):
                seen = (*given, callee, *meaning(callee).parts())
                frame.record(effect(self, frame, node, callee, given), seen)
                return Opaque(node, frame, frame.place, (callee, *given), pure=False, called=True)
            found = Opaque(node, frame, frame.place, (callee, *given))
        return found

    def _known_call(self, frame: Frame, node: cst.Call, callee, arguments, positional) -> Value | None:
        """Arithmetic, casts, views and F.layer_norm, as functions of torch or methods of a tensor."""
        name = frame.module.stands_for(node.func) if not self._is_local(callee) else None
        keywords = {key: value for key, value in arguments if key}
        if name is not None and name.startswith("torch."):
            last = name.rpartition(".")[2]
            if last == "layer_norm" and positional:
                if len(positional) > 5 or "cudnn_enable" in keywords:
                    return None  # torch.layer_norm has one argument more than the function in F
                others = tuple(value for _, value in arguments[1:])
                return Normed(node, frame, frame.place, None, positional[0], others)
            if name.count(".") == 1 and positional:
                return self._arithmetic(frame, node, last, positional, keywords)
            return None
        if not isinstance(callee, Attribute):
            return None
        method, base = callee.name, callee.base
        if method == "forward" and len(positional) == len(arguments) == 1 and self._is_super(frame, base):
            return Normed(node, frame, frame.place, callee, positional[0])
        if method in CASTS and not arguments:
            return Cast(node, frame, frame.place, base, DType("name", text=CASTS[method]))
        if method == "type_as" and len(positional) == 1 and not keywords:
            return Cast(node, frame, frame.place, base, DType("like", positional[0]))
        if method in ("to", "type"):
            dtype = self._cast_dtype(frame, positional, keywords)
            return (
                View(node, frame, frame.place, base, tuple(v for _, v in arguments), method)
                if (dtype is None)
                else Cast(node, frame, frame.place, base, dtype)
            )
        if method in VIEWS and not self._is_module(callee):
            return View(node, frame, frame.place, base, tuple(v for _, v in arguments), method)
        if method.endswith("_") and not method.endswith("__"):
            frame.record("in place", (base,))
            return Opaque(
                node, frame, frame.place, (base, *(v for _, v in arguments)), pure=False, called=True
            )
        if method in ("addcmul", *ARITHMETIC) and not self._is_module(callee):
            return self._arithmetic(frame, node, method, [base, *positional], keywords)
        return None

    def _arithmetic(self, frame: Frame, node, name: str, values: list[Value], keywords: dict) -> Value | None:
        if keywords:
            return None
        if name == "addcmul" and len(values) == 3:
            product = Product(node, frame, frame.place, values[1], values[2])
            return Sum(node, frame, frame.place, values[0], product)
        if name in ARITHMETIC and len(values) == 2:
            if ARITHMETIC[name] is Sum:
                return self._sum(frame, node, *values)
            return Product(node, frame, frame.place, *values)
        return None

    def _cast_dtype(self, frame: Frame, positional, keywords) -> DType | None:
        """The dtype of `.to(...)`, or None when the call may do something else (another device)."""
        if len(positional) == 1 and not keywords:
            given = positional[0]
        elif not positional and set(keywords) == {"dtype"}:
            given = keywords["dtype"]
        else:
            return None
        found = meaning(given)
        if isinstance(found, Attribute):
            name = frame.module.stands_for(found.node) if isinstance(meaning(found.base), Global) else None
            if name is not None and name.startswith("torch.") and found.name in DTYPES:
                return DType("name", text=CASTS.get(found.name, found.name))
            if found.name == "dtype":
                return DType("like", found.base)
        names = [v.name for v in (found, given) if isinstance(v, Attribute | Global)]
        names += [given.definition.name] if isinstance(given, Read) else []
        if keywords or any(name.endswith("dtype") for name in names):
            return DType("expression", given)
        return None

    def _helper(self, frame: Frame, node: cst.Call, callee: Value, arguments) -> Value | None:
        found = self.called_function(frame, node, callee)
        if found is None or self.depth > 4 or self._is_overridden(callee):
            return None
        function, receiver, holder = found
        held = None
        if holder is not None:
            owner = "" if function.owner is None else f"{function.owner.name}."
            held = Held(holder, function.module.name, f"{owner}{function.node.name.value}")
        self.depth += 1
        try:
            return see_through(self, frame, node, function, receiver, arguments, held)
        finally:
            self.depth -= 1

    def called_function(
        self, frame: Frame, node: cst.Call, callee
    ) -> tuple[Function, Value | None, Value | None] | None:
        """The function whose source is known, its `self`, and the object that it was found through."""
        if isinstance(callee, Global):
            return self._free_function(frame, node, callee)
        if not isinstance(callee, Attribute):
            return None
        owner = self.class_of(callee.base)
        if owner is not None:
            method = owner.method(callee.name)
            if method is not None:
                if "staticmethod" in method.decorators:
                    return method, None, callee.base
                return None if "classmethod" in method.decorators else (method, callee.base, callee.base)
            held = self.norms.attribute_class(owner, callee.name)  # a module: its forward
            forward = held.method("forward") if held is not None else None
            return None if forward is None else (forward, callee, callee)
        return None if self._is_local(callee) else self._free_function(frame, node, callee)

    def _free_function(self, frame: Frame, node: cst.Call, callee):
        """What a helper of another module calls is no name here, so it cannot be looked up again."""
        function = frame.module.find_function(node.func)
        if function is None:
            return None
        return function, None, callee if frame.module.name == "" else None

    def _is_overridden(self, callee: Value) -> bool:
        """Whether a class of the same module derives from the method's and brings its own."""
        owner = self.class_of(callee.base) if isinstance(callee, Attribute) else None
        if owner is None:
            return False
        name, classes = callee.name, owner.module.classes()
        others = (found for found in classes if found is not owner and name in found.methods)
        return any(owner in found.ancestry() for found in others)

    # What values hold -----------------------------------------------------------------------------------

    def class_of(self, value: Value) -> Class | None:
        """The class, source known, of a module or of `self`."""
        value = meaning(value)
        if is_receiver(value):
            return value.frame.owner
        if isinstance(value, Attribute):
            owner = self.class_of(value.base)
            return None if owner is None else self.norms.attribute_class(owner, value.name)
        return None

    def is_norm(self, value: Value) -> bool:
        value = meaning(value)
        if isinstance(value, Read):
            return self._definition_is_norm(value.definition, value.frame)
        if isinstance(value, Attribute):
            owner = self.class_of(value.base)
            if owner is not None:
                known = self.norms.attribute_is_norm(owner, value.name)
            else:
                known = self.norms.attribute_is_norm_anywhere(value.frame.module, value.name)
            if known is not None:
                return known
            return is_role(value.name) and "layer" in value.name.lower()  # its name says LayerNorm
        if isinstance(value, View):  # one of a ModuleList of norms
            return value.method == "[]" and self.is_norm(value.base)
        return _is_choice(value) and all(map(self.is_norm, value.inner[1:]))

    def is_rms(self, value: Value) -> bool:
        """Whether a norm can only be an RMS norm."""
        value = meaning(value)
        if isinstance(value, View):
            return self.is_rms(value.base)
        if not isinstance(value, Attribute):
            return _is_choice(value) and all(map(self.is_rms, value.inner[1:]))
        owner = self.class_of(value.base)
        return owner is not None and self.norms.attribute_is_rms(owner, value.name)

    def _definition_is_norm(self, definition: Definition, frame: Frame) -> bool:
        if definition.sources:
            values = [source.value for source in definition.sources]
            return all(value is not None and self.is_norm(value) for value in values)
        if definition.parameter:
            from al_deepspeed.patching.arguments import argument_is_norm

            return argument_is_norm(self, frame.function, definition.name)
        if definition.looped:
            return is_role(definition.name)
        return definition.value is not None and self.is_norm(definition.value)

    def _is_super(self, frame: Frame, base: Value) -> bool:
        """Whether `super().forward(x)` is a norm's, because the class derives from one."""
        if not (isinstance(base, Opaque) and isinstance(base.node, cst.Call) and frame.owner is not None):
            return False
        called = base.node.func
        if not (isinstance(called, cst.Name) and called.value == "super"):
            return False
        return any(self.norms.is_norm_class(frame.module, base.value) for base in frame.owner.node.bases)

    def _is_local(self, callee: Value) -> bool:
        while isinstance(callee, Attribute):
            callee = callee.base
        return not isinstance(callee, Global)

    def _is_property(self, owner: Class | None, name: str) -> bool:
        """Whether reading the attribute runs a method."""
        key = (id(owner), name)
        if key not in self._properties:
            method = None if owner is None else owner.method(name)
            self._properties[key] = method is not None and "property" in method.decorators
        return self._properties[key]

    def _is_module(self, callee: Attribute) -> bool:
        """Whether `base.name(...)` calls a method that the base's class defines, not a tensor's."""
        owner = self.class_of(callee.base)
        return owner is not None


def _is_choice(value: Value) -> bool:
    """`a if test else b`; the test is the first of what it evaluates."""
    return isinstance(value, Opaque) and isinstance(value.node, cst.IfExp)


def forward_is_norm(forward: Function, norms: Norms) -> bool:
    """Whether a forward applies one norm to its one argument, between casts, whichever way it returns."""
    return _returns_norm(forward, Evaluator(forward.module.library, norms), 3)


def _returns_norm(function: Function, evaluator: Evaluator, depth: int) -> bool:
    parameters = function.node.params.params
    if len(parameters) != 2 or depth == 0:
        return False
    frame = Frame(function, evaluator)
    frame.run()

    def is_argument(value: Value) -> bool:
        value = strip_casts(value)
        return isinstance(value, Read) and value.definition.name == parameters[1].name.value

    for node in frame.returned:
        result = strip_casts(frame.values[node])
        if isinstance(result, Normed) and is_argument(result.x):
            continue
        callee = result.inner[0] if isinstance(result, Opaque) and result.called else None
        own = isinstance(callee, Attribute) and is_receiver(callee.base) and function.owner is not None
        method = function.owner.method(callee.name) if own else None
        arguments = result.inner[1:] if own else ()
        if method is None or len(arguments) != 1 or not is_argument(arguments[0]):
            return False
        if not _returns_norm(method, evaluator, depth - 1):
            return False
    return bool(frame.returned)


def strip_casts(value: Value) -> Value:
    value = meaning(value)
    while isinstance(value, Cast):
        value = meaning(value.base)
    return value
