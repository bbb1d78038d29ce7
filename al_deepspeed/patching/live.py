"""An imported module beside its source: which function came from where, and its code once rewritten.

Nothing here runs the module again. Its source is compiled as it stands and as rewritten; a function of the
running program is found in the first by name and line, must have the same bytecode there, and takes its new
code from the same place in the second.
"""

import ast
import importlib.util
import linecache
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from libcst import ParserSyntaxError

from al_deepspeed.patching.calls import RUNTIME
from al_deepspeed.patching.names import outlined
from al_deepspeed.patching.rewriter import rewrite
from al_deepspeed.patching.sites import Left, Rewritten
from al_deepspeed.patching.tree import Source, read, resolver

SHOWN = " (fused AdaLN)"
Place = tuple[tuple[str, int], ...]  # names from the module down, each with its number among its equals


class LiveModule:
    """One module of this process whose source file is at hand."""

    def __init__(self, module: ModuleType, source: Source) -> None:
        self.module = module
        self._source = source
        self._codes = dict(_codes(_compiled(source.text, str(source.path))))
        self._places = {(code.co_name, code.co_firstlineno): place for place, code in self._codes.items()}

    @classmethod
    def of(cls, module: ModuleType) -> "LiveModule | None":
        """None for a module without a readable Python file."""
        path = Path(getattr(module, "__file__", None) or "")
        if path.suffix != ".py":
            return None
        source = read(path.parent.resolve(), path.name)
        return cls(module, source) if isinstance(source, Source) else None

    def place(self, function: FunctionType) -> Place | None:
        """Where the function stands in the source; None when the file is not what runs."""
        return self._place(function) if self.is_current else None

    def _place(self, function: FunctionType) -> Place | None:
        code = function.__code__
        place = self._places.get((code.co_name, code.co_firstlineno))
        return place if place is not None and _same(self._codes[place], code) else None

    @cached_property
    def is_current(self) -> bool:
        """Whether every function of the module that comes from the file still stands in it."""
        own = [function for function in _functions(self.module) if _is_named_in(function, self._source.path)]
        return all(self._place(function) for function in own)

    @cached_property
    def rewritten(self) -> Rewritten:
        """With calls that carry the original expression, for the contract check."""
        path = self._source.path
        try:
            return rewrite(self._source.text, file=str(path), resolve=self._resolve, observe=True)
        except (ParserSyntaxError, RecursionError) as error:  # what Python takes, and the matcher does not
            reason = f"the file was not parsed: {getattr(error, 'message', error)}"
            return Rewritten(self._source.text, (), (Left(str(path), 1, "", reason),))

    @cached_property
    def observed(self) -> dict[Place, CodeType]:
        """The rewritten code as it is."""
        return dict(_codes(_compiled(self._tree(), self._shown)))

    @cached_property
    def plain(self) -> dict[Place, CodeType]:
        """The rewritten code without the original expressions, as on disk."""
        return dict(_codes(_compiled(_WithoutOriginals().visit(self._tree()), self._shown)))

    def bind_imports(self) -> None:
        """Gives the module the names that rewritten code imports."""
        old = {ast.dump(node) for node in outlined(self._source.text).body}
        new = [
            node
            for node in self._tree().body
            if isinstance(node, ast.Import | ast.ImportFrom) and ast.dump(node) not in old
        ]
        exec(compile(ast.Module(new, []), str(self._source.path), "exec"), vars(self.module))

    def loses_decorators(self, place: Place) -> bool:
        """Whether rewriting takes decorators off the function: those that would compile it around the op."""
        before, after = (_decorators(text, place) for text in (self._source.text, self.rewritten.source))
        return before != after

    def obstacle(self, place: Place, function: FunctionType) -> str | None:
        """Why the function cannot take its new code."""
        new = self.plain.get(place)
        if new is None or new.co_freevars != function.__code__.co_freevars:
            return "its rewritten code does not fit the function in memory"
        if self.loses_decorators(place) and (others := _decorators(self.rewritten.source, place)):
            return f"it is decorated by {', '.join(others)} besides"
        return None

    @cached_property
    def _shown(self) -> str:
        """The file's name in tracebacks, under which they find the rewritten source."""
        name, text = f"{self._source.path}{SHOWN}", self.rewritten.source
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        return name

    def _tree(self) -> ast.Module:
        return ast.parse(self.rewritten.source)

    def _resolve(self, name: str) -> str | None:
        path = self._source.path
        package = self.module.__name__ if path.stem == "__init__" else self.module.__package__ or ""
        try:
            imported = sys.modules.get(importlib.util.resolve_name(name, package))
        except ImportError:
            imported = None
        live = None if imported is None else LiveModule.of(imported)
        if live is not None:
            return live._source.text if live.is_current else None
        return resolver(path, path.parent, {})(name)


