"""Patching classes in this process: functions of a model's own code run rewritten code; no file changes.

The source of a module is rewritten as a patch on disk would, compiled, and never run: a function with a site
gets the new code object, nothing else. So it stays the same function, with its module's globals, its defaults
and its `__class__` cell; what imported, wrapped or inherited it needs no care, and isinstance and pickle see
nothing.

Only code changes, never parameters. So a model that was born partitioned under `deepspeed.zero.Init` may be
patched as well as one that is not made yet. Too late is what took the old code in or hooked into the modules:
a DeepSpeed engine, a compile. A class whose `forward` is set on an instance is left, as is a norm with hooks.
"""

import dis
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from sys import modules, stdlib_module_names
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from al_deepspeed.errors import PatchError
from al_deepspeed.patching import prepared
from al_deepspeed.patching.live import LiveModule, Place, functions_under
from al_deepspeed.patching.recipes import choose_recipes
from al_deepspeed.patching.sites import Left, Site

NEVER = ({"torch", "deepspeed", "al_deepspeed"} | stdlib_module_names) - {"__main__"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
FUSED = {"addcmul", "addcmul_", "baddbmm"}
ADDS = {"+", "+=", "ADD", "add", "add_", "__add__"} | FUSED
MULTIPLIES = {"*", "*=", "MULTIPLY", "mul", "mul_", "multiply", "__mul__"} | FUSED


@dataclass(frozen=True)
class Report:
    """sites: class, or module of free functions -> what runs fused now. left: what does not, a line each."""

    sites: dict[str, tuple[Site, ...]] = field(default_factory=dict)
    left: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return sum(len(sites) for sites in self.sites.values())

    def lines(self) -> list[str]:
        """For a log."""
        where = ", ".join(f"{name} {len(sites)}" for name, sites in self.sites.items())
        first = f"fused AdaLN at {self.count} sites" + (f": {where}" if where else "")
        return [first, *(f"fused AdaLN leaves {line}" for line in self.left)]


@dataclass(frozen=True)
class _Patch:
    """One function with sites. `replaced` is what its owner held before a decorator went, else None."""

    function: FunctionType
    owner: type | ModuleType
    live: LiveModule
    place: Place
    sites: tuple[Site, ...]
    original: CodeType
    replaced: Any = None

    @property
    def group(self) -> str:
        return self.owner.__name__ if isinstance(self.owner, ModuleType) else _full_name(self.owner)

    def install(self, *, observe: bool) -> None:
        self.function.__code__ = (self.live.observed if observe else self.live.plain)[self.place]
        if self.replaced is not None:
            setattr(self.owner, self.place[-1][0], self.function)

    def undo(self) -> None:
        self.function.__code__ = self.original
        if self.replaced is not None:
            setattr(self.owner, self.place[-1][0], self.replaced)


_patches: dict[FunctionType, _Patch] = {}


def patch_model(model: nn.Module, recipes: Sequence[str] | None = None, *, observe: bool = False) -> Report:
    """Rewrites the classes of a model's modules, and the functions that they call.

    Args:
        recipes: take the classes of these recipes alone; by default every class of the model.
        observe: rewritten calls carry the original expression, for the contract check.
    Raises:
        PatchError: it is too late for this model, or a recipe names nothing in it. Then nothing has changed.
    """
    classes = {base: None for module in model.modules() for base in _bases(type(module))}
    left = []
    if recipes is not None:
        classes = _named_by(recipes, classes)
    for cls, name in _with_own_forward(model).items():
        if cls in classes:
            del classes[cls]
            left.append(f"{_full_name(cls)}: {name} has a forward of its own")
    found, reasons = _find(classes)
    new = [patch for patch in found if patch.function not in _patches]
    if new and (obstacle := _too_late(model)):
        raise PatchError(
            f"fused_adaln.patch comes too late: {obstacle}. Patch first: let al_deepspeed.initialize make "
            'the engine, or call al_deepspeed.patch_classes before; or set "patch": "off".'
        )
    for name, module in model.named_modules() if found else ():
        if not _is_norm(module):
            continue
        if prepared.is_free(module):
            prepared.prepare(module)
        else:
            prepared.leave(module)
            left.append(f"{name} ({type(module).__name__}): it carries hooks, or a forward of its own")
    return _install(found, (*left, *reasons), observe)


def patch_classes(*targets: type | str) -> Report:
    """Rewrites classes before any model is made of them.

    Args:
        targets: classes, or names of recipes, whose classes are imported.
    Raises:
        PatchError: a target is neither; then nothing has changed.
    """
    classes: dict[type, None] = {}
    for target in targets:
        if not isinstance(target, type | str):
            raise PatchError(
                f"patch_classes takes classes and names that `al-deepspeed patch list` shows; given "
                f"{target!r:.80}. A model that exists already is patched by al_deepspeed.initialize."
            )
        classes |= dict.fromkeys(_imported(target) if isinstance(target, str) else _bases(target))
    found, reasons = _find(classes)
    return _install(found, reasons, observe=False)


def stop_observing() -> None:
    """Ends the contract check: from the next call on, rewritten functions carry no original expression."""
    for patch in _patches.values():
        patch.install(observe=False)


def unpatch() -> None:
    """Gives every patched function its own code again."""
    while _patches:
        _patches.popitem()[1].undo()


# which functions ------------------------------------------------------------------------------------------


def _find(classes: Iterable[type]) -> tuple[list[_Patch], list[str]]:
    """The functions with sites that the classes hold or call, and what is left there."""
    found, left = [], []
    lives: dict[str, LiveModule | None] = {}
    for one in _worth_a_look(list(classes)):
        function = one.function
        if function in _patches:
            found.append(_patches[function])
            continue
        module = function.__globals__["__name__"]
        if module not in lives:
            lives[module] = LiveModule.of(modules[module]) if module in modules else None
        live = lives[module]
        if live is None:
            continue
        place = live.place(function)
        if place is None:
            left.append(f"{module}.{function.__qualname__}: its file differs from what was imported")
            continue
        name = ".".join(part for part, _ in place)

        def inside(found: Site | Left, name: str = name) -> bool:
            return not found.function or f"{found.function}.".startswith(f"{name}.")

        left += [
            f"{item.file}:{item.line} {name}: {item.reason}" for item in filter(inside, live.rewritten.left)
        ]
        sites = tuple(filter(inside, live.rewritten.sites))
        if not sites:
            continue
        if reason := live.obstacle(place, function):
            left.append(f"{sites[0].file}:{sites[0].line} {name}: {reason}")
            continue
        replaced = one.attribute if live.loses_decorators(place) else None
        found.append(_Patch(function, one.owner, live, place, sites, function.__code__, replaced))
    return found, left


@dataclass(frozen=True)
class _Reached:
    """A function that a forward pass may run, as its class or module holds it."""

    owner: type | ModuleType
    name: str
    attribute: Any
    function: FunctionType


def _worth_a_look(classes: list[type]) -> list[_Reached]:
    """What adds and multiplies on the way of a forward pass, and what calls that by name.

    Reading a module closely takes seconds, and most of what a model's classes inherit loads and saves.
    """
    reached = list(_reached(classes))
    computing = {
        one.function
        for one in reached
        if one.function in _patches or _adds_and_multiplies(one.function.__code__)
    }
    helpers = {one.name for one in reached if one.function in computing} - {"forward", "__call__"}
    return [
        one
        for one in reached
        if one.function in computing or helpers.intersection(_names(one.function.__code__))
    ]


def _reached(classes: list[type]) -> Iterator[_Reached]:
    """From every `forward` on: methods of the classes and free functions, by the names that the code uses."""
    methods: dict[str, list[_Reached]] = {}
    for cls in classes:
        for name, attribute in vars(cls).items():
            for function in functions_under(attribute, _file_name(cls.__module__)):
                methods.setdefault(name, []).append(_Reached(cls, name, attribute, function))
    queue = [*methods.get("forward", ()), *methods.get("__call__", ())]
    seen = set()
    for one in queue:
        if one.function in seen:
            continue
        seen.add(one.function)
        yield one
        for name in dict.fromkeys(_names(one.function.__code__)):
            queue += methods.get(name, ())
        queue += _called_by(one.function)


def _called_by(function: FunctionType) -> Iterator[_Reached]:
    """The free functions that names in its code stand for in its module, or in a module that it names."""
    names = dict.fromkeys(_names(function.__code__))
    for name in names:
        value = function.__globals__.get(name)
        held = (
            {part: vars(value).get(part) for part in names}
            if isinstance(value, ModuleType)
            else {name: value}
        )
        for called, one in held.items():
            module = getattr(one, "__module__", None)
            if isinstance(one, type) or not callable(one) or module not in modules or not _ours(module):
                continue
            for function in functions_under(one, _file_name(module)):
                yield _Reached(modules[module], called, one, function)


def _adds_and_multiplies(code: CodeType) -> bool:
    """Also inside nested functions; the names are those of PyTorch's functions and methods."""
    symbols = set(_names(code)) | set(_operators(code))
    return bool(symbols & ADDS and symbols & MULTIPLIES)


def _operators(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("BINARY_OP"):
            yield instruction.argrepr
        elif instruction.opname.startswith(("BINARY_", "INPLACE_")):  # Python 3.10
            yield instruction.opname.partition("_")[2]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _operators(constant)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if _ours(base.__module__)]


def _ours(module: str) -> bool:
    return module.partition(".")[0] not in NEVER


def _file_name(module: str) -> str:
    return Path(getattr(modules.get(module), "__file__", None) or "").name


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# which classes --------------------------------------------------------------------------------------------


def _named_by(recipes: Sequence[str], classes: Iterable[type]) -> dict[type, None]:
    """Those of the classes that the recipes name."""
    chosen: dict[type, None] = {}
    for recipe in choose_recipes(recipes):
        own = {cls: None for cls in classes if any(_is_called(cls, name) for name in recipe.classes)}
        if not own:
            raise PatchError(
                f"fused_adaln.patch names {recipe.name}, but the model has none of its classes "
                f"({', '.join(name.rpartition('.')[2] for name in recipe.classes)}). Take it out, or set it "
                'to "auto".'
            )
        chosen |= own
    return chosen


def _is_called(cls: type, name: str) -> bool:
    """A checkout may be imported from another root than the recipe's."""
    return f".{_full_name(cls)}".endswith(f".{name}")


def _imported(target: str) -> list[type]:
    (recipe,) = choose_recipes([target])
    classes, reasons = [], []
    for name in recipe.classes:
        module, _, cls = name.rpartition(".")
        try:
            classes += _bases(getattr(import_module(module), cls))
        except (ImportError, AttributeError) as error:
            reasons.append(str(error))
    if not classes:
        raise PatchError(f"no class of {target} can be imported: {'; '.join(dict.fromkeys(reasons))}.")
    return classes


def _with_own_forward(model: nn.Module) -> dict[type, str]:
    """Class -> a module of it whose forward is set on the instance."""
    return {
        base: name
        for name, module in model.named_modules()
        if "forward" in vars(module) and not _is_norm(module)
        for base in _bases(type(module))
    }


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and next(module.children(), None) is None


def _too_late(model: nn.Module) -> str | None:
    """What has taken in the code as it is, or hooked into the modules."""
    if any(base.__name__ == "DeepSpeedEngine" for base in type(model).__mro__):
        return "the model is a DeepSpeed engine already"
    for name, module in model.named_modules():
        where = name or "the model"
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            return f"{where} is compiled already"
        hooks = [hook for one in HOOKS for hook in getattr(module, one).values()]
        if any((getattr(hook, "__module__", None) or "").startswith("deepspeed.") for hook in hooks):
            return f"a DeepSpeed engine has its hooks on {where} already"
    return None


def _install(found: list[_Patch], left: Iterable[str], observe: bool) -> Report:
    sites: dict[str, tuple[Site, ...]] = {}
    for patch in found:
        if patch.function not in _patches:
            patch.live.bind_imports()
            _patches[patch.function] = patch
        patch.install(observe=observe)
        sites[patch.group] = (*sites.get(patch.group, ()), *patch.sites)
    return Report(sites, tuple(dict.fromkeys(left)))
