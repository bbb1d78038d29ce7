"""What the names of a module stand for: its imports, classes and functions, and those of modules it imports.

A `Library` holds the modules of one rewrite. Other modules are read only through the caller's `resolve`, and
only when a name from them matters; an unknown module is no error, its names just stay unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import libcst as cst
from libcst.helpers import get_full_name_for_node

Resolve = Callable[[str], str | None]


@dataclass(eq=False)
class Function:
    node: cst.FunctionDef
    module: Module
    owner: Class | None = None
    receiver: str | None = None  # the name of `self`: the first argument, or that of the method around it

    @property
    def decorators(self) -> set[str]:
        """Last components of the decorators' names."""
        names = set()
        for decorator in self.node.decorators:
            call = decorator.decorator
            name = get_full_name_for_node(call.func if isinstance(call, cst.Call) else call)
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
                return ancestor.methods[name]
        return None


class Module:
    """One parsed module: `imports` maps a local name to the dotted name it stands for."""

    def __init__(self, tree: cst.Module, name: str, library: Library) -> None:
        self.tree, self.name, self.library = tree, name, library
        self.imports: dict[str, str] = {}
        self.classes: dict[str, Class] = {}
        self.functions: dict[str, Function] = {}
        self._index(tree.body)

    def _index(self, body) -> None:
        for statement in body:
            if isinstance(statement, cst.ClassDef):
                found = Class(statement.name.value, statement, self)
                if isinstance(statement.body, cst.IndentedBlock):
                    for inner in statement.body.body:
                        if isinstance(inner, cst.FunctionDef):
                            found.methods[inner.name.value] = method(inner, self, found)
                self.classes[found.name] = found
            elif isinstance(statement, cst.FunctionDef):
                self.functions[statement.name.value] = Function(statement, self)
            elif isinstance(statement, cst.SimpleStatementLine):
                for small in statement.body:
                    self._index_import(small)
            elif isinstance(statement, cst.If | cst.Try):
                self._index(statement.body.body)
                for handler in getattr(statement, "handlers", ()):
                    self._index(handler.body.body)
                other = statement.orelse
                if other is not None:
                    self._index([other] if isinstance(other, cst.If) else other.body.body)

    def _index_import(self, node) -> None:
        if isinstance(node, cst.Import):
            for alias in node.names:
                full = get_full_name_for_node(alias.name)
                if alias.asname is not None:
                    self.imports.setdefault(alias.asname.name.value, full)
                else:
                    self.imports.setdefault(full.split(".")[0], full.split(".")[0])
        elif isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar):
            source = "." * len(node.relative) + (get_full_name_for_node(node.module) if node.module else "")
            source = relative_to(self.name, source)
            for alias in node.names:
                name = alias.name.value
                local = alias.asname.name.value if alias.asname is not None else name
                self.imports.setdefault(local, f"{source}{'' if source.endswith('.') else '.'}{name}")

    def qualified(self, node: cst.CSTNode) -> str | None:
        """The dotted name that an expression `a.b.c` stands for."""
        full = get_full_name_for_node(node) if isinstance(node, cst.Name | cst.Attribute) else None
        if full is None:
            return None
        first, dot, rest = full.partition(".")
        return self.imports.get(first, first) + dot + rest

    def find_class(self, node: cst.CSTNode) -> Class | None:
        name = self.qualified(node)
        return None if name is None else self.library.find(self, name, "classes")

    def imported_classes(self) -> list[Class]:
        found = [self.library.find(self, name, "classes") for name in self.imports.values() if "." in name]
        return [item for item in found if item is not None]

    def find_function(self, node: cst.CSTNode) -> Function | None:
        name = self.qualified(node)
        return None if name is None else self.library.find(self, name, "functions")


class Library:
    """The modules known to one rewrite, parsed once."""

    def __init__(self, resolve: Resolve | None) -> None:
        self._resolve = resolve
        self._modules: dict[str, Module | None] = {}

    def find(self, module: Module, name: str, kind: str, depth: int = 0):
        """The class or function called `name` as `module` sees it, or None."""
        found = getattr(module, kind).get(name)
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
        found = getattr(other, kind).get(last)
        if found is None and last in other.imports:  # passed on by an __init__.py
            found = self.find(other, other.imports[last], kind, depth + 1)
        return found

    def _load(self, name: str) -> Module | None:
        if name not in self._modules:
            self._modules[name] = None
            if self._resolve is not None and not name.startswith(("torch.", "numpy.")):
                source = self._resolve(name)
                if source is not None:
                    try:
                        self._modules[name] = Module(cst.parse_module(source), name, self)
                    except cst.ParserSyntaxError:
                        pass
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
