"""Which functions may hold a site, by the words and operators in them.

Reading a function closely is dear, and most functions of a tree have nothing to do with norms. Each site has
a sum, its own or that of a helper it calls, and beside it a norm or a gate. This look goes by names: a norm
is called one, or is an attribute that some class in sight sets to something with `norm` in it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from al_deepspeed.patching.names import ELSEWHERE, Resolve, outlined
from al_deepspeed.patching.norms import is_role

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SUMS = frozenset(["add", "addcmul"])
PRODUCTS = frozenset(["mul", "multiply", "addcmul"])
NORM = re.compile("norm", re.IGNORECASE)


def may_hold_sites(tree: ast.Module, source: str, resolve: Resolve | None) -> list[bool]:
    """An answer for each function of the module, nested ones too, in source order."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    norms = set(_norm_attributes(source))
    helpers = set()
    for node in imports:
        name = "." * node.level + (node.module or "")
        if name.partition(".")[0] in ELSEWHERE:
            continue
        helpers |= {alias.asname or alias.name for alias in node.names}
        norms |= _norm_attributes((resolve and resolve(name)) or "")
    functions = [_Function(node) for node in _functions(tree)]
    own = {one.node.name for one in functions if one.adds or one.multiplies}
    while more := {one.node.name for one in functions if own.intersection(map(_called, one.calls))} - own:
        own |= more
    helpers |= own
    return [one.may_hold(norms, helpers) for one in functions]


class _Function:
    """What stands in a function, nested ones included."""

    def __init__(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.node = node
        self.names: set[str] = set()
        self.calls: list[ast.Call] = []
        self.items: set[str] = set()  # names that are one of several results
        self.products: list[ast.BinOp] = []
        self.adds = False
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name):
                self.names.add(inner.id)
            elif isinstance(inner, ast.Attribute):
                self.names.add(inner.attr)
            elif isinstance(inner, ast.arg):
                self.names.add(inner.arg)
            elif isinstance(inner, ast.Call):
                self.calls.append(inner)
            elif isinstance(inner, ast.Add):
                self.adds = True
            elif isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Mult):
                self.products.append(inner)
            elif isinstance(inner, ast.Tuple | ast.List) and isinstance(inner.ctx, ast.Store):
                self.items |= {one.id for one in ast.walk(inner) if isinstance(one, ast.Name)}
        self.adds = self.adds or bool(self.names & SUMS)
        self.multiplies = bool(self.products or self.names & PRODUCTS)

    def may_hold(self, norms: set[str], helpers: set[str]) -> bool:
        if not (self.adds or any(_is_helper(call, helpers) for call in self.calls)):
            return False
        norms = norms | {name for name in self.names if is_role(name)}
        return self._may_norm(norms) or (self.adds and self._may_gate())

    def _may_norm(self, norms: set[str]) -> bool:
        """Whether it calls what may be a norm: by a norm's name, one given to it here, or an argument's."""
        if not self.names & norms and "layer_norm" not in self.names:
            parameters = {one.arg for one in ast.walk(self.node.args) if isinstance(one, ast.arg)}
            return any(_called(call) in parameters for call in self.calls if _is_alone(call))
        callable_here = norms | {"layer_norm", "forward"}
        for inner in ast.walk(self.node):
            if isinstance(inner, ast.Assign | ast.NamedExpr) and not isinstance(inner.value, ast.Call):
                if any(isinstance(one, ast.Attribute) and one.attr in norms for one in ast.walk(inner.value)):
                    targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                    callable_here |= {
                        one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)
                    }
            elif isinstance(inner, ast.arg):
                callable_here.add(inner.arg)
        calls = [call for call in self.calls if _is_alone(call) or _called(call) == "layer_norm"]
        return any(_called(call) in callable_here for call in calls)

    def _may_gate(self) -> bool:
        if any("gate" in name.lower() for name in self.names):
            return True
        if self.names & PRODUCTS:
            return True
        gated: set[str] = set()  # names of products
        for node in ast.walk(self.node):
            if isinstance(node, ast.Assign):
                names = {one.id for one in node.targets if isinstance(one, ast.Name)}
                self.items |= names if self._is_item(node.value) else set()
                gated |= names if self._is_gated(node.value) else set()
        for node in ast.walk(self.node):
            if isinstance(node, ast.AugAssign):
                sides = [node.value]
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                sides = [node.left, node.right]
            else:
                continue
            named = any(isinstance(side, ast.Name) and side.id in gated for side in map(_below_calls, sides))
            if named or [self._is_gated(side) for side in sides].count(True) == 1:
                return True
        return False

    def _is_gated(self, node: ast.expr) -> bool:
        """A product with one of several results, below casts."""
        node = _below_calls(node)
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
            return False
        factors = (node.left, node.right)
        return any(map(self._is_item, factors)) and not any(map(_is_number, factors))

    def _is_item(self, node: ast.expr) -> bool:
        """One of several results, as far as one can tell here, below views."""
        while True:
            if isinstance(node, ast.Subscript):
                if _is_place(node.slice):
                    return True
                node = node.value
            elif isinstance(node, ast.Call):
                node = node.func
            elif isinstance(node, ast.Attribute):
                node = node.value
            else:
                return isinstance(node, ast.Name) and node.id in self.items