class _WithoutOriginals(ast.NodeTransformer):
    """Takes `site` and `original` off the calls of the runtime."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        callee = node.func
        if (
            isinstance(callee, ast.Attribute)
            and isinstance(callee.value, ast.Name)
            and callee.value.id == RUNTIME
        ):
            node.keywords = [one for one in node.keywords if one.arg not in ("site", "original")]
        return node


def functions_under(attribute: Any, file_name: str, depth: int = 8) -> Iterator[FunctionType]:
    """A function of this file, and those that decorators, static and class methods and compilers wrapped."""
    if _is_from(attribute, file_name):
        yield attribute
    if attribute is None or isinstance(attribute, type) or depth == 0:
        return
    for one in (*(getattr(attribute, name, None) for name in WRAPPED), *_enclosed(attribute, file_name)):
        yield from functions_under(one, file_name, depth - 1)


WRAPPED = ("_torchdynamo_orig_callable", "_torchdynamo_inline", "__wrapped__", "__func__", "fget")


def _is_from(attribute: Any, file_name: str) -> bool:
    if not isinstance(attribute, FunctionType):
        return False
    return Path(attribute.__code__.co_filename.removesuffix(SHOWN)).name == file_name


def _enclosed(attribute: Any, file_name: str) -> Iterator[FunctionType]:
    """What a decorator without functools.wraps holds on to."""
    for cell in getattr(attribute, "__closure__", None) or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if _is_from(held, file_name):
            yield held


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions and methods that a module defines, without what wraps them."""
    held = list(vars(module).values())
    classes = [one for one in held if isinstance(one, type) and one.__module__ == module.__name__]
    for one in [*held, *(attribute for cls in classes for attribute in vars(cls).values())]:
        one = getattr(one, "__func__", getattr(one, "fget", one))
        if isinstance(one, FunctionType):
            yield one


def _is_named_in(function: FunctionType, path: Path) -> bool:
    code = function.__code__
    return Path(code.co_filename) == path and not code.co_name.startswith("<")


def _compiled(source: str | ast.Module, name: str) -> CodeType:
    return compile(source, name, "exec", dont_inherit=True)


def _codes(code: CodeType, above: Place = ()) -> Iterator[tuple[Place, CodeType]]:
    """Classes and functions, but no lambdas or comprehensions: rewriting adds some."""
    counts: dict[str, int] = {}
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and not constant.co_name.startswith("<"):
            number = counts[constant.co_name] = counts.get(constant.co_name, -1) + 1
            place = (*above, (constant.co_name, number))
            yield place, constant
            yield from _codes(constant, place)


def _same(one: CodeType, other: CodeType) -> bool:
    """Equal but for the file's name."""
    return (
        one.co_code == other.co_code
        and one.co_names == other.co_names
        and one.co_varnames == other.co_varnames
        and len(one.co_consts) == len(other.co_consts)
        and all(map(_same_constant, one.co_consts, other.co_consts))
    )


def _same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _same(one, other)
    if isinstance(one, frozenset):
        return one == other
    return type(one) is type(other) and repr(one) == repr(other)  # 0.0 is not -0.0, nan is nan


def _decorators(text: str, place: Place) -> list[str]:
    body: ast.AST = outlined(text)
    for name, number in place:
        body = [node for node in _definitions(body) if node.name == name][number]
    return [ast.unparse(one) for one in body.decorator_list]


def _definitions(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Those whose scope is this node's, in source order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from _definitions(child)
