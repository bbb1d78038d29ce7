"""What the names of a module stand for: its imports, classes and functions, and those of modules it imports.

A `Library` holds the modules of one rewrite. Other modules are read only through the caller's `resolve`, and
only when a name from them matters; an unknown module is no error, its names just stay unknown.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import libcst as cst

from al_deepspeed.patching.nodes import dotted_name
from al_deepspeed.patching.scopes import names_bound_in

Resolve = Callable[[str], str | None]
LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")  # Python's lines: str.splitlines knows more ends
ELSEWHERE = sys.stdlib_module_names | {"torch", "numpy", "einops"}  # no norms or helpers of models there


@lru_cache(maxsize=256)
def parsed(source: str) -> cst.Module:
    """The same text is parsed once a process: the files of a tree import each other. Trees never change."""
    return cst.parse_module(source)


@lru_cache(maxsize=256)
def outlined(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return ast.parse(source)


@dataclass(eq=False)
class Function:
    node: cst.FunctionDef
    module: Module
    owner: Class | None = None
    receiver: str | None = None  # the name of `self`: the first argument, or that of the method around it
    seen: frozenset[str] = frozenset()  # names of the functions around it, which hide those of the module

    @property
    def decorators(self) -> set[str]:
        """Last components of the decorators' names."""
        names = set()
        for decorator in self.node.decorators:
            call = decorator.decorator
            name = dotted_name(call.func if isinstance(call, cst.Call) else call)
            names.add((name or "?").rpartition(".")[2])
        return names


def method(node: cst.FunctionDef, module: Module, owner: Class) -> Function:
    first = [*node.params.posonly_params, *node.params.params][:1]
    function = Function(node, module, owner, first[0].name.value if first else None)
    if function.decorators & {"staticmethod", "classmethod"}:
        function.receiver = None
    return function


@dataclass(eq=False)
class Class:
    name: str
    node: cst.ClassDef
    module: Module
    methods: dict[str, Function] = field(default_factory=dict)

    def defines_once(self, name: str) -> bool:
        """Whether the class binds the name in one place: no other definition may be the one that counts."""
        return _bindings(self.node.body)[name] == 1

    def ancestry(self, seen: tuple[Class, ...] = ()) -> Iterator[Class]:
        """This class and those it derives from, as far as their source is known."""
        yield self
        for base in self.node.bases:
            found = self.module.find_class(base.value)
            if found is not None and found not in (*seen, self):
                yield from found.ancestry((*seen, self))

    def base_names(self) -> list[str]:
        """Dotted names of all known and unknown ancestors."""
        return [
            name
            for ancestor in self.ancestry()
            for base in ancestor.node.bases
            if (name := ancestor.module.qualified(base.value))
        ]

    def method(self, name: str) -> Function | None:
        for ancestor in self.ancestry():
            if name in ancestor.methods:
                return ancestor.methods[name] if ancestor.defines_once(name) else None
        return None


