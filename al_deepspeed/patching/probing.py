"""`al-deepspeed patch verify`: every rewritten site against the original expression, on random operands.

Modules are imported from the tree, so a norm of theirs is made as their own constructor makes it, with small
sizes. What cannot be imported is said; where a norm cannot be made, torch's LayerNorm stands in for it, and
that is said too.
"""

import ast
import builtins
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from al_deepspeed.patching import runtime
from al_deepspeed.patching.calls import RUNTIME
from al_deepspeed.patching.on_disk import Select, everything, examine
from al_deepspeed.patching.rewriter import rewrite
from al_deepspeed.patching.tree import Note, Source, read, resolver
from al_deepspeed.patching.verification import Checker

B, S, D = 2, 12, 32
DTYPES = (torch.float32, torch.bfloat16)
MODULATIONS = ((B, 1, D), (B, S, D))
SIZES = ("dim", "size", "channel", "feature", "width", "shape")  # in the name of an argument that is a width


@dataclass(frozen=True)
class Probe:
    """One site. differences: none where fused and original agree. norm: what it ran with."""

    file: str
    line: int
    kind: str
    norm: str
    differences: tuple[str, ...]


@dataclass(frozen=True)
class Probed:
    """probes: sites that ran. failed: modules that were not imported. patched: files without originals."""

    probes: tuple[Probe, ...]
    failed: tuple[Note, ...]
    patched: tuple[str, ...]


def verify(path: Path, select: Select = everything) -> Probed:
    """Imports the modules with sites under a path and compares every site. Writes nothing."""
    examined = examine(path, select)
    probes, failed = [], []
    for file in examined.to_patch:
        source = read(examined.folder, file.name)
        if not isinstance(source, Source):
            continue
        try:
            module = _imported(source.path)
        except BaseException as error:  # user code runs here, and may even try to leave
            if isinstance(error, KeyboardInterrupt):
                raise
            failed.append(Note(file.name, f"not imported: {type(error).__name__}: {error}"))
            continue
        resolve = resolver(source.path, examined.folder, {})
        text = rewrite(source.text, file=file.name, resolve=resolve, observe=True).source
        tree = ast.parse(text)
        for owner, call in _calls(tree):
            probes.append(_probe(module, tree, owner, call))
    patched = tuple(file.name for file in examined.files if file.patched)
    return Probed(tuple(probes), tuple(failed), patched)


def _probe(module: ModuleType, tree: ast.Module, owner: ast.ClassDef | None, call: ast.Call) -> Probe:
    kind, keywords = call.func.attr, {one.arg: one.value for one in call.keywords}
    file, _, line = keywords["site"].value.rpartition(":")
    norm, described = None, ""
    if kind != "gated_residual":
        norm, described = _norm(module, tree, owner, call.args[0])
    checker = Checker()
    runtime.set_checker(checker)
    try:
        run = _as_function(module, call)
        for dtype in DTYPES:
            for shape in MODULATIONS:
                run(*_operands(kind, call.args, norm, dtype, shape))
        differences = tuple(f"{one.tensor} {one.error}" for one in checker.differences)
    except Exception as error:  # from foreign code on rows that it was not made for
        differences = (f"the call failed: {type(error).__name__}: {error}",)
    finally:
        runtime.set_checker(None)
    return Probe(file, int(line), kind, described, tuple(dict.fromkeys(differences)))


def _operands(kind: str, given: list[ast.expr], norm: Any, dtype: torch.dtype, modulation: tuple) -> list:
    """Random ones in the place of each that the call has."""
    draws = torch.Generator().manual_seed(len(modulation) + modulation[1])
    rows = 1 if kind == "adaln" else 2
    heads = [] if kind == "gated_residual" else [norm]
    operands = list(heads)
    for number, one in enumerate(given[len(heads) :]):
        absent = isinstance(one, ast.Constant) and one.value is None
        shape = (B, S, D) if number < rows else modulation
        operands.append(None if absent else torch.randn(shape, generator=draws).to(dtype))
    return operands


def _as_function(module: ModuleType, call: ast.Call):
    """The call with its operands as arguments; other names in it stand for a tensor like the first."""
    operands = [f"operand_{number}" for number in range(len(call.args))]
    first = operands[0 if call.func.attr == "gated_residual" else 1]
    names = vars(module) | {RUNTIME: runtime}
    kept = [one for one in call.keywords if one.arg not in ("helpers", "otherwise")]
    keywords = [ast.keyword(one.arg, one.value) for one in kept]
    free = set().union(*(_free_names(one.value) for one in keywords)) - names.keys()
    body = ast.Call(call.func, [ast.Name(name, ast.Load()) for name in operands], keywords)
    inner = ast.Lambda(_arguments(sorted(free)), body)
    outer = ast.Lambda(_arguments(operands), ast.Call(inner, [ast.Name(first, ast.Load())] * len(free), []))
    return eval(compile(ast.fix_missing_locations(ast.Expression(outer)), "<probe>", "eval"), names)


