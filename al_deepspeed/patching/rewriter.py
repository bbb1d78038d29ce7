"""Source in, source out: AdaLN and gated residuals become calls of the op, everything else stays as written.

    rewrite(source) -> Rewritten(source, sites, left)
Functions are read one by one (flow.py, evaluate.py), matched (patterns.py, candidates.py), and planned so
that nothing with effects moves (plan.py). What looks like AdaLN and is not provably safe stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePath

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from al_deepspeed.patching.candidates import RUNTIME, Candidate, Found, find_candidates
from al_deepspeed.patching.evaluate import Evaluator
from al_deepspeed.patching.flow import Frame
from al_deepspeed.patching.names import Class, Function, Library, Module, Resolve, method, outlined, parsed
from al_deepspeed.patching.nodes import children, descend, is_expression, names_below
from al_deepspeed.patching.norms import Norms
from al_deepspeed.patching.plan import Edits, Planned, plan
from al_deepspeed.patching.quick_look import may_hold_sites
from al_deepspeed.patching.scopes import own_names
from al_deepspeed.patching.sites import Left, Rewritten, Site

IMPORT = f"from al_deepspeed.patching import runtime as {RUNTIME}"
FUSING_DECORATORS = frozenset({"torch.jit.script", "torch.jit.script_if_tracing"})
FUSER = "jit_fuser"  # Megatron's, which scripts too; the op is opaque to TorchScript


def rewrite(
    source: str, *, file: str = "<string>", resolve: Resolve | None = None, observe: bool = False
) -> Rewritten:
    """Rewrite one module.

    Args:
        file: for the report, and the sites' names.
        resolve: dotted module name, as written in the import (with leading dots when relative) -> its source,
            or None when unknown. Helpers and norm classes imported from there are then understood.
        observe: every call also carries its site's name and the original expression, for the contract check.
    Raises:
        libcst.ParserSyntaxError: the source does not parse.
    """
    promising = may_hold_sites(outlined(source), source, resolve)
    if not any(promising):
        return Rewritten(source, (), ())
    tree = parsed(source)
    lines = _Lines(tree, source)
    library = Library(resolve)
    module = Module(source, "", library, tree)
    module.is_package = PurePath(file).name == "__init__.py"
    evaluator = Evaluator(library, Norms())
    edits, sites, left = Edits(), [], []
    rewritten: set[cst.FunctionDef] = set()
    scripted = _scripted_by_calls(tree, module) if "script" in source or FUSER in source else set()
    for (function, name), may_hold in zip(_functions(tree, module), promising, strict=True):
        if not may_hold or _is_rewritten(function.node, source):
            continue
        frame = Frame(function, evaluator)
        frame.run()

        def site_of(candidate: Candidate) -> str | None:
            return f"{file}:{lines[candidate.root]}" if observe else None

        found, planned = _settled(frame, site_of)
        if planned.accepted and scripted.intersection(name.split(".")):
            reason = "it is scripted by a call, and the op is opaque to TorchScript"
            left += [Left(file, lines[c.root], name, reason) for c in planned.accepted]
            continue
        edits.expressions |= planned.edits.expressions
        edits.statements |= planned.edits.statements
        for candidate in planned.accepted:
            text = " ".join(planned.texts[id(candidate)]().split())
            sites.append(Site(candidate.kind, file, lines[candidate.root], name, text))
            rewritten.add(function.node)
        left += [Left(file, lines[c.root], name, c.refused) for c in planned.refused]
        left += [Left(file, lines[node], name, reason) for node, reason in found.near_misses]
    left = list(dict.fromkeys(left))
    sites.sort(key=lambda site: site.line)
    left.sort(key=lambda item: item.line)
    if not sites:
        return Rewritten(source, (), tuple(left))
    unfused = _without_fusing(tree, module, rewritten)
    apply = _Apply(edits, module, unfused)
    body = [s.visit(apply) if unfused & set(descend(s)) else s for s in tree.body]
    result = tree.with_changes(body=body)
    return Rewritten(_with_import(result).code, tuple(sites), tuple(left))


def _function(
    node: cst.FunctionDef,
    module: Module,
    around: Class | Function | None,
    outer: tuple[cst.FunctionDef, ...],
) -> Function:
    """outer: the functions around it."""
    if isinstance(around, Class):
        function = method(node, module, around)
    elif isinstance(around, Function):  # nested: `self` of the method around it is still in sight
        shadowed = around.receiver in own_names(node)
        function = Function(node, module, around.owner, None if shadowed else around.receiver)
    else:
        function = Function(node, module)
    if outer:
        function.seen = frozenset().union(*map(own_names, outer)) - own_names(node)
    return function


def _is_rewritten(node: cst.FunctionDef, source: str) -> bool:
    """Whether the function calls the runtime already; what an earlier rewriting left in it stays left."""
    return RUNTIME in source and any(name.value == RUNTIME for name in names_below(node))


def _settled(frame: Frame, site_of: Callable[[Candidate], str | None]) -> tuple[Found, Planned]:
    """Candidates and plan, once no candidate is refused any more that had not been before."""
    refused: dict[cst.BaseExpression, Candidate] = {}
    while True:
        found = find_candidates(frame, frozenset(refused))
        planned = plan(frame, found.candidates, site_of)
        if not planned.refused:
            return found, replace(planned, refused=list(refused.values()))
        refused |= {candidate.root: candidate for candidate in planned.refused}


class _Lines:
    """First line of a node. LibCST's positions are dear: only of top-level statements that are asked for."""

    def __init__(self, tree: cst.Module, source: str) -> None:
        self.tree = tree
        self.numbers: dict[cst.CSTNode, int] = {}
        self.waiting = dict(zip(tree.body, _first_lines(tree, source), strict=True))

    def __getitem__(self, node: cst.CSTNode) -> int:
        while node not in self.numbers:
            self._add(next(s for s in self.waiting if any(inner is node for inner in descend(s))))
        return self.numbers[node]

    def _add(self, statement: cst.CSTNode) -> None:
        first = self.waiting.pop(statement)
        module = self.tree.with_changes(header=(), body=[statement])
        wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        positions = wrapper.resolve(PositionProvider)
        before = first - positions[getattr(statement, "name", statement)].start.line
        for inner in descend(statement):
            self.numbers[inner] = positions[inner].start.line + before


