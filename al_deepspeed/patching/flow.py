"""Walks the statements of a function: blocks, what names are bound to where, and what reads what.

Each suite (a function's body, a branch, a loop's or `with` body) is a block of its own. After a branch or
loop, names bound inside are merges. Whatever is read where this walk does not follow (closures, merges that
are read) marks its definitions as read elsewhere, so that no statement behind them is ever removed.
"""

from __future__ import annotations

import libcst as cst

from al_deepspeed.patching.names import Function
from al_deepspeed.patching.scopes import free_names, names_bound_in, names_in, target_names
from al_deepspeed.patching.values import Definition, Item, Opaque, Place, Value, is_receiver

LETS_ERRORS_OUT = frozenset(["autocast", "nullcontext", "record_function", "range", "annotate"])


class Frame:
    """One function under evaluation, or one helper seen through at one call.

    reads: the definition that a Name node read. values: what an expression node computes.
    roots: the outermost expressions of the statements, in order of evaluation.
    snapshots: the names as they were when a statement began.
    effects: in order, (statement and those around it, what, values): "in place" changes, and calls with what
        was passed to them: of a function nested here ("closure"), a "method", or any other "call".
    marks: how many effects had happened when an expression's value was there.
    """

    def __init__(self, function: Function, evaluator, caller: Frame | None = None) -> None:
        self.function, self.evaluator, self.caller = function, evaluator, caller
        self.module, self.owner = function.module, function.owner
        self.names: dict[str, Definition] = {}
        self.definitions: list[Definition] = []
        self.reads: dict[cst.Name, Definition] = {}
        self.paths: dict[cst.Name, tuple[Place, ...]] = {}  # the statements around each read, outermost first
        self.values: dict[cst.BaseExpression, Value] = {}
        self.roots: list[tuple[Place, cst.BaseExpression]] = []
        self.augmented: list[tuple[cst.BaseExpression, Value]] = []  # what `x += node` makes of x
        self.returned: list[cst.BaseExpression] = []
        self.snapshots: dict[Place, dict[str, Definition]] = {}
        self.statements: dict[Place, cst.CSTNode] = {}
        self.effects: list[tuple[tuple[Place, ...], str, tuple[Value, ...]]] = []
        self.marks: dict[cst.CSTNode, int] = {}
        self.blocks = 0
        self.surroundings: list[cst.CSTNode] = []  # the `with` statements and loops around the statement
        self.surrounding: dict[int, tuple[cst.CSTNode, ...]] = {}  # those around a block
        self.stack: list[Place] = []  # the statement under evaluation, below those that hold its block
        self.held_back: set[str] = set()  # names whose statements stay: global, nonlocal, read by closures
        self.of_module: set[str] = set()  # names declared global
        self.loops: list[tuple[list[dict], list[dict]]] = []  # around the statement: names at break, continue
        self.fixed_blocks: set[int] = set()  # bodies of try: an exception can leave them anywhere
        self.stored_attributes: set[str] = set()

    @property
    def place(self) -> Place:
        return self.stack[-1] if self.stack else Place(0, -1)

    def around(self, place: Place, kinds: tuple[type, ...] = (cst.With,)) -> list[cst.CSTNode]:
        """The `with` statements around a place, or other statements."""
        return [node for node in self.surrounding.get(place.block, ()) if isinstance(node, kinds)]

    # Names ----------------------------------------------------------------------------------------------

    def bind(self, name: str, value: Value | None, statement=None, parameter: bool = False) -> Definition:
        definition = Definition(
            name, self.place, value, self.names.get(name), statement=statement, parameter=parameter
        )
        self.names[name] = definition
        self.definitions.append(definition)
        return definition

    def bind_target(self, target: cst.CSTNode, value: Value | None, statement=None) -> None:
        if isinstance(target, cst.Name):
            self.bind(target.value, value, statement)
        elif isinstance(target, cst.Tuple | cst.List):
            starred = any(isinstance(element, cst.StarredElement) for element in target.elements)
            for index, element in enumerate(target.elements):
                item = self._part(value, index, target)
                if item is None and value is not None and not isinstance(element, cst.StarredElement):
                    item = Item(element.value, self, self.place, value, None if starred else index)
                self.bind_target(element.value, item)
        elif isinstance(target, cst.Attribute):
            holder = self.evaluator.evaluate(self, target.value)
            self.stored_attributes.add(target.attr.value)
            if not is_receiver(holder):  # `x.data = ...`, `self.norm.eps = ...`
                self.record("in place", (holder,))
        elif isinstance(target, cst.Subscript):
            changed = self.evaluator.evaluate(self, target.value)
            for element in target.slice:
                self.evaluator.children(self, element)
            self.record("in place", (changed,))

    def _part(self, value: Value | None, index: int, target: cst.Tuple | cst.List) -> Value | None:
        """The element that a name gets in `a, b = x, y`."""
        if not (isinstance(value, Opaque) and isinstance(value.node, cst.Tuple)):
            return None
        elements = value.node.elements
        starred = any(isinstance(e, cst.StarredElement) for e in (*elements, *target.elements))
        return None if starred or len(elements) != len(target.elements) else value.inner[index]

    def record(self, what: str, values: tuple[Value, ...]) -> None:
        self.effects.append((tuple(self.stack), what, values))

    def unbind(self, target: cst.CSTNode) -> None:
        """What `del` does."""
        self.evaluator.evaluate(self, target)
        if isinstance(target, cst.Name):
            self.bind(target.value, None)
        elif isinstance(target, cst.Tuple | cst.List):
            for element in target.elements:
                self.unbind(element.value)
        else:
            self.record("in place", (self.evaluator.evaluate(self, target.value),))

    def keep(self, *nodes: cst.CSTNode | None) -> None:
        """Names in expressions that this walk does not follow keep what they are bound to."""
        for name in set().union(*(names_in(node) for node in nodes if node is not None)):
            if name in self.names:
                self.names[name].read_elsewhere()

    # Blocks ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        node = self.function.node
        for name in self.function.seen:
            self.bind(name, None, parameter=name == self.function.receiver)
            self.held_back.add(name)
        parameters = node.params
        for parameter in (*parameters.posonly_params, *parameters.params, *parameters.kwonly_params):
            self.bind(parameter.name.value, None, parameter=True)
        for extra in (parameters.star_arg, parameters.star_kwarg):
            if isinstance(extra, cst.Param):
                self.bind(extra.name.value, None, parameter=True)
        self.block(node.body)
        by_name = names_in(node.body) & {"locals", "vars", "eval", "exec"}
        for definition in self.definitions:
            if by_name or definition.name in self.held_back:
                definition.read_elsewhere()

    def block(self, body: cst.BaseSuite, fixed: bool = False) -> bool:
        """Evaluates a suite in the names as they are; whether its end is never reached."""
        self.blocks += 1
        number = self.blocks
        self.surrounding[number] = tuple(self.surroundings)
        if fixed or any(place.block in self.fixed_blocks for place in self.stack):
            self.fixed_blocks.add(number)
        ends, lines = False, {}
        for statement in body.body:
            if isinstance(statement, cst.SimpleStatementLine):
                lines |= dict.fromkeys(statement.body, statement)  # each has a place
            else:
                lines[statement] = statement
        for index, (statement, line) in enumerate(lines.items()):
            place = Place(number, index)
            self.stack.append(place)
            self.snapshots[place] = dict(self.names)
            self.statements[place] = line
            if isinstance(statement, cst.BaseSmallStatement):  # `if x: a = b` has no line of its own
                alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
                ends |= self._simple(statement, line if alone else None)
            else:
                self._compound(statement)
            self.stack.pop()
        return ends

    def _root(self, node: cst.BaseExpression) -> Value:
        self.roots.append((self.place, node))
        return self.evaluator.evaluate(self, node)

    def _simple(self, node: cst.BaseSmallStatement, line: cst.SimpleStatementLine | None) -> bool:
        if isinstance(node, cst.Assign):
            value = self._root(node.value)
            alone = line if len(node.targets) == 1 else None
            for target in node.targets:
                self.bind_target(target.target, value, alone)
        elif isinstance(node, cst.AnnAssign):
            if node.value is not None:
                self.bind_target(node.target, self._root(node.value), line)
        elif isinstance(node, cst.AugAssign):
            self._augmented(node)
        elif isinstance(node, cst.Return | cst.Raise):
            for part in (getattr(node, "value", None), getattr(node, "exc", None)):
                if part is not None:
                    self._root(part)
                    if isinstance(node, cst.Return):
                        self.returned.append(part)
            self.keep(getattr(node, "cause", None))
            return True
        elif isinstance(node, cst.Break | cst.Continue):
            self.loops[-1][isinstance(node, cst.Continue)].append(dict(self.names))
            return True
        elif isinstance(node, cst.Global | cst.Nonlocal):
            self.held_back |= {item.name.value for item in node.names}
            if isinstance(node, cst.Global):
                self.of_module |= {item.name.value for item in node.names}
        elif isinstance(node, cst.Import | cst.ImportFrom):
            self._import(node)
        elif isinstance(node, cst.Expr):
            self._root(node.value)
        elif isinstance(node, cst.Del):
            self.unbind(node.target)
        elif isinstance(node, cst.Assert):
            self._root(node.test)
            if node.msg is not None:
                self._root(node.msg)
        return False

    def _import(self, node) -> None:
        if isinstance(node.names, cst.ImportStar):
            return
        for alias in node.names:
            name = alias.asname.name if alias.asname is not None else alias.name
            while isinstance(name, cst.Attribute):
                name = name.value
            if self.module.imports.get(name.value) != self.module.imported(node, alias):
                self.bind(name.value, None)  # something else than the module calls so

    def _augmented(self, node: cst.AugAssign) -> None:
        before = self.evaluator.evaluate(self, node.target)
        value = self.evaluator.augmented(self, node, before, self._root(node.value))
        self.augmented.append((node.value, value))
        if not self.evaluator.is_number(value):
            self.record("in place", (before,))
        if isinstance(node.target, cst.Name):
            self.bind(node.target.value, value)
            if node.target in self.reads:
                self.reads[node.target].read_elsewhere()

    def _compound(self, node: cst.BaseCompoundStatement) -> None:
        if isinstance(node, cst.If):
            self._if(node)
        elif isinstance(node, cst.With):
            for item in node.items:
                value = self._root(item.item)
                if item.asname is not None:
                    self.bind_target(item.asname.name, Opaque(item.item, self, self.place, (value,), False))
            self._inner(node, fixed=not all(map(self._lets_errors_out, node.items)))
        elif isinstance(node, cst.For | cst.While):
            self._loop(node)
        elif isinstance(node, cst.Try | cst.TryStar):
            self._try(node)
        elif isinstance(node, cst.FunctionDef | cst.ClassDef):
            self.held_back |= free_names(node)
            if isinstance(node, cst.ClassDef) or node.decorators:  # what stands there runs at once
                self.record("closure", ())
            self.bind(node.name.value, None)
        elif isinstance(node, cst.Match):
            self._root(node.subject)
            self.keep(*(part for case in node.cases for part in (case.pattern, case.guard)))
            self._branches([case.body for case in node.cases], names_bound_in(node), True)

    def _inner(self, node: cst.With | cst.For | cst.While, fixed: bool = False) -> None:
        self.surroundings.append(node)
        self.block(node.body, fixed)
        self.surroundings.pop()

    def _lets_errors_out(self, item: cst.WithItem) -> bool:
        """Whether the context is known not to catch what is raised inside."""
        call = item.item.func if isinstance(item.item, cst.Call) else item.item
        name = self.module.stands_for(call) or ""
        return name.startswith("torch.") or name.rpartition(".")[2] in LETS_ERRORS_OUT

    def _if(self, node: cst.If) -> None:
        self._root(node.test)
        other = node.orelse
        bodies = [node.body]
        if isinstance(other, cst.Else):
            bodies.append(other.body)
        elif isinstance(other, cst.If):
            bodies.append(cst.IndentedBlock([other]))
        self._branches(bodies, set(), len(bodies) == 1)

    def _branches(self, bodies: list, bound: set[str], may_skip: bool) -> None:
        before = dict(self.names)
        ends = [before] if may_skip else []
        for body in bodies:
            self.names = dict(before)
            for name in bound:
                self.bind(name, None)
            if not self.block(body):
                ends.append(self.names)
        self.names = self._merge(ends or [before], before)

    def _merge(self, ends: list[dict], before: dict) -> dict:
        merged = {}
        for name in sorted(set().union(*ends)):
            arriving = list({id(d): d for end in ends if (d := end.get(name)) is not None}.values())
            if len(arriving) == 1 and all(name in end for end in ends):
                merged[name] = arriving[0]
                continue
            definition = Definition(name, self.place, None, before.get(name), sources=arriving)
            self.definitions.append(definition)
            merged[name] = definition
        return merged

    def _loop(self, node: cst.For | cst.While) -> None:
        if isinstance(node, cst.For):
            self.record("call", (self._root(node.iter),))  # it may run a generator
        before = dict(self.names)
        merges = {}
        for name in sorted(names_bound_in(node)):
            earlier = before.get(name)
            merge = Definition(name, self.place, None, earlier, sources=[earlier] if earlier else [])
            self.definitions.append(merge)
            merges[name] = self.names[name] = merge
        if isinstance(node, cst.While):
            self._root(node.test)
        else:
            self.bind_target(node.target, None)
            for name in target_names(node.target):
                self.names[name].looped = True
        start = dict(self.names)
        self.loops.append(([], []))
        self._inner(node)
        at_break, at_continue = self.loops.pop()
        ends = [self.names, *at_continue]
        for name, merge in merges.items():
            for source in {id(end[name]): end[name] for end in ends if name in end}.values():
                if source is not merge:
                    merge.add_source(source)
        self.names = self._merge([start, *ends], before)
        if node.orelse is not None:
            self._branches([node.orelse.body], set(), True)
        self.names = self._merge([self.names, *at_break], before)

    def _try(self, node: cst.Try | cst.TryStar) -> None:
        before = dict(self.names)
        self.block(node.body, fixed=True)
        if node.orelse is not None:
            self.block(node.orelse.body, fixed=True)
        for name in names_bound_in(node.body):
            for definition in self.definitions:
                if definition.name == name:
                    definition.read_elsewhere()
        ends = [self.names]
        unsure = {**before, **self.names}
        self.keep(*(handler.type for handler in node.handlers))
        for handler in node.handlers:
            self.names = dict(unsure)
            for name in names_bound_in(node.body):
                self.bind(name, None)
            if handler.name is not None:
                self.bind_target(handler.name.name, None)
            if not self.block(handler.body, fixed=True):
                ends.append(self.names)
        self.names = self._merge(ends, before)
        if node.finalbody is not None:
            self.block(node.finalbody.body, fixed=True)
