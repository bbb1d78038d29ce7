"""Calls of the fused ops and their judge, for any device.

`truth` is the judge: PyTorch's own layer_norm in fp64, with the modulation row of every row of x looked up in
a plain loop. It shares no code with the ops.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from al_deepspeed.ops import adaln, gated_residual, residual_adaln

NAMES = ("x", "branch", "gate", "shift", "scale", "weight", "bias")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    """One call. `groups` is modulation rows a sample; `form` its shape, in letters B, F, 1 (N: packed)."""

    op: str = "residual_adaln"
    samples: int = 3
    tokens: int = 12
    features: int = 65
    layout: str = "bsd"
    groups: int = 1
    form: str = "B"
    lengths: tuple[int, ...] = ()  # packed
    offset: int = 0
    group_size: int | None = None
    x_dtype: torch.dtype = FP32
    branch_dtype: torch.dtype = FP32
    modulation_dtype: torch.dtype = FP32
    out_dtype: torch.dtype | None = None
    affine: bool = True
    norm: str = "layer"
    backward: str = "auto"

    def modulation_shape(self):
        sizes = {"B": self.samples, "F": self.groups, "1": 1, "N": len(self.lengths)}
        return [*(sizes[letter] for letter in self.form), self.features]

    def modulation_row(self, sample: int, token: int) -> tuple[int, ...]:
        """Index of the modulation row of one place, written out from the design's rule."""
        if self.lengths:
            ends = [sum(self.lengths[: i + 1]) for i in range(len(self.lengths))]
            group = next(i for i, end in enumerate(ends) if token < end)
        else:
            group = (token + self.offset) // (self.group_size or max(1, self.tokens // self.groups))
            group = group if self.groups > 1 else 0
        index = {"B": sample, "F": group, "1": 0, "N": group}
        return tuple(index[letter] for letter in self.form)


def tensors(case: Case, device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Leaves for the case, drawn on the CPU so that every device sees the same numbers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape, dtype, mean=0.0, spread=1.0):
        value = torch.randn(shape, generator=generator) * spread + mean
        return value.to(dtype).to(device).requires_grad_()

    rows = [case.samples, case.tokens] if case.layout == "bsd" else [case.tokens, case.samples]
    found = {"x": draw([*rows, case.features], case.x_dtype)}
    if case.op != "adaln":
        found["branch"] = draw([*rows, case.features], case.branch_dtype)
        found["gate"] = draw(case.modulation_shape(), case.modulation_dtype)
    if case.op != "gated_residual":
        found["shift"] = draw(case.modulation_shape(), case.modulation_dtype)
        found["scale"] = draw(case.modulation_shape(), case.modulation_dtype, spread=0.5)
        if case.affine:
            found["weight"] = draw([case.features], FP32, mean=1.0, spread=0.2)
            found["bias"] = draw([case.features], FP32, spread=0.2)
    return found


def call(case: Case, given: dict, device: str) -> tuple[torch.Tensor, ...]:
    """The op of the case; its outputs as a tuple."""
    given = dict(given)
    how = {"layout": case.layout, "token_offset": case.offset, "tokens_per_group": case.group_size}
    if case.lengths:
        ends = torch.tensor([0, *case.lengths]).cumsum(0).int()
        how["cu_seqlens"] = ends.to(device)
    x, branch, gate = given.pop("x"), given.pop("branch", None), given.pop("gate", None)
    if case.op == "gated_residual":
        return (gated_residual(x, branch, gate, **how),)
    how |= {"norm": case.norm, "backward": case.backward, "out_dtype": case.out_dtype}
    if case.op == "adaln":
        return (adaln(x, **given, **how),)
    return residual_adaln(x, branch, gate, **given, **how)