def _first_lines(tree: cst.Module, source: str) -> list[int]:
    """Where each top-level statement starts: the line of `class` or `def`, not of decorators."""
    starts = iter(outlined(source).body)
    lines = []
    for statement in tree.body:
        count = len(statement.body) if isinstance(statement, cst.SimpleStatementLine) else 1
        lines.append(next(starts).lineno)
        for _ in range(count - 1):
            next(starts)
    return lines


def _functions(tree: cst.Module, module: Module) -> list[tuple[Function, str]]:
    """All functions of the module with their names, methods and nested functions too."""
    found: list[tuple[Function, str]] = []

    def visit(node, names: tuple[str, ...], around: Class | Function | None, outer=()) -> None:
        for child in children(node):
            if type(child) is cst.ClassDef:
                known = module.get("class", child.name.value)
                inner = known if known is not None and known.node is child else None
                visit(child, (*names, child.name.value), inner, outer)
            elif type(child) is cst.FunctionDef:
                path = (*names, child.name.value)
                function = _function(child, module, around, outer)
                found.append((function, ".".join(path)))
                visit(child, path, function, (*outer, child))
            elif not is_expression(type(child)):
                visit(child, names, around, outer)

    visit(tree, (), None)
    return found


def _without_fusing(
    tree: cst.Module, module: Module, rewritten: set[cst.FunctionDef]
) -> set[cst.FunctionDef]:
    """Functions that call the op now, themselves or through others of the file, and cannot be fused."""
    functions = [node for node in descend(tree) if isinstance(node, cst.FunctionDef)]
    fused = [node for node in functions if any(_is_fuser(one, module) for one in node.decorators)]
    called = {node: _called_names(node) for node in fused}
    reached = set(rewritten)
    while True:
        names = {function.name.value for function in reached}
        more = {node for node in fused if node not in reached and called[node] & names}
        if not more:
            return reached
        reached |= more


