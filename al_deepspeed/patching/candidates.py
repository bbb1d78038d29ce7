"""Expressions of a function that could become calls of the op, and why a sum counts as a gated residual.

`a + b * c` is written for many things: guidance, noise, rotations, layer scale. It is taken for a gated
residual only with evidence: a gate that is called one or comes from where this function's shifts and scales
come from, a branch that is a module's output computed from the residual, or a norm that reads the sum next.
"""

from __future__ import annotations

import builtins
import sys
from dataclasses import dataclass, field

import libcst as cst

from al_deepspeed.patching.flow import Frame
from al_deepspeed.patching.helpers import why_unread
from al_deepspeed.patching.nodes import children
from al_deepspeed.patching.patterns import (
    Modulated,
    NoMatch,
    Residual,
    Trail,
    is_item,
    is_scaled_norm,
    match_modulated,
    match_norm,
    match_sum,
    modulates_in_place,
    origin,
    reads_as_modulation,
)
from al_deepspeed.patching.values import (
    Attribute,
    Cast,
    Definition,
    Global,
    Held,
    Inlined,
    Opaque,
    Place,
    Read,
    Scalar,
    Sum,
    Value,
    View,
    canonical,
    depends_on,
    is_receiver,
    meaning,
    same,
)

RUNTIME = "_al_adaln"  # what rewritten modules call the runtime
IN_PLACE = "the norm is modulated in place"
NOT_ONE_PLUS = "the norm is multiplied by something that is not 1 + scale"


@dataclass(eq=False)
class Candidate:
    """kind: as in Site. root: the expression that the call replaces (y, or the sum).

    sum_definition: for residual_adaln, the name that the sum was bound to; None when the sum is part of the
        norm's own expression. sum_root: the sum's expression.
    refused: why it stays as it is.
    """

    kind: str
    place: Place
    root: cst.BaseExpression
    value: Value
    modulated: Modulated | None = None
    residual: Residual | None = None
    sum_definition: Definition | None = None
    refused: str = ""
    sum_root: cst.BaseExpression | None = None

    @property
    def trail(self) -> Trail:
        parts = (self.modulated, self.residual)
        return Trail().merged(*(part.trail for part in parts if part is not None))

    @property
    def absorbed(self) -> list[tuple[Definition, cst.Name]]:
        return self.trail.absorbed

    @property
    def helpers(self) -> list[Held]:
        """Methods and modules that it was found through, each once."""
        kept: list[Held] = []
        for one in self.trail.helpers:
            if not any(one.name == other.name and same(one.holder, other.holder) for other in kept):
                kept.append(one)
        return kept


@dataclass
class Found:
    candidates: list[Candidate] = field(default_factory=list)
    near_misses: list[tuple[cst.BaseExpression, str]] = field(default_factory=list)


def find_candidates(frame: Frame, refused: frozenset[cst.BaseExpression] = frozenset()) -> Found:
    """All candidates but those at `refused` expressions, so that what they had taken up can be found."""
    found = Found()
    for place, root in frame.roots:
        _visit(frame, place, root, found, set(refused))
    _drop_superseded(found)
    origins = _origins(found)
    _join_residuals(found, origins)
    _keep_gated(frame, found, origins)
    for node, value in frame.augmented:
        if modulates_in_place(value):
            found.near_misses.append((node, IN_PLACE))
        residual = match_sum(value) if isinstance(value, Sum) else None
        if residual is not None and residual.gate is not None and is_gated(residual, origins):
            found.near_misses.append((node, "the residual is added in place (+=), which others may see"))
    return found


def _origins(found: Found) -> list[Value]:
    """What the function's shifts and scales were taken from."""
    operands = [
        operand
        for candidate in found.candidates
        if candidate.modulated is not None
        for operand in (candidate.modulated.scale, candidate.modulated.shift)
    ]
    return [origin(operand.value) for operand in operands if operand is not None]


