"""Which names a piece of code reads and binds, by Python's scoping."""

from __future__ import annotations

import libcst as cst

from al_deepspeed.patching.nodes import children, descend, names_below


def names_in(node: cst.CSTNode) -> set[str]:
    return {name.value for name in names_below(node)}


def free_names(node: cst.FunctionDef | cst.ClassDef) -> set[str]:
    """What a nested function or class may read of the names around it."""
    names = {name.value for child in children(node) for name in names_below(child)}
    if isinstance(node, cst.ClassDef):
        return names
    shared = _shared_names(node)
    parameters = {inner.name.value for inner in descend(node.params) if isinstance(inner, cst.Param)}
    defaults = {
        name.value
        for inner in descend(node.params)
        if isinstance(inner, cst.Param) and inner.default is not None
        for name in names_below(inner.default)
    }
    own = parameters | names_bound_in(node.body)
    return (names - own) | shared | defaults | _names_of_inner(node.body)


def own_names(node: cst.FunctionDef) -> set[str]:
    """The function's own: its arguments and what it binds, but not what it shares with others."""
    parameters = {inner.name.value for inner in descend(node.params) if isinstance(inner, cst.Param)}
    return (parameters | names_bound_in(node.body)) - _shared_names(node)


def _shared_names(node: cst.CSTNode) -> set[str]:
    return {
        item.name.value
        for inner in descend(node)
        if type(inner) in (cst.Nonlocal, cst.Global)
        for item in inner.names
    }


def _names_of_inner(body: cst.CSTNode) -> set[str]:
    """Names read by functions inside the function: to be safe, all of them."""
    inside = [n for n in descend(body, (cst.FunctionDef, cst.ClassDef)) if isinstance(n, cst.FunctionDef)]
    return {name.value for inner in inside for name in names_below(inner)}


def names_bound_in(node: cst.CSTNode) -> set[str]:
    """Names that a statement binds, nested functions left out."""
    bound: set[str] = set()
    for inner in descend(node, (cst.FunctionDef, cst.ClassDef, cst.Lambda)):
        kind = type(inner)
        if kind in (cst.FunctionDef, cst.ClassDef):
            bound.add(inner.name.value)
        elif kind in (cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.For, cst.NamedExpr):
            bound |= target_names(inner.target)
        elif kind is cst.AsName:
            bound |= target_names(inner.name)
        elif kind is cst.ImportAlias and inner.asname is None:
            bound |= {name.value for name in names_below(inner.name)}
        elif kind in (cst.MatchAs, cst.MatchStar) and inner.name is not None:
            bound.add(inner.name.value)
    return bound


def target_names(target: cst.CSTNode) -> set[str]:
    if isinstance(target, cst.Name):
        return {target.value}
    if isinstance(target, cst.Tuple | cst.List):
        return set().union(*(target_names(element.value) for element in target.elements))
    return set()
