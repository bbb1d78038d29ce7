"""The contract check: every rewritten site against the expression that it replaced, on what it really gets.

A rewritten call that carries its original expression goes through a `Checker` while one is set. For each new
kind of operands at a site, both sides run on detached copies of at most 4,096 rows, forward and backward;
outputs and gradients must agree to rounding. Training itself sees nothing: its graph, its random numbers and
its hooks for saved tensors stay as they are, so a site may run inside activation checkpointing.

Differences are collected, not raised: an error on one rank alone would hang the others. Ranks compare them at
the end of the first step.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

Tensor = torch.Tensor
Operands = Sequence[Any]  # tensors, and what is handed on as it is: a norm module, numbers, None
ROWS = 4096
# What rounding may come to: the root mean square of the difference against that of the tensor. A bf16 or fp16
# chain rounds after each of its operations, three to six half units; in fp32 sums over rows differ in order.
ROUNDING = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-12}
PEAK = 8  # the largest single difference, against the largest value, in the same units


@dataclass(frozen=True)
class Difference:
    """A tensor of a site that differs by more than rounding, or could not be compared."""

    site: str
    tensor: str
    error: str

    def __str__(self) -> str:
        return f"{self.site}: {self.tensor} {self.error}"


@dataclass
class Checker:
    """checked: sites that were compared. differences: what was found."""

    checked: set[str] = field(default_factory=set)
    differences: list[Difference] = field(default_factory=list)
    _seen: set[tuple] = field(default_factory=set)

    @torch.compiler.disable
    def __call__(self, site: str, original: Callable, fused: Callable, operands: Operands):
        """What the runtime calls in place of `fused(*operands)`; returns the same."""
        partitioned = any(map(_is_partitioned, operands))
        kind = (site, *(() if partitioned else map(_kind, operands)))  # ranks gather a site's norm together
        if kind not in self._seen and not torch.is_inference_mode_enabled():
            self._seen.add(kind)
            self.checked.add(site)
            whole = [_gathered(one) if _is_partitioned(one) else one for one in operands]
            self.differences += compare(site, original, fused, whole)
        return fused(*operands)


def compare(site: str, original: Callable, fused: Callable, operands: Operands) -> list[Difference]:
    """Runs both on copies of some rows of the operands, forward and backward."""
    with _apart_from_training(operands):
        try:
            try:
                return _compare(site, original, fused, few_rows(operands))
            except (RuntimeError, ValueError, IndexError):  # the expression needs all rows, say for a view
                return _compare(site, original, fused, operands)
        except Exception as error:  # whatever user code can come up with; the run then stops on all ranks
            return [Difference(site, "the comparison", f"failed: {type(error).__name__}: {error}")]


def _compare(site: str, original: Callable, fused: Callable, operands: Operands) -> list[Difference]:
    names = original.__code__.co_varnames[: original.__code__.co_argcount]
    outputs, leaves = _run(original, operands)
    parameters = _parameters(outputs, leaves)
    expected = _results(outputs, leaves, names, parameters)
    found = _results(*_run(fused, operands), names, parameters)
    tolerance = max(ROUNDING.get(one.dtype, 0.0) for one in (*_tensors(operands), *expected.values()))
    return [
        Difference(site, name, error)
        for name, tensor in expected.items()
        if (error := _difference(found.get(name), tensor, tolerance))
    ]


def few_rows(operands: Operands, rows: int = ROWS) -> list[Any]:
    """The operands cut to at most so many rows of the largest one, along its longest dim but the last.

    A dim of another operand is cut where broadcasting lays it on that dim.
    """
    largest = max(_tensors(operands), key=lambda tensor: (tensor.numel(), tensor.dim()))
    lengths = largest.shape[:-1]
    longest = max(lengths, default=0)
    others = largest.numel() // max(1, longest * largest.shape[-1]) if longest else 1
    keep = max(1, rows // max(1, others))
    if longest <= keep:
        return list(operands)
    from_right = largest.dim() - lengths.index(longest)
    return [
        one.narrow(-from_right, 0, keep)
        if isinstance(one, Tensor) and one.dim() >= from_right and one.shape[-from_right] == longest
        else one
        for one in operands
    ]


def _run(side: Callable, operands: Operands) -> tuple[tuple[Tensor, ...], list[Any]]:
    """Outputs of one side on copies of the operands, and the copies."""
    leaves = [_leaf(one) if isinstance(one, Tensor) else one for one in operands]
    outputs = side(*leaves)
    return outputs if isinstance(outputs, tuple) else (outputs,), leaves


def _results(
    outputs: Sequence[Tensor], leaves: Operands, names: Sequence[str], parameters: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Outputs, and the gradients of a fixed random projection of them, by name."""
    named = {
        name: leaf
        for name, leaf in zip(names, leaves, strict=True)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    named |= {f"parameter {number} of the norm": one for number, one in enumerate(parameters)}
    draws = torch.Generator().manual_seed(0)
    projection = sum(
        (one * torch.randn(one.shape, generator=draws).to(one)).sum(dtype=torch.float32) for one in outputs
    )
    gradients = torch.autograd.grad(projection, list(named.values()), allow_unused=True)
    results = {f"output {number}": one.detach() for number, one in enumerate(outputs)}
    for (name, leaf), gradient in zip(named.items(), gradients, strict=True):
        results[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return results


def _parameters(outputs: Sequence[Tensor], leaves: Operands) -> list[Tensor]:
    """What else the outputs were computed from: the weight and bias of an affine norm."""
    nodes, seen, found = [one.grad_fn for one in outputs], set(), []
    for node in nodes:
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [below for below, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if leaf is not None and all(leaf is not one for one in leaves):
            found.append(leaf)
    return found


def _difference(found: Tensor | None, expected: Tensor, tolerance: float) -> str | None:
    """In words; None when it is no more than rounding."""
    if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
        return f"is {_described(found)} in place of {_described(expected)}"
    found, expected = found.double(), expected.double()
    finite = expected.isfinite()
    if not found[finite].isfinite().all():
        return "is not finite where the original is"
    found, expected = found[finite], expected[finite]
    if not expected.numel():
        return None
    apart = found - expected
    error, scale = apart.square().mean().sqrt().item(), expected.square().mean().sqrt().item()
    peak, highest = apart.abs().max().item(), expected.abs().max().item()
    if error <= tolerance * scale and peak <= PEAK * tolerance * highest:
        return None
    return (
        f"differs by {error:.3g} (root mean square; at most {peak:.3g}) from values of {scale:.3g} (at most "
        f"{highest:.3g}); rounding explains {tolerance * scale:.3g}"
    )


@contextmanager
def _apart_from_training(operands: Operands) -> Iterator[None]:
    """Gradients on, random state kept, and no saved tensor seen by an enclosing checkpoint."""
    devices = {one.device for one in _tensors(operands) if one.is_cuda}
    with (
        torch.enable_grad(),
        torch.random.fork_rng(devices=devices),
        torch.autograd.graph.saved_tensors_hooks(_same, _same),
    ):
        yield


def _is_partitioned(operand: Any) -> bool:
    """Whether ZeRO-3 holds the parameters of this norm."""
    return isinstance(operand, torch.nn.Module) and any(
        hasattr(one, "ds_id") for one in operand.parameters(recurse=False)
    )


def _gathered(norm: torch.nn.Module) -> torch.nn.Module:
    """A copy with whole parameters and no hooks: the comparison then talks to no other rank. Collective."""
    from deepspeed import zero

    twin = copy.copy(norm)
    for name, value in vars(norm).items():
        if name.endswith("_hooks") and isinstance(value, dict):
            setattr(twin, name, OrderedDict())
    vars(twin).pop("forward", None)
    with zero.GatheredParameters(list(norm.parameters(recurse=False))):
        vars(twin)["_parameters"] = {
            name: None if one is None else torch.nn.Parameter(one.detach().clone(), one.requires_grad)
            for name, one in norm._parameters.items()
        }
    return twin


def _leaf(operand: Tensor) -> Tensor:
    leaf = operand.detach().clone()
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _tensors(operands: Operands) -> list[Tensor]:
    return [one for one in operands if isinstance(one, Tensor)]


def _kind(operand: Any) -> Any:
    """What decides how a site reads an operand; its length along tokens does not."""
    if isinstance(operand, torch.nn.Module):
        return type(operand), len(list(operand.parameters()))
    if not isinstance(operand, Tensor):
        return operand
    return operand.dtype, operand.dim(), tuple(side == 1 for side in operand.shape)


def _described(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