def _visit(frame: Frame, place: Place, node: cst.CSTNode, found: Found, part_of: set) -> None:
    """Outermost expressions first; what belongs to a match is not matched again."""
    value = frame.values.get(node)
    if value is None and reads_as_modulation(node):
        found.near_misses.append((node, "it stands in a lambda or comprehension"))
    if modulates_in_place(value):
        found.near_misses.append((node, IN_PLACE))
    if (reason := why_unread(value)) is not None:
        found.near_misses.append((node, reason))
    if value is not None and node not in part_of:
        candidate = _match(place, node, value, found)
        if candidate is not None:
            found.candidates.append(candidate)
            for match in (candidate.modulated, candidate.residual):
                part_of = part_of if match is None else part_of | match.trail.nodes
    # An expression in an f-string cannot hold quotes of its kind.
    for child in () if type(node) is cst.FormattedString else children(node):
        _visit(frame, place, child, found, part_of)


def _match(place: Place, node, value: Value, found: Found) -> Candidate | None:
    if isinstance(value, Read):
        return None
    try:
        modulated = match_modulated(value)
    except NoMatch as reason:
        found.near_misses.append((node, str(reason)))
        return None
    if modulated is not None:
        return Candidate("adaln", place, node, value, modulated)
    norm = match_norm(value)
    if norm is not None:
        return Candidate("norm", place, node, value, norm)
    residual = match_sum(value)
    return None if residual is None else Candidate("sum", place, node, value, None, residual)


def _drop_superseded(found: Found) -> None:
    """A match that is an intermediate step of a later one: `n = norm(x) * (1 + scale)`, then `n + shift`."""
    inner = {id(meaning(step)) for c in found.candidates if c.modulated for step in _steps(c)}
    found.candidates = [c for c in found.candidates if id(c.value) not in inner or c.kind == "sum"]


def _steps(candidate: Candidate) -> list[Value]:
    return [definition.value for definition, _ in candidate.absorbed if definition.value is not None]


# Residual sums and the norms that read them ---------------------------------------------------------------


def _join_residuals(found: Found, origins: list[Value]) -> None:
    joined: list[Sum] = []
    for candidate in found.candidates:
        if candidate.modulated is None:
            continue
        definition, residual = _sum_read_by(candidate.modulated)
        if residual is None or any(residual.sum is other for other in joined):
            continue
        if definition is not None and definition.place.block != candidate.place.block:
            continue
        if not _orient(residual, origins):
            continue
        joined.append(residual.sum)
        candidate.kind, candidate.residual, candidate.sum_definition = "residual_adaln", residual, definition
        candidate.sum_root = residual_root(found, residual)
    found.candidates = [c for c in found.candidates if c.kind != "norm"]


def residual_root(found: Found, residual: Residual) -> cst.BaseExpression | None:
    for candidate in found.candidates:
        if candidate.kind == "sum" and candidate.residual.sum is residual.sum:
            return candidate.root
    return None


def _sum_read_by(modulated: Modulated) -> tuple[Definition | None, Residual | None]:
    """The residual sum that the norm reads: through the name it is bound to, or in place."""
    x = modulated.x
    if isinstance(x, Read) and x.frame.caller is None:
        definition = canonical(x.definition)
        if definition.value is None or definition is not x.definition:
            return None, None
        return definition, _residual_sum(definition.value)
    return None, _residual_sum(x)


def _residual_sum(value: Value) -> Residual | None:
    try:
        return match_sum(value) if match_modulated(value) is None else None
    except NoMatch:
        return None


def _orient(residual: Residual, origins: list[Value]) -> bool:
    """Decides which term is what; False when the sum is no residual connection."""
    if residual.gate is not None:
        return is_gated(residual, origins) or _is_scaled_branch(residual)
    left, right = residual.residual, residual.branch
    for stream, branch in ((left, right), (right, left)):
        if is_module_output(branch) and depends_on(branch, stream):
            residual.residual, residual.branch = stream, branch
            return True
    for stream, branch in ((left, right), (right, left)):
        if "residual" in name_of(stream) and not isinstance(meaning(branch), Scalar):
            residual.residual, residual.branch = stream, branch
            return True
    return False