def _called(call: ast.Call) -> str:
    """The last name of what is called."""
    callee = call.func
    while isinstance(callee, ast.Subscript | ast.IfExp):
        callee = callee.body if isinstance(callee, ast.IfExp) else callee.value
    if isinstance(callee, ast.Attribute):
        return callee.attr
    return callee.id if isinstance(callee, ast.Name) else ""


def _is_alone(call: ast.Call) -> bool:
    """Whether it has one argument, as a norm's has."""
    return len(call.args) + len(call.keywords) == 1


def _is_number(node: ast.expr) -> bool:
    """A constant, or one of the lengths of a tensor."""
    if isinstance(node, ast.Subscript):
        node = node.value
        return isinstance(node, ast.Attribute) and node.attr == "shape"
    return isinstance(node, ast.Constant)


def _below_calls(node: ast.expr) -> ast.expr:
    """The tensor whose methods are called: `(gate * y)` of `(gate * y).to(dtype)`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    return node


def _is_place(index: ast.expr) -> bool:
    """`[2]` or `[:, 2]`."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    places = [part for part in parts if not isinstance(part, ast.Slice)]
    return bool(places) and all(isinstance(part, ast.Constant) for part in places)


def _is_helper(call: ast.Call, helpers: set[str]) -> bool:
    """A function that is known by its name, or a module that takes the norm's output and more."""
    callee, names = call.func, []
    while isinstance(callee, ast.Attribute):
        names.append(callee.attr)
        callee = callee.value
    if isinstance(callee, ast.Name):
        names.append(callee.id)
    if helpers.intersection(names):
        return True
    return len(call.args) + len(call.keywords) > 1 and len(names) > 1 and names[-1] not in ELSEWHERE


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            yield child
        if not isinstance(child, ast.expr):
            yield from _functions(child)


@lru_cache(maxsize=4096)
def _norm_attributes(source: str) -> frozenset[str]:
    """Attributes that are set to something with `norm` in one of its names."""
    if not NORM.search(source):
        return frozenset()
    try:
        tree = outlined(source)
    except (SyntaxError, ValueError):
        return frozenset()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [part for one in targets for part in ast.walk(one) if isinstance(part, ast.Attribute)]
            attributes = {part.attr for part in parts if isinstance(part.ctx, ast.Store)}
            if attributes - found and any(map(_says_norm, ast.walk(node.value))):
                found |= attributes
    return frozenset(found)


def _says_norm(node: ast.AST) -> bool:
    name = getattr(node, "id", None) or getattr(node, "attr", None) or ""
    return isinstance(name, str) and bool(NORM.search(name))
