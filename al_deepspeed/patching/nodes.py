"""Walking syntax trees without transforming them.

LibCST's visitors rebuild every node, and its classes are abstract ones, for which isinstance is slow. So
nodes are told apart by type here, and a node's children are looked up once: trees never change.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache

import libcst as cst

FORMATTING = (
    "whitespace",
    "lpar",
    "rpar",
    "leading_lines",
    "lines_after",
    "header",
    "footer",
    "semicolon",
    "comma",
)


KEPT = 1 << 18  # nodes: some dozens of files


@cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(name for name in kind.__dataclass_fields__ if not name.startswith(FORMATTING))


@cache
def _is_node(kind: type) -> bool:
    return issubclass(kind, cst.CSTNode)


@cache
def is_expression(kind: type) -> bool:
    """Whether nodes of a type are expressions."""
    return issubclass(kind, cst.BaseExpression)


@lru_cache(maxsize=KEPT)
def children(node: cst.CSTNode) -> tuple[cst.CSTNode, ...]:
    """The nodes directly below, whitespace and punctuation left out."""
    return tuple(_children(node))


def _children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for name in _fields(type(node)):
        value = getattr(node, name)
        if _is_node(type(value)):
            yield value
        elif type(value) in (list, tuple):
            yield from (item for item in value if _is_node(type(item)))


def descend(node: cst.CSTNode, stop: tuple[type, ...] = ()) -> Iterator[cst.CSTNode]:
    """The node and all below it, in source order; nodes of the types in `stop` are yielded, not entered."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        if not stop or current is node or type(current) not in stop:
            stack.extend(children(current)[::-1])


def names_below(node: cst.CSTNode) -> set[cst.Name]:
    return {found for found in descend(node) if type(found) is cst.Name}


def dotted_name(node: cst.CSTNode) -> str | None:
    """`a.b.c`, where the expression is that."""
    parts = []
    while type(node) is cst.Attribute:
        parts.append(node.attr.value)
        node = node.value
    return ".".join([node.value, *reversed(parts)]) if type(node) is cst.Name else None
