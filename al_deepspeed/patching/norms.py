"""Which objects are norms over the last dim: what an attribute was assigned, what a name or argument holds.

Known by name are the norms of torch, diffusers, Apex, Transformer Engine and Megatron. A class whose source
is at hand is known by what it does: it derives from a LayerNorm and calls it once, or calls F.layer_norm,
between casts. Megatron builds modules from specs; there the role in the spec decides
(`submodules.input_layernorm`). Whether a norm that is found here computes what the op does is settled by
the runtime, on the module itself.
"""

from __future__ import annotations

import re
from functools import lru_cache

import libcst as cst

from al_deepspeed.patching.names import Class, Function, Module
from al_deepspeed.patching.nodes import descend, dotted_name

NORM_CLASSES = frozenset(
    [
        "LayerNorm",
        "FP32LayerNorm",
        "RMSNorm",
        "FusedLayerNorm",
        "MixedFusedLayerNorm",
        "FastLayerNorm",
        "FusedRMSNorm",
        "MixedFusedRMSNorm",
        "WrappedTorchNorm",
        "TENorm",
        "TELayerNorm",
        "TERMSNorm",
        "LayerNormND",
        "WanLayerNorm",
        "WanRMSNorm",
    ]
)
STAND_INS = frozenset(["Identity", "IdentityOp"])  # an attribute may hold these instead of a norm
CONTAINERS = frozenset(["ModuleList", "ModuleDict"])
ROLE = re.compile(r"(^|_)(layer_?norm|norm|ln)(_?\d+)?[a-z]?(_|$)", re.IGNORECASE)
OTHER_NORMS = re.compile(
    r"group|batch|instance|spectral|weight_norm|ada|grad|channel|local_resp", re.IGNORECASE
)


def is_role(name: str) -> bool:
    """Whether a name says that it is a LayerNorm or RMSNorm: norm, norm1, input_layernorm, ln_2."""
    return bool(ROLE.search(name)) and not OTHER_NORMS.search(name)


class Norms:
    """Answers for one rewrite; remembers what it found about each class."""

    def __init__(self) -> None:
        self._classes: dict[int, bool] = {}
        self._attributes: dict[int, dict] = {}

    # What a class is ------------------------------------------------------------------------------------

    def is_norm_class(self, module: Module, node: cst.CSTNode) -> bool:
        name = module.qualified(node)
        if name is None:
            return False
        found = module.find_class(node)
        return self._known_class(found) if found is not None else name.rpartition(".")[2] in NORM_CLASSES

    def _known_class(self, found: Class) -> bool:
        if id(found) not in self._classes:
            self._classes[id(found)] = False  # for a class that refers to itself
            self._classes[id(found)] = self._behaves(found)
        return self._classes[id(found)]

    def _behaves(self, found: Class) -> bool:
        if found.name.endswith("RMSNorm"):
            return True
        derives = any(name.rpartition(".")[2] in NORM_CLASSES for name in found.base_names())
        forward = found.method("forward")
        if forward is None:
            return derives
        from al_deepspeed.patching.evaluate import forward_is_norm

        return forward_is_norm(forward, self)

    # What an attribute holds ----------------------------------------------------------------------------

    def attribute_is_norm(self, owner: Class, name: str) -> bool | None:
        """None: its assignment is not known."""
        built = self.assigned(owner, name)
        if not built:
            return None
        answers = [self._builds_norm(function, value) for function, value in built]
        answers = [answer for answer in answers if answer != "stand-in"]
        return bool(answers) and all(answers)

    def attribute_is_norm_anywhere(self, module: Module, name: str) -> bool | None:
        """For an object of unknown class: what the classes in the module's sight assign to that attribute."""
        if not is_role(name):
            return None
        classes = [*module.classes(), *module.imported_classes()]
        answers = [self.attribute_is_norm(found, name) for found in classes]
        known = [answer for answer in answers if answer is not None]
        return all(known) if known else None

    def attribute_is_rms(self, owner: Class, name: str) -> bool:
        """Whether all that the attribute can hold are RMS norms."""
        made = [part for function, value in self.assigned(owner, name) for part in _built(function, value)]
        names = [(dotted_name(call.func) or "").rpartition(".")[2] for call in made]
        names = [name for name in names if name not in STAND_INS]
        return bool(names) and all("RMS" in name for name in names)

    def attribute_class(self, owner: Class, name: str) -> Class | None:
        """The one class, source known, whose instance the attribute holds."""
        built = self.assigned(owner, name)
        if len(built) != 1:
            return None
        function, value = built[0]
        return function.module.find_class(value.func) if isinstance(value, cst.Call) else None

    def assigned(self, owner: Class, name: str) -> list[tuple[Function, cst.BaseExpression]]:
        """Every expression that a method of the class or its ancestors assigns to self.name."""
        for ancestor in owner.ancestry():
            found = self._all_assigned(ancestor).get(name)
            if found:
                return found
        return []

    def _all_assigned(self, owner: Class) -> dict[str, list[tuple[Function, cst.BaseExpression]]]:
        if id(owner) not in self._attributes:
            found: dict[str, list] = {}
            for method in owner.methods.values():
                for name, value in _assignments(method):
                    found.setdefault(name, []).append((method, value))
            self._attributes[id(owner)] = found
        return self._attributes[id(owner)]

    def _builds_norm(self, function: Function, node: cst.BaseExpression) -> bool | str:
        if isinstance(node, cst.Name) and node.value == "None":
            return "stand-in"
        if isinstance(node, cst.IfExp):
            answers = {self._builds_norm(function, node.body), self._builds_norm(function, node.orelse)}
            return bool(answers - {"stand-in"}) and (answers - {"stand-in"} == {True})
        if isinstance(node, cst.Name):  # a parameter of the constructor that is the norm itself
            return is_role(node.value)
        if not isinstance(node, cst.Call):
            return False
        last = (function.module.qualified(node.func) or "?").rpartition(".")[2]
        if last in STAND_INS:
            return "stand-in"
        if last == "build_module":
            return bool(node.args) and _last_name(node.args[0].value, is_role)
        if last in CONTAINERS:
            return self._holds_norms(function, node)
        if isinstance(node.func, cst.Name):
            default = _default(function.node, node.func.value)
            if default is not None:
                return self._is_factory(function, node.func.value, default)
        if self.is_norm_class(function.module, node.func):
            first = node.args[0].value if node.args else None
            return not (isinstance(first, cst.List | cst.Tuple) and len(first.elements) != 1)
        made = function.module.find_function(node.func)
        if made is not None:
            returned = _returns(made.node)
            return bool(returned) and all(self._builds_norm(made, value) is True for value in returned)
        unknown = function.module.find_class(node.func) is None
        return (
            unknown and bool(re.search(r"layer_?norm", last, re.IGNORECASE)) and not OTHER_NORMS.search(last)
        )

    def _is_factory(self, function: Function, name: str, default) -> bool:
        """A class given as a constructor argument: its default decides, without one its name."""
        if default is True or (isinstance(default, cst.Name) and default.value == "None"):
            return is_role(name)
        return self.is_norm_class(function.module, default)

    def _holds_norms(self, function: Function, node: cst.Call) -> bool:
        if len(node.args) != 1:
            return False
        inside = node.args[0].value
        if isinstance(inside, cst.ListComp | cst.GeneratorExp):
            return self._builds_norm(function, inside.elt) is True
        if isinstance(inside, cst.DictComp):
            return self._builds_norm(function, inside.value) is True
        if isinstance(inside, cst.List | cst.Tuple | cst.Dict):
            values = [element.value for element in inside.elements]
        else:
            return False
        return bool(values) and all(self._builds_norm(function, value) is True for value in values)