def truth(case: Case, given: dict) -> tuple[torch.Tensor, ...]:
    """The same in fp64. The norm reads the residual as rounded; the rounding has gradient one."""
    x, branch = given["x"], given.get("branch")
    samples, tokens = (x.shape[0], x.shape[1]) if case.layout == "bsd" else (x.shape[1], x.shape[0])
    place = [(b, s) for b in range(samples) for s in range(tokens)]
    if case.layout == "sbd":
        place = [(b, s) for s in range(tokens) for b in range(samples)]

    def rows(name):
        if not place:
            return torch.zeros_like(x)
        index = torch.tensor([case.modulation_row(*p) for p in place], device=x.device)
        return given[name][tuple(index.T)].reshape(x.shape)

    outputs = []
    if branch is not None:
        total = x + branch * rows("gate")
        rounded = total.to(case.x_dtype).to(torch.float64)
        x = total + (rounded - total).detach()
        outputs.append(x)
    if case.op != "gated_residual":
        if case.norm == "layer":
            y = F.layer_norm(x, x.shape[-1:], eps=1e-6)
        else:
            y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        y = y * given.get("weight", 1) + given.get("bias", 0)
        outputs.append(y * (1 + rows("scale")) + rows("shift"))
    return tuple(outputs)


def gradients(outputs, leaves: dict, seed: int = 1) -> dict[str, torch.Tensor]:
    """Gradients of a fixed random weighting of the outputs, rounded to each output's dtype by the caller."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(out.shape, generator=generator).to(BF16) for out in outputs]
    seeds = [weight.to(out.device, out.dtype) for weight, out in zip(weights, outputs, strict=True)]
    return dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), seeds), strict=True))


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    found, true = found.detach().double(), true.detach().double()
    return float((found - true).norm() / true.norm().clamp_min(1e-6))


def bound(true: torch.Tensor, dtype: torch.dtype) -> float:
    """What one rounding of the true value costs, with 5% on top, plus fp32 arithmetic."""
    return 2e-6 + 1.05 * relative(true.to(dtype), true)


def check(case: Case, device: str, given: dict | None = None) -> None:
    """Outputs and all gradients against the truth, each within `bound`; gradients in their input's dtype."""
    given = tensors(case, device) if given is None else given
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    found, true = call(case, given, device), truth(case, exact)
    for one, other in zip(found, true, strict=True):
        assert relative(one, other) <= bound(other, one.dtype)
    grads, true_grads = gradients(found, given), gradients(true, exact)
    for name, grad in grads.items():
        assert grad.dtype == given[name].dtype and grad.shape == given[name].shape
        assert relative(grad, true_grads[name]) <= bound(true_grads[name], grad.dtype), name


PLACES = [
    Case(form="B"),
    Case(form="B1"),
    Case(form="1B"),
    Case(layout="sbd", form="B"),
    Case(layout="sbd", form="1B"),
    Case(layout="sbd", form="B1"),
    Case(groups=4, form="BF"),
    Case(groups=4, form="BF1"),
    Case(groups=4, form="FB", layout="sbd"),
    Case(groups=4, form="BF1", layout="sbd"),
    Case(groups=12, form="BF"),
    Case(groups=12, form="FB", layout="sbd"),
    Case(groups=4, form="BF", offset=3, group_size=5),
    Case(groups=4, form="FB", offset=3, group_size=5, layout="sbd"),
    Case(samples=1, lengths=(5, 1, 6), form="N"),
    Case(samples=1, lengths=(5, 0, 7), form="1N"),
    Case(samples=1, lengths=(2, 10), form="N1", layout="sbd"),
]
MIXES = [  # x, branch, modulation, out
    (FP32, FP32, FP32, None),
    (BF16, BF16, FP32, None),
    (BF16, FP32, BF16, FP32),
    (FP32, BF16, BF16, BF16),
    (FP16, FP16, FP32, None),
    (FP32, FP16, FP16, FP16),
]


def mixed(case: Case, mix) -> Case:
    x, branch, modulation, out = mix
    return replace(case, x_dtype=x, branch_dtype=branch, modulation_dtype=modulation, out_dtype=out)