# Gates ----------------------------------------------------------------------------------------------------


def _keep_gated(frame: Frame, found: Found, origins: list[Value]) -> None:
    """Sums with evidence of a gate stay as gated_residual; sums that a norm's call makes are part of that."""
    made = [c.residual.sum for c in found.candidates if c.kind == "residual_adaln"]
    kept = []
    for candidate in found.candidates:
        if candidate.kind != "sum":
            kept.append(candidate)
            continue
        residual = candidate.residual
        if any(residual.sum is other for other in made) or residual.sum.frame is not frame:
            continue  # part of a norm's call, or a helper's own site
        if residual.gate is None:
            continue
        if not is_gated(residual, origins):
            if is_scaled_norm(residual):
                found.near_misses.append((candidate.root, NOT_ONE_PLUS))
            continue
        candidate.kind = "gated_residual"
        kept.append(candidate)
    found.candidates = kept


def is_gated(residual: Residual, origins: list[Value]) -> bool:
    one, other = residual.branch, residual.gate
    if any(isinstance(meaning(term), Scalar) for term in (one, other, residual.residual)):
        return False
    for gate, branch in ((other, one), (one, other)):
        named = "gate" in name_of(gate) and "gate" not in name_of(branch)
        if named and (is_item(gate) or not depends_on(gate, residual.residual)):
            residual.gate, residual.branch = gate, branch
            return True
    for gate, branch in ((other, one), (one, other)):
        source = origin(gate)
        if is_item(gate) and any(same(source, known) for known in origins):
            residual.gate, residual.branch = gate, branch
            return True
    for gate, branch in ((other, one), (one, other)):
        stream = residual.residual
        if is_item(gate) and is_module_output(branch) and depends_on(branch, stream):
            residual.gate, residual.branch = gate, branch
            return True
    return False


def _is_scaled_branch(residual: Residual) -> bool:
    """stream + something * f(stream), for a sum that a norm reads; layer scale is left out."""
    one, other = residual.branch, residual.gate
    for gate, branch in ((other, one), (one, other)):
        if is_module_output(branch) and depends_on(branch, residual.residual):
            residual.gate, residual.branch = gate, branch
            return not isinstance(origin(gate), Attribute | Scalar)
    return False


def name_of(value: Value) -> str:
    """The names by which a value is called, below views and casts."""
    names = []
    while True:
        if isinstance(value, Read):
            names.append(value.definition.name)
            if value.definition.value is None:
                break
            value = value.definition.value
        elif isinstance(value, Inlined):
            value = value.result
        elif isinstance(value, View | Cast):
            value = value.base
        elif isinstance(value, Attribute | Global):
            names.append(value.name)
            break
        else:
            break
    return " ".join(names).lower()


def is_module_output(value: Value) -> bool:
    """The result of calling a module or an unknown function, or one of its results, below views and casts."""
    for _ in range(50):
        value = origin(value)
        if not (isinstance(value, Opaque) and value.called):
            return False
        callee = value.inner[0] if value.inner else None
        if callee is not None and _makes_no_branch(callee):
            return False
        if isinstance(callee, Attribute) and isinstance(callee.base, Read):
            return is_receiver(callee.base)  # otherwise a method of a tensor
        return True
    return False


def _makes_no_branch(callee: Value) -> bool:
    """A function of Python itself, which makes numbers, or of the runtime, which stands for arithmetic."""
    name = callee.frame.module.qualified(callee.node)
    root = callee
    while isinstance(root, Attribute):
        root = root.base
    if name is None or not isinstance(root, Global):
        return False
    first = name.partition(".")[0]
    if root.name == RUNTIME:
        return True
    return first in sys.stdlib_module_names or (name == first and hasattr(builtins, name))
