"""The ops as PyTorch's dispatcher sees them: schemas, shapes without data, CPU kernels and their autograd.

Everything is defined here once, so that a machine without a compiler has the same ops. csrc/binding.cpp adds
the CUDA kernels and, for speed, a C++ autograd function for CUDA; both follow the two rules of this page:
- saved for backward: the op's inputs and `stats` ([2, samples, tokens]: mean, rstd; RMS norm: rstd), no more;
- `backward` returns the gradients that `wanted` asks for, in the order of `INPUTS`, and computes no others.
"""

import torch

from al_deepspeed.ops import reference
from al_deepspeed.ops.placement import Placement

Tensor = torch.Tensor
INPUTS = ("x", "branch", "shift", "scale", "gate", "weight", "bias")
TWICE = (
    "fused AdaLN cannot be differentiated twice: its backward has no derivative of its own. Use "
    "al_deepspeed.ops.set_backend('reference') where second derivatives are needed."
)

_PLACE = (
    "Tensor? cu_seqlens, bool sequence_first, int modulation_sample_axis, SymInt tokens_per_group, "
    "SymInt token_offset"
)
_NORM = "Tensor? shift, Tensor? scale, Tensor? weight, Tensor? bias"
_HOW = "float eps, bool rms, bool dtile, ScalarType out_dtype"
SCHEMAS = {
    "adaln": f"(Tensor x, {_NORM}, {_PLACE}, {_HOW}) -> (Tensor y, Tensor stats)",
    "residual_adaln": f"(Tensor x, Tensor branch, Tensor? gate, {_NORM}, {_PLACE}, {_HOW}) "
    "-> (Tensor residual_out, Tensor y, Tensor stats)",
    "gated_residual": f"(Tensor x, Tensor branch, Tensor gate, {_PLACE}) -> Tensor",
    "backward": "(Tensor? dy, Tensor? dresidual_out, "
    "Tensor? x, Tensor? branch, Tensor? shift, Tensor? scale, "
    f"Tensor? gate, Tensor? weight, Tensor? bias, Tensor? stats, {_PLACE}, bool rms, bool dtile, "
    "bool[7] wanted) -> Tensor[]",
}


def _extent(x: Tensor, sequence_first: bool) -> tuple[int, int]:
    """Samples and tokens."""
    return (x.shape[1], x.shape[0]) if sequence_first else (x.shape[0], x.shape[1:-1].numel())


def _groups(x: Tensor, cu_seqlens, sequence_first, axis, size, offset) -> reference.Groups:
    return reference.Groups(
        x.shape, Placement(sequence_first, axis, size, offset, cu_seqlens is not None), cu_seqlens
    )


def _stats(x: Tensor, eps: float, rms: bool, sequence_first: bool) -> Tensor:
    mean, rstd = reference.statistics(x, eps, rms)
    stats = torch.stack([rstd] if rms else [mean, rstd])
    stats = stats.transpose(1, 2) if sequence_first else stats
    return stats.reshape(len(stats), *_extent(x, sequence_first)).contiguous()


def _adaln_cpu(x, shift, scale, weight, bias, cu, first, axis, size, offset, eps, rms, dtile, out_dtype):
    groups = _groups(x, cu, first, axis, size, offset)
    y = reference.adaln(x, shift, scale, weight, bias, groups, eps, rms, out_dtype)
    return y.contiguous(), _stats(x, eps, rms, first)


def _residual_adaln_cpu(x, branch, gate, shift, scale, weight, bias, cu, first, axis, size, offset, *how):
    residual_out = _gated_residual_cpu(x, branch, gate, cu, first, axis, size, offset)
    return residual_out, *_adaln_cpu(
        residual_out, shift, scale, weight, bias, cu, first, axis, size, offset, *how
    )


def _gated_residual_cpu(x, branch, gate, cu, first, axis, size, offset):
    return reference.gated_residual(x, branch, gate, _groups(x, cu, first, axis, size, offset)).contiguous()


def _backward_cpu(
    dy,
    dresidual_out,
    x,
    branch,
    shift,
    scale,
    gate,
    weight,
    bias,
    stats,
    cu,
    first,
    axis,
    size,
    offset,
    rms,
    dtile,
    wanted,
):
    like = dy if dy is not None else dresidual_out
    groups = _groups(like, cu, first, axis, size, offset)
    asked = {name for name, want in zip(INPUTS, wanted, strict=True) if want}
    grads = {}
    total = None if dresidual_out is None else dresidual_out.to(reference.internal_dtype(dresidual_out))
    if dy is not None:
        normed_input = x if branch is None else reference.gated_residual(x, branch, gate, groups)
        *mean, rstd = (s.transpose(0, 1) if first else s.reshape(x.shape[:-1]) for s in stats)
        mean = mean[0] if mean else torch.zeros_like(rstd)
        needed = asked | {"x"} if asked & {"branch", "gate"} else asked
        grads = reference.adaln_backward(
            dy, normed_input, scale, weight, bias, shift, mean, rstd, groups, rms, needed
        )
        if "x" in grads:
            total = grads["x"] if total is None else total + grads["x"]
    if "x" in asked:
        grads["x"] = total.to(x.dtype)
    if "branch" in asked:
        grads["branch"] = (total if gate is None else total * groups.rows(gate, total.dtype)).to(branch.dtype)
    if "gate" in asked:
        grads["gate"] = groups.sum_rows(total * branch.to(total.dtype), gate)
    return [grads[name].clone(memory_format=torch.contiguous_format) for name in INPUTS if name in asked]