class Module:
    """One module: `imports` maps a local name to the dotted name it stands for. A package's ends in __init__.

    Classes and functions are parsed when somebody asks for them; Python's own parser, which is much quicker,
    says where they stand.
    """

    def __init__(self, source: str, name: str, library: Library, tree: cst.Module | None = None) -> None:
        self.name, self.library, self.tree = name, library, tree
        self.is_package = name.endswith("__init__")
        self.imports: dict[str, str] = {}
        self._imported: Counter[str] = Counter()
        self._lines = LINE.findall(source)
        self._spans: dict[str, tuple[int, int]] = {}
        self._classes: dict[str, Class | None] = {}
        self._functions: dict[str, Function | None] = {}
        self._outlined = outlined(source)
        self._has_global = "global" in source
        self._outline(self._outlined.body)
        for statement in () if tree is None else _top_level(tree):
            self._add(statement)

    def _outline(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self._index_import(statement)
            elif isinstance(statement, ast.ClassDef | ast.FunctionDef):
                first = min([statement.lineno, *(d.lineno for d in statement.decorator_list)])
                self._spans[statement.name] = (first - 1, statement.end_lineno)
            elif isinstance(statement, ast.If | ast.Try):
                self._outline(statement.body)
                for handler in getattr(statement, "handlers", ()):
                    self._outline(handler.body)
                self._outline(statement.orelse)

    def _index_import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                local = alias.asname or alias.name.split(".")[0]
                self._imported[local] += 1
                self.imports.setdefault(local, alias.name if alias.asname else local)
            elif alias.name != "*":
                source = relative_to(self.name, "." * node.level + (node.module or ""))
                dot = "" if source.endswith(".") else "."
                self._imported[alias.asname or alias.name] += 1
                self.imports.setdefault(alias.asname or alias.name, f"{source}{dot}{alias.name}")

    def imported(self, node: cst.Import | cst.ImportFrom, alias: cst.ImportAlias) -> str:
        """The dotted name that an import inside a function gives to a local name, as in `imports`."""
        name = dotted_name(alias.name)
        if isinstance(node, cst.Import):
            return name if alias.asname is not None else name.partition(".")[0]
        written = "." * len(node.relative) + (dotted_name(node.module) if node.module else "")
        source = relative_to(self.name, written)
        return f"{source}{'' if source.endswith('.') else '.'}{name}"

    def _add(self, statement: cst.CSTNode) -> None:
        if isinstance(statement, cst.ClassDef):
            found = Class(statement.name.value, statement, self)
            for inner in statement.body.body:
                if isinstance(inner, cst.FunctionDef):
                    found.methods[inner.name.value] = method(inner, self, found)
            self._classes[found.name] = found
        elif isinstance(statement, cst.FunctionDef):
            self._functions[statement.name.value] = Function(statement, self)

    def get(self, kind: str, name: str) -> Class | Function | None:
        """The module's own class or function of that name; kind is "class" or "function"."""
        known = self._classes if kind == "class" else self._functions
        if name not in known and name in self._spans and self.tree is None:
            first, last = self._spans.pop(name)
            text = "".join(self._lines[first:last])
            if text[:1].isspace():  # strings in it may be indented less, so dedenting is no way
                text = f"if True:\n{text}"
            with contextlib.suppress(cst.ParserSyntaxError):
                for statement in _top_level(parsed(text)):
                    self._add(statement)
        return known.get(name)

    def classes(self) -> list[Class]:
        return [
            found for name in [*self._spans, *self._classes] if (found := self.get("class", name)) is not None
        ]

    def functions(self) -> list[Function]:
        names = [*self._spans, *self._functions]
        return [found for name in names if (found := self.get("function", name)) is not None]

    def qualified(self, node: cst.CSTNode) -> str | None:
        """The dotted name that an expression `a.b.c` stands for."""
        full = dotted_name(node)
        if full is None:
            return None
        first, dot, rest = full.partition(".")
        return self.imports.get(first, first) + dot + rest

    def stands_for(self, node: cst.CSTNode) -> str | None:
        """The same; None where the module binds the name otherwise too, so that it may stand for anything."""
        first = (dotted_name(node) or "").partition(".")[0]
        if first in self.imports and (self._bound[first] > self._imported[first] or first in self._rebound):
            return None
        return self.qualified(node)

    def defines_once(self, name: str) -> bool:
        """Whether the module binds the name in one place alone: it stands for what is defined there."""
        return self._bound[name] == 1 and name not in self._rebound

    def binds(self, name: str) -> bool:
        return name in self._bound or name in self._rebound

    @cached_property
    def _bound(self) -> Counter[str]:
        return Counter(_bound_names(self._outlined.body))

    @cached_property
    def _rebound(self) -> set[str]:
        """By functions."""
        if not self._has_global:
            return set()
        shared = [node for node in ast.walk(self._outlined) if isinstance(node, ast.Global)]
        return {name for node in shared for name in node.names}

    def _find(self, node: cst.CSTNode, kind: str):
        full = dotted_name(node)
        if full is None or (full.partition(".")[0] not in self.imports and "." in full):
            return None
        return self.library.find(self, self.qualified(node), kind)

    def find_class(self, node: cst.CSTNode) -> Class | None:
        return self._find(node, "class")

    def find_function(self, node: cst.CSTNode) -> Function | None:
        """The function that a name of this module stands for, unless something else may take its place."""
        found = self._find(node, "function")
        first = (dotted_name(node) or "").partition(".")[0]
        if found is None or not self.defines_once(first):
            return None
        return found if found.module.defines_once(found.node.name.value) else None

    def imported_classes(self) -> list[Class]:
        found = [self.library.find(self, name, "class") for name in self.imports.values() if "." in name]
        return [item for item in found if item is not None]


def _bound_names(body: list[ast.stmt]) -> Iterator[str]:
    """Names that statements bind in their own scope, as often as they do."""
    for statement in body:
        for node in _own_nodes(statement):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.alias):
                yield node.asname or node.name.partition(".")[0]


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The node and those below it in the same scope."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _own_nodes(child)


