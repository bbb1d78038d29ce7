"""Which candidates can be rewritten safely, where their calls go, and which statements fall away.

The call stands where the last operation stood; the call of residual_adaln where the sum stood, because the
sum may be used between the two. A statement whose result only fed the replaced expression goes; when an
operand with effects was computed in it, it stays and binds that operand: `y = gate * self.mlp(n)` becomes
`y = self.mlp(n)`, so no call with effects ever moves. What cannot be written that way is refused, with the
reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import libcst as cst

from al_deepspeed.patching.calls import build_call, operands
from al_deepspeed.patching.candidates import Candidate
from al_deepspeed.patching.changes import changed_between
from al_deepspeed.patching.flow import Frame
from al_deepspeed.patching.nodes import descend, names_below
from al_deepspeed.patching.rendering import Renderer, Unavailable, bare
from al_deepspeed.patching.values import (
    Attribute,
    Cast,
    Definition,
    Normed,
    Place,
    Product,
    Sum,
    Value,
    meaning,
)

LEAVING = (cst.Return, cst.Raise, cst.Break, cst.Continue)


@dataclass
class Edits:
    """expressions: node -> builder. statements: what a statement line becomes (None: it goes)."""

    expressions: dict[cst.BaseExpression, Callable[[], cst.BaseExpression]] = field(default_factory=dict)
    statements: dict[cst.CSTNode, Callable[[], cst.CSTNode] | None] = field(default_factory=dict)


@dataclass
class Planned:
    accepted: list[Candidate]
    refused: list[Candidate]
    edits: Edits
    texts: dict[int, Callable[[], str]]


def plan(frame: Frame, candidates: list[Candidate], site_of: Callable[[Candidate], str | None]) -> Planned:
    """Accepts candidates until nothing changes any more; every refusal can make others impossible."""
    accepted, refused = list(candidates), []
    while True:
        planner = _Planner(frame, accepted, site_of)
        failed = planner.run()
        if failed is None:
            return Planned(accepted, refused, planner.edits, planner.texts)
        candidate, reason = failed
        position = accepted.index(candidate)
        accepted[position : position + 1] = _instead(candidate)
        if len(accepted) == len(candidates) or candidate not in accepted:
            candidate.refused = reason
        if candidate.kind != "residual_adaln":
            refused.append(candidate)
        candidates = accepted


def _instead(candidate: Candidate) -> list[Candidate]:
    """A residual_adaln that cannot be one call may still be two."""
    if candidate.kind != "residual_adaln":
        return []
    parts = []
    residual, modulated = candidate.residual, candidate.modulated
    own = residual.sum.frame.caller is None  # a helper's sum is the helper's site
    if residual.gate is not None and candidate.sum_root is not None and own:
        place = residual.sum.place
        value = residual.sum.frame.values[candidate.sum_root]
        parts.append(Candidate("gated_residual", place, candidate.sum_root, value, None, residual))
    if modulated.scale is not None or modulated.shift is not None:
        parts.append(Candidate("adaln", candidate.place, candidate.root, candidate.value, modulated))
    return parts


class _Planner:
    """One attempt with a fixed set of candidates."""

    def __init__(self, frame: Frame, accepted: list[Candidate], site_of) -> None:
        self.frame, self.accepted, self.site_of = frame, accepted, site_of
        self.edits = Edits()
        self.texts: dict[int, Callable[[], str]] = {}
        self.consumed = {name for c in accepted for _, name in c.absorbed}
        self.removed: dict[Definition, Value | None] = {}
        self.temporaries = 0

    def run(self) -> tuple[Candidate, str] | None:
        """The first candidate that cannot be, with the reason; None when all can."""
        self._absorb()
        for candidate in self.accepted:
            reason = self._obstacle(candidate) or changed_between(self.frame, candidate)
            if reason:
                return candidate, reason
        for candidate in self.accepted:
            try:
                self._place(candidate)
            except Unavailable as problem:
                return candidate, str(problem)
        for definition, held in self.removed.items():
            self._remove(definition, held)
        for candidate in self.accepted:
            try:
                self.texts[id(candidate)]()
            except Unavailable as problem:
                return candidate, str(problem)
        return None

    # What falls away ------------------------------------------------------------------------------------

    def _absorb(self) -> None:
        """Definitions go that nothing reads any more but expressions that go themselves."""
        replaced: set[cst.Name] = set()
        for candidate in self.accepted:
            roots = [candidate.root, candidate.sum_root]
            if candidate.sum_definition is not None:
                roots.append(candidate.sum_definition.value.node)
            replaced = replaced.union(*(names_below(root) for root in roots if root is not None))
            for definition, _ in candidate.absorbed:
                if self._may_go(definition, candidate):
                    self.removed[definition] = None
        while True:
            gone = replaced | self._gone()
            kept = [one for one in self.removed if any(read not in gone for read in one.reads)]
            if not kept:
                return
            for definition in kept:
                del self.removed[definition]

    def _obstacle(self, candidate: Candidate) -> str | None:
        if candidate.residual is not None and candidate.residual.sum.in_place:
            return "the residual is added in place (+=), which others may see"
        if candidate.modulated is not None:
            norm = candidate.modulated.norm.norm
            if isinstance(norm, Attribute) and norm.name == "forward":
                return "the norm is the class's own base"
        for definition, _ in candidate.absorbed:
            if definition in self.removed:
                continue
            if self.frame.around(definition.place) != self.frame.around(candidate.place):
                return f"{definition.name}, a step of it, is computed under another `with`"
            if _is_heavy(definition.value):
                return f"{definition.name}, a step of it, is used elsewhere too, or bound in another block"
        return None

    def _may_go(self, definition: Definition, candidate: Candidate) -> bool:
        return (
            definition.statement is not None
            and not definition.foreign
            and definition.name not in self.frame.held_back
            and definition.place.block == candidate.place.block
            and definition.place.block not in self.frame.fixed_blocks
            and all(read in self.consumed for read in definition.reads)
        )

    # Where the call goes --------------------------------------------------------------------------------

    def _place(self, candidate: Candidate) -> None:
        if candidate.kind == "residual_adaln" and candidate.sum_definition is not None:
            self._place_pair(candidate)
            return
        renderer = self._renderer(candidate.place, (candidate.root,))
        call = self._call(candidate, renderer)
        if candidate.kind == "residual_adaln":
            self.edits.expressions[candidate.root] = lambda: _second(call())
        else:
            self.edits.expressions[candidate.root] = call
        self.texts[id(candidate)] = lambda: _code(call())

    def _place_pair(self, candidate: Candidate) -> None:
        definition = candidate.sum_definition
        if definition.statement is None or definition.place.block in self.frame.fixed_blocks:
            raise Unavailable("the residual sum is not a statement of its own")
        if _is_conditional(self.frame.statements[candidate.place], candidate.root):
            raise Unavailable("the norm is one branch of an expression")
        before = dict(self.removed)
        try:
            self._place_at_sum(candidate)
        except Unavailable:
            self.removed = before
            self._place_at_norm(candidate)

    def _may_leave_between(self, first: Place, last: Place) -> bool:
        """Whether a statement between two of a block can leave it, and what follows may not run."""
        between = [
            statement
            for place, statement in self.frame.statements.items()
            if place.block == first.block and first.index < place.index < last.index
        ]
        inside = [node for statement in between for node in descend(statement, (cst.FunctionDef, cst.Lambda))]
        return any(isinstance(node, LEAVING) for node in inside)

    def _place_at_sum(self, candidate: Candidate) -> None:
        definition = candidate.sum_definition
        if self._may_leave_between(definition.place, candidate.place):
            raise Unavailable("the function may return between the residual sum and the norm")
        renderer = self._renderer(definition.place, (definition.value.node, candidate.root))
        call = self._call(candidate, renderer)
        used_after = self._remaining_reads(candidate)
        target = self._target(candidate)
        own_line = target is not None
        target = target if own_line else self._temporary()
        if used_after and target == definition.name:
            raise Unavailable("its result takes the residual's name while the residual is still in use")
        if own_line:
            self.edits.statements[self.frame.statements[candidate.place]] = None
        else:
            self.edits.expressions[candidate.root] = lambda: cst.Name(target)
        names = [definition.name, target] if used_after else [target]
        self.edits.statements[definition.statement] = lambda: _assignment(definition.statement, names, call())
        self.texts[id(candidate)] = lambda: _code(call())

    def _place_at_norm(self, candidate: Candidate) -> None:
        """Where the norm stands, for shifts and scales that are computed after the sum."""
        definition, place = candidate.sum_definition, candidate.place
        line = self.frame.statements[place]
        gone = self._gone() | names_below(candidate.root)
        for read in definition.reads:
            inside = [p for p in self.frame.paths[read] if p.block == place.block and p.index < place.index]
            if inside and read not in gone:
                raise Unavailable("the residual is used before the shift and scale are there")
        if definition.foreign or definition.name in self.frame.held_back or _simple_target(line) is None:
            raise Unavailable("the shift and scale are computed after the residual sum")
        if _simple_target(line)[1] is not candidate.root:
            raise Unavailable("the norm's expression is part of a larger one, after its shift and scale")
        target = _simple_target(line)[0]
        used_after = self._remaining_reads(candidate)
        if used_after and target == definition.name:
            raise Unavailable("its result takes the residual's name while the residual is still in use")
        self.removed[definition] = None
        call = self._call(candidate, self._renderer(place, (candidate.root,)))
        names = [definition.name, target] if used_after else [target]
        self.edits.statements[line] = lambda: _assignment(line, names, call())
        self.texts[id(candidate)] = lambda: _code(call())

    def _call(self, candidate: Candidate, renderer: Renderer) -> Callable[[], cst.Call]:
        """A builder that keeps operands with effects in the statements that compute them."""

        def build() -> cst.Call:
            for _ in range(8):
                try:
                    return build_call(candidate, renderer, self.site_of(candidate))
                except Unavailable as problem:
                    if problem.value is None or not self._hold(candidate, problem.value):
                        raise
            raise Unavailable("its operands cannot be told apart")

        build()
        return build

    def _hold(self, candidate: Candidate, value: Value) -> bool:
        """Lets a statement that would go bind this operand instead."""
        if not any(operand is not None and operand.value is value for _, operand in operands(candidate)):
            return False
        for definition, _ in candidate.absorbed:
            if definition.place == value.place and self.removed.get(definition, value) is None:
                self.removed[definition] = value
                return True
        return False

    def _remaining_reads(self, candidate: Candidate) -> bool:
        """Whether the new residual is read anywhere but in what the call replaces."""
        definition = candidate.sum_definition
        if definition.foreign:
            return True
        gone = self._gone()
        gone |= names_below(candidate.root)
        return any(read not in gone for read in definition.reads)

    def _gone(self) -> set[cst.Name]:
        gone: set[cst.Name] = set()
        for definition, held in self.removed.items():
            if held is None and definition.value is not None:
                gone |= names_below(definition.value.node)
        return gone

    def _target(self, candidate: Candidate) -> str | None:
        """The name of `name = y`, when it can take y where the sum stands: nobody needs it until then."""
        found = _simple_target(self.frame.statements[candidate.place])
        if found is None or found[1] is not candidate.root or found[0] in self.frame.held_back:
            return None
        name, first, last = found[0], candidate.sum_definition.place, candidate.place
        if name == candidate.sum_definition.name:
            return name if not self._remaining_reads(candidate) else None
        before = self._current(self.frame.snapshots[first].get(name))
        after = self._current(self.frame.snapshots[last].get(name))
        if before is not after:
            return None
        gone = self._gone() | names_below(candidate.root)
        for read in before.reads if before is not None else ():
            inside = [
                p
                for p in self.frame.paths[read]
                if p.block == first.block and first.index < p.index <= last.index
            ]
            if inside and read not in gone:
                return None
        return name

    def _current(self, definition: Definition | None) -> Definition | None:
        while definition is not None and definition in self.removed and self.removed[definition] is None:
            definition = definition.previous
        return definition

    def _temporary(self) -> str:
        self.temporaries += 1
        taken = {definition.name for definition in self.frame.definitions}
        while True:
            name = "_al_normed" if self.temporaries == 1 else f"_al_normed_{self.temporaries}"
            if name not in taken:
                return name
            self.temporaries += 1

    # Statements that go or change -----------------------------------------------------------------------

    def _remove(self, definition: Definition, held: Value | None) -> None:
        line = definition.statement
        if line in self.edits.statements:
            return
        if held is None:
            self.edits.statements[line] = None
            return
        renderer = self._renderer(definition.place, (definition.value.node,))
        self.edits.expressions[definition.value.node] = lambda: bare(renderer.value(held))

    def _renderer(self, place: Place, roots: tuple) -> Renderer:
        return Renderer(self.frame, place, roots, self.removed, self.edits.expressions)


def _is_conditional(statement: cst.CSTNode, root: cst.BaseExpression) -> bool:
    """Whether the expression is evaluated only if another one in its statement comes out that way."""
    parts = []
    for node in descend(statement):
        if isinstance(node, cst.IfExp):
            parts += [node.body, node.orelse]
        elif isinstance(node, cst.BooleanOperation):
            parts.append(node.right)
        elif isinstance(node, cst.Comparison):
            parts += [target.comparator for target in node.comparisons[1:]]
    return any(inner is root for part in parts for inner in descend(part))


def _is_heavy(value: Value | None) -> bool:
    """Whether computing it twice would cost a pass over the activations."""
    if value is None:
        return True
    value = meaning(value)
    while isinstance(value, Cast):
        value = meaning(value.base)
    return isinstance(value, Normed | Product | Sum)


def _simple_target(line: cst.CSTNode) -> tuple[str, cst.BaseExpression] | None:
    """(name, expression) when the statement is `name = expression`."""
    small = line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None
    if not (isinstance(small, cst.Assign) and len(small.targets) == 1):
        return None
    target = small.targets[0].target
    return (target.value, small.value) if isinstance(target, cst.Name) else None


def _second(call: cst.Call) -> cst.Subscript:
    return cst.Subscript(call, [cst.SubscriptElement(cst.Index(cst.Integer("1")))])


def _code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def _assignment(line: cst.SimpleStatementLine, names: list[str], call: cst.Call) -> cst.SimpleStatementLine:
    """`residual, y = call`, or `y = call[1]`, in place of the line."""
    if len(names) == 1:
        target, value = cst.Name(names[0]), _second(call)
    else:
        target, value = cst.Tuple([cst.Element(cst.Name(name)) for name in names], lpar=[], rpar=[]), call
    return line.with_changes(body=[cst.Assign([cst.AssignTarget(target)], value)])