def _free_names(node: ast.AST) -> set[str]:
    """Names in an expression that no lambda around them binds."""
    if isinstance(node, ast.Name):
        return {node.id}
    inner = set().union(*map(_free_names, ast.iter_child_nodes(node)))
    return inner - {one.arg for one in node.args.args} if isinstance(node, ast.Lambda) else inner


def _arguments(names: list[str]) -> ast.arguments:
    return ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])


# norms ----------------------------------------------------------------------------------------------------


def _norm(
    module: ModuleType, tree: ast.Module, owner: ast.ClassDef | None, given: ast.expr
) -> tuple[Any, str]:
    """The norm that the expression stands for, with small sizes, and what it is."""
    if isinstance(given, ast.Call) and ast.unparse(given.func) == f"{RUNTIME}.LayerNormCall":
        return runtime.LayerNormCall((D,), None, None, 1e-6), "F.layer_norm"
    name = ast.unparse(given)
    for method, value in _assigned(tree, owner, given.attr) if isinstance(given, ast.Attribute) else ():
        try:
            norm = eval(
                compile(ast.Expression(value), "<probe>", "eval"), vars(module), _Sizes(module, method)
            )
            fits = isinstance(norm, nn.Module) and norm(torch.zeros(1, D)).shape == (1, D)
            if fits and not isinstance(norm, nn.Identity):
                return norm, f"{name}: {type(norm).__name__}"
        except Exception:  # foreign code, made of guesses
            continue
    stand_in = nn.LayerNorm(D, eps=1e-6, elementwise_affine=False)
    return stand_in, f"{name}: torch's LayerNorm in its place"


def _assigned(
    tree: ast.Module, owner: ast.ClassDef | None, name: str
) -> Iterator[tuple[ast.FunctionDef, ast.expr]]:
    """What `self.name` is assigned in a class or its bases in this module, with the method that does it."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    waiting = [owner] if owner is not None else []
    for cls in waiting:
        waiting += [
            classes[base.id] for base in cls.bases if isinstance(base, ast.Name) and base.id in classes
        ]
        for method in cls.body:
            if not isinstance(method, ast.FunctionDef):
                continue
            for node in ast.walk(method):
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == f"self.{name}":
                    for value in _branches(node.value):
                        yield method, value


def _branches(value: ast.expr) -> list[ast.expr]:
    return [*_branches(value.body), *_branches(value.orelse)] if isinstance(value, ast.IfExp) else [value]


class _Sizes(dict):
    """Names in a constructor: arguments with their defaults; what has none, or says how wide it is, is D."""

    def __init__(self, module: ModuleType, method: ast.FunctionDef) -> None:
        super().__init__()
        self._known = vars(module).keys() | vars(builtins).keys()
        positional = [*method.args.posonlyargs, *method.args.args]
        pairs = [
            *zip(reversed(positional), reversed(method.args.defaults), strict=False),
            *zip(method.args.kwonlyargs, method.args.kw_defaults, strict=True),
        ]
        for argument, default in pairs:
            wide = any(word in argument.arg for word in SIZES)
            if not wide and isinstance(default, ast.Constant) and default.value is not None:
                self[argument.arg] = default.value

    def __missing__(self, name: str) -> Any:
        if name in self._known:
            raise KeyError(name)
        return 1e-6 if "eps" in name else D


# modules --------------------------------------------------------------------------------------------------


def _imported(path: Path) -> ModuleType:
    """The module of a file, imported under its package's name as far as there are packages."""
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    if path.stem == "__init__":
        parts.pop()
    name = ".".join(parts)
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(name) if len(parts) > 1 else _alone(path)
    finally:
        sys.path.remove(str(folder))
    if Path(module.__file__ or "").resolve() != path:
        raise ImportError(f"{name} is imported from {module.__file__}, not from here")
    return module


def _alone(path: Path) -> ModuleType:
    """A file outside of any package, under a name that no other module has."""
    name = f"al_deepspeed probes {path}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def _calls(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | None, ast.Call]]:
    """Calls of the runtime that carry their original, each with the class that it stands in."""
    waiting: list[tuple[ast.ClassDef | None, ast.AST]] = [(None, tree)]
    for owner, node in waiting:
        for child in ast.iter_child_nodes(node):
            waiting.append((child if isinstance(child, ast.ClassDef) else owner, child))
        carries = isinstance(node, ast.Call) and any(one.arg == "original" for one in node.keywords)
        if carries and ast.unparse(node.func).partition(".")[0] == RUNTIME:
            yield owner, node