def _adaln_fake(x, shift, scale, weight, bias, cu, first, axis, size, offset, eps, rms, dtile, out_dtype):
    stats = x.new_empty((1 if rms else 2, *_extent(x, first)), dtype=reference.internal_dtype(x))
    return x.new_empty(x.shape, dtype=out_dtype), stats


def _residual_adaln_fake(x, branch, gate, *rest):
    return x.new_empty(x.shape), *_adaln_fake(x, *rest)


def _gated_residual_fake(x, branch, gate, cu, first, axis, size, offset):
    return x.new_empty(x.shape)


def _backward_fake(dy, dresidual_out, *rest):
    inputs, wanted = rest[: len(INPUTS)], rest[-1]
    return [t.new_empty(t.shape) for t, want in zip(inputs, wanted, strict=True) if want]


def _save(ctx, tensors: dict[str, Tensor | None], cu_seqlens, stats, place, rms: bool, dtile: bool) -> None:
    ctx.save_for_backward(*(tensors.get(name) for name in INPUTS), stats, cu_seqlens)
    ctx.place, ctx.rms, ctx.dtile = place, rms, dtile
    ctx.set_materialize_grads(False)


def _gradients(ctx, dy, dresidual_out, needed: set[str]) -> dict[str, Tensor]:
    """The needed gradients by input name. What equals another gradient is passed on, not computed."""
    *inputs, stats, cu_seqlens = ctx.saved_tensors
    tensors = dict(zip(INPUTS, inputs, strict=True))
    branch, gate = tensors["branch"], tensors["gate"]
    branch_like_x = branch is not None and gate is None and branch.dtype == tensors["x"].dtype
    same = {"x", "branch"} & needed if branch_like_x else {"x"} & needed
    grads = {}
    if dy is None:
        grads = dict.fromkeys(same, dresidual_out)
        computed = needed & {"branch", "gate"} - same
    else:
        computed = (needed - same) | {"x"} if same else needed
    if computed:
        wanted = [name in computed for name in INPUTS]
        found = torch.ops.al_deepspeed.backward(
            dy, dresidual_out, *inputs, stats, cu_seqlens, *ctx.place, ctx.rms, ctx.dtile, wanted
        )
        grads |= dict(zip((name for name in INPUTS if name in computed), found, strict=True))
    if dy is not None and same:
        grads |= dict.fromkeys(same, grads["x"])
    return {name: grads[name] for name in needed if name in grads}


def _names(op: str) -> list[str]:
    """The arguments of an op, in order."""
    return [argument.name for argument in getattr(torch.ops.al_deepspeed, op).default._schema.arguments]


def _define_autograd(op: str) -> None:
    names = _names(op)

    def setup_context(ctx, inputs, output):
        given = dict(zip(names, inputs, strict=True))
        place = tuple(
            given[name]
            for name in ("sequence_first", "modulation_sample_axis", "tokens_per_group", "token_offset")
        )
        stats = None
        if op != "gated_residual":
            stats = output[-1]
            ctx.mark_non_differentiable(stats)
        else:
            del given["x"]  # its gradient is the incoming one
        _save(
            ctx, given, given["cu_seqlens"], stats, place, given.get("rms", False), given.get("dtile", False)
        )

    def backward(ctx, *grads):
        dy = None if op == "gated_residual" else grads[-2]
        dresidual_out = None if op == "adaln" else grads[0]
        needed = {name for name, need in zip(names, ctx.needs_input_grad, strict=True) if need}
        found = _gradients(ctx, dy, dresidual_out, needed)
        return tuple(found.get(name) for name in names)

    torch.library.register_autograd(f"al_deepspeed::{op}", backward, setup_context=setup_context)


def _refuse_second_derivative(ctx, *grads):
    raise RuntimeError(TWICE)


def register() -> None:
    """Define the ops once a process."""
    kernels = {
        "adaln": (_adaln_cpu, _adaln_fake),
        "residual_adaln": (_residual_adaln_cpu, _residual_adaln_fake),
        "gated_residual": (_gated_residual_cpu, _gated_residual_fake),
        "backward": (_backward_cpu, _backward_fake),
    }
    for op, (cpu, fake) in kernels.items():
        name = f"al_deepspeed::{op}"
        torch.library.define(name, SCHEMAS[op], tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(name, "CPU", cpu)
        torch.library.register_fake(name, fake)
        if op != "backward":
            _define_autograd(op)
    torch.library.register_autograd("al_deepspeed::backward", _refuse_second_derivative)


register()