def _built(function: Function, node: cst.BaseExpression) -> list[cst.Call]:
    """The constructor calls that an expression can come to, through choices and factories."""
    if isinstance(node, cst.IfExp):
        return [*_built(function, node.body), *_built(function, node.orelse)]
    if not isinstance(node, cst.Call):
        return []
    factory = function.module.find_function(node.func)
    if factory is None or factory.node is function.node:
        return [node]
    return [call for value in _returns(factory.node) for call in _built(factory, value)]


def _last_name(node: cst.CSTNode, test) -> bool:
    if isinstance(node, cst.Attribute):
        return test(node.attr.value)
    return isinstance(node, cst.Name) and test(node.value)


def _default(function: cst.FunctionDef, name: str):
    """The default of a parameter, True when it has none, None when there is no such parameter."""
    for parameter in (*function.params.params, *function.params.kwonly_params):
        if parameter.name.value == name:
            return True if parameter.default is None else parameter.default
    return None


def _returns(function: cst.FunctionDef) -> list[cst.BaseExpression]:
    inside = descend(function, (cst.FunctionDef, cst.Lambda))
    return [node.value for node in inside if isinstance(node, cst.Return) and node.value is not None]


def _assignments(method: Function) -> tuple[tuple[str, cst.BaseExpression], ...]:
    """(name, expression) of every `self.name = expression` in a method."""
    parameters = method.node.params.params
    return _assignments_to(method.node, parameters[0].name.value) if parameters else ()


@lru_cache(maxsize=1 << 14)
def _assignments_to(method: cst.FunctionDef, owner: str) -> tuple[tuple[str, cst.BaseExpression], ...]:
    found = []
    for node in descend(method):
        kind = type(node)
        if kind is cst.Assign:
            pairs = [pair for target in node.targets for pair in _pairs(target.target, node.value)]
        elif kind is cst.AnnAssign and node.value is not None:
            pairs = [(node.target, node.value)]
        else:
            continue
        for target, value in pairs:
            holder = target.value if type(target) is cst.Attribute else None
            if type(holder) is cst.Name and holder.value == owner:
                found.append((target.attr.value, value))
    return tuple(found)


def _pairs(target: cst.CSTNode, value: cst.BaseExpression) -> list[tuple[cst.CSTNode, cst.BaseExpression]]:
    """`a, b = x, y` assigns as `a = x` and `b = y` do; another value belongs to each target as a whole."""
    if type(target) is not cst.Tuple:
        return [(target, value)]
    targets = [element.value for element in target.elements]
    if type(value) is cst.Tuple and len(value.elements) == len(targets):
        values = [element.value for element in value.elements]
    else:
        values = [value] * len(targets)
    return [pair for one, other in zip(targets, values, strict=True) for pair in _pairs(one, other)]