def _bindings(body: cst.CSTNode) -> Counter[str]:
    """How many statements of a class's suite bind each name."""
    bound: Counter[str] = Counter()
    for statement in body.body:
        defines = isinstance(statement, cst.FunctionDef | cst.ClassDef)
        bound.update([statement.name.value] if defines else names_bound_in(statement))
    return bound


def _top_level(tree: cst.Module):
    """Classes and functions of a module, also those in `if` and `try`."""
    waiting = list(tree.body)
    while waiting:
        statement = waiting.pop(0)
        if isinstance(statement, cst.ClassDef | cst.FunctionDef):
            yield statement
        elif isinstance(statement, cst.If | cst.Try):
            waiting += statement.body.body
            for handler in getattr(statement, "handlers", ()):
                waiting += handler.body.body
            other = statement.orelse
            if other is not None:
                waiting += [other] if isinstance(other, cst.If) else other.body.body


class Library:
    """The modules known to one rewrite, parsed once."""

    def __init__(self, resolve: Resolve | None) -> None:
        self._resolve = resolve
        self._modules: dict[str, Module | None] = {}

    def find(self, module: Module, name: str, kind: str, depth: int = 0):
        """The class or function called `name` as `module` sees it, or None."""
        found = module.get(kind, name)
        if found is not None:
            return found
        source, _, last = name.rpartition(".")
        if not source or depth > 4:
            return None
        if not source.strip("."):  # "from . import layers": nothing but dots is left
            source = source + "."
        other = self._load(source)
        if other is None:
            return None
        found = other.get(kind, last)
        if found is None and last in other.imports:  # passed on by an __init__.py
            found = self.find(other, other.imports[last], kind, depth + 1)
        return found

    def _load(self, name: str) -> Module | None:
        if name not in self._modules:
            self._modules[name] = None
            if self._resolve is not None and name.partition(".")[0] not in ELSEWHERE:
                source = self._resolve(name)
                if source is not None:
                    inside = f"{name}{'' if name.endswith('.') else '.'}__init__"
                    name_of_file = inside if self._resolve(inside) == source else name
                    with contextlib.suppress(SyntaxError, ValueError, cst.ParserSyntaxError):
                        self._modules[name] = Module(source, name_of_file, self)
        return self._modules[name]


def relative_to(module: str, source: str) -> str:
    """`source` as imported inside `module`, seen from the file that is rewritten (whose name is "")."""
    if not module or not source.startswith("."):
        return source
    dots = len(source) - len(source.lstrip("."))
    rest = source[dots:]
    lead = len(module) - len(module.lstrip("."))
    parts = module[lead:].split(".") if module[lead:] else []
    if dots > len(parts):
        return "." * (lead + dots - len(parts)) + rest if lead else rest
    parents = parts[: len(parts) - dots]
    if lead or parents:
        return "." * lead + ".".join([*parents, *([rest] if rest else [])])
    return rest