def _scripted_by_calls(tree: cst.Module, module: Module) -> set[str]:
    """Names of functions and classes given to `torch.jit.script(...)`, and of what those functions call."""
    calls = [node for node in descend(tree) if isinstance(node, cst.Call) and _fuses(node.func, module)]
    given = {name.value for call in calls for argument in call.args for name in names_below(argument.value)}
    functions = [node for node in descend(tree) if isinstance(node, cst.FunctionDef)] if given else []
    while True:
        more = set().union(*(_called_names(f) for f in functions if f.name.value in given)) - given
        if not more:
            return given
        given |= more


def _called_names(node: cst.CSTNode) -> set[str]:
    calls = [call.func for call in descend(node) if isinstance(call, cst.Call)]
    last = [func.attr if isinstance(func, cst.Attribute) else func for func in calls]
    return {name.value for name in last if isinstance(name, cst.Name)}


def _is_fuser(decorator: cst.Decorator, module: Module) -> bool:
    return _fuses(decorator.decorator, module)


def _fuses(node: cst.BaseExpression, module: Module) -> bool:
    name = module.qualified(node) or ""
    return name in FUSING_DECORATORS or name.rpartition(".")[2] == FUSER


class _Apply(cst.CSTTransformer):
    """Puts the new expressions and statements in place of the old, node by node."""

    def __init__(self, edits: Edits, module: Module, unfused: set[cst.FunctionDef]) -> None:
        super().__init__()
        self.edits, self.module, self.unfused = edits, module, unfused

    def on_visit(self, node):
        if node in self.edits.expressions or self.edits.statements.get(node) is not None:
            return False
        return super().on_visit(node)

    def on_leave(self, original, updated):
        if original in self.edits.expressions:
            return self.edits.expressions[original]()
        if original in self.edits.statements:
            build = self.edits.statements[original]
            return cst.RemoveFromParent() if build is None else build()
        return super().on_leave(original, updated)

    def leave_IndentedBlock(self, original_node, updated_node):
        return self._with_comments(original_node, updated_node)

    def _with_comments(self, original_node, updated_node):
        """Comments above a statement that goes stand above what follows it."""
        kept = [s for s in original_node.body if self.edits.statements.get(s, s) is not None]
        if len(kept) == len(original_node.body) or len(kept) != len(updated_node.body):
            return updated_node
        new = dict(zip(kept, updated_node.body, strict=True))
        body, waiting = [], []
        for statement in original_node.body:
            if statement not in new:
                waiting += statement.leading_lines
                continue
            line = new[statement]
            if any(empty.comment is not None for empty in waiting):
                line = line.with_changes(leading_lines=[*waiting, *line.leading_lines])
            waiting = []
            body.append(line)
        return updated_node.with_changes(body=body)

    def leave_FunctionDef(self, original_node, updated_node):
        if original_node not in self.unfused:
            return updated_node
        kept = [d for d in updated_node.decorators if not _is_fuser(d, self.module)]
        if len(kept) == len(updated_node.decorators):
            return updated_node
        return updated_node.with_changes(decorators=kept)


def _with_import(tree: cst.Module) -> cst.Module:
    """The import line, behind the docstring and the `from __future__` lines; once."""
    if any(_text(statement) == IMPORT for statement in tree.body):
        return tree
    position = 0
    for index, statement in enumerate(tree.body):
        first = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
        text = getattr(first, "value", None)
        docstring = index == 0 and isinstance(text, cst.SimpleString | cst.ConcatenatedString)
        future = isinstance(first, cst.ImportFrom) and getattr(first.module, "value", "") == "__future__"
        if not (docstring or future):
            break
        position = index + 1
    blank = [cst.EmptyLine(indent=False)] if position else []
    line = cst.parse_statement(IMPORT).with_changes(leading_lines=blank)
    return tree.with_changes(body=[*tree.body[:position], line, *tree.body[position:]])


def _text(statement: cst.CSTNode) -> str:
    if not isinstance(statement, cst.SimpleStatementLine):
        return ""
    return cst.Module([]).code_for_node(statement.with_changes(leading_lines=[])).strip()
