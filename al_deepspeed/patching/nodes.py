"""Walking syntax trees without transforming them: LibCST's visitors rebuild every node, which is slow."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

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


@cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(name for name in kind.__dataclass_fields__ if not name.startswith(FORMATTING))


def children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The nodes directly below, whitespace and punctuation left out."""
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            yield value
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, cst.CSTNode):
                    yield item


def descend(node: cst.CSTNode, stop: tuple[type, ...] = ()) -> Iterator[cst.CSTNode]:
    """The node and all below it, in source order; nodes of the types in `stop` are yielded, not entered."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        if current is node or not isinstance(current, stop):
            stack.extend(reversed(list(children(current))))


def names_below(node: cst.CSTNode) -> set[cst.Name]:
    return {found for found in descend(node) if isinstance(found, cst.Name)}
