"""The definition of the fused ops in eager PyTorch: what the kernels are held to, and what CPU machines run.

    LN(x) = (x - mean) / sqrt(var + eps) over the last dim, * weight + bias if given
    adaln = LN(x) * (1 + scale) + shift
    residual_adaln = adaln(r) with r = residual + branch * gate, rounded to residual's dtype
Everything between the inputs and the one rounding at the end is fp32 (fp64 for fp64 inputs), with statistics
from centred values. `adaln_backward` and `gated_residual_backward` are the same in closed form; they need the
inputs, mean and rstd, and compute what `wanted` asks for.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from al_deepspeed.ops.placement import Placement

Tensor = torch.Tensor


@dataclass(frozen=True)
class Groups:
    """Takes modulation rows to the rows of x, and sums over rows back to modulation rows."""

    shape: torch.Size  # of x
    placement: Placement
    cu_seqlens: Tensor | None = None

    def rows(self, modulation: Tensor, dtype: torch.dtype) -> Tensor:
        """The modulation of every row, broadcastable to x."""
        size, offset = self.placement.tokens_per_group, self.placement.token_offset
        samples, tokens = self._extent()
        per_group = self._by_group(modulation.to(dtype))
        if self.placement.packed:
            rows = torch.cat(
                [per_group[:, i : i + 1].expand(1, n, -1) for i, n in enumerate(self._lengths())], 1
            )
        elif size:
            rows = (
                per_group.unsqueeze(2)
                .expand(-1, -1, size, -1)
                .reshape(samples, -1 if samples else 0, self.shape[-1])
            )
            rows = rows[:, offset : offset + tokens]
        else:
            return (
                per_group.transpose(0, 1) if self.placement.sequence_first else self._beside_axes(per_group)
            )
        return rows.transpose(0, 1) if self.placement.sequence_first else rows.reshape(self.shape)

    def sum_rows(self, gradient: Tensor, modulation: Tensor) -> Tensor:
        """Sums of the rows of each group, in the modulation's shape and dtype."""
        size, offset = self.placement.tokens_per_group, self.placement.token_offset
        samples, tokens = self._extent()
        if self.placement.sequence_first:
            gradient = gradient.transpose(0, 1)
        gradient = gradient.reshape(samples, tokens, self.shape[-1])
        if self.placement.packed:
            sums = torch.stack([part.sum(1) for part in gradient.split(self._lengths(), 1)], 1)
        elif size:
            groups = modulation.shape[:-1].numel() // max(samples, 1)
            padded = F.pad(gradient, (0, 0, offset, groups * size - offset - tokens))
            sums = padded.reshape(samples, groups, size, self.shape[-1]).sum(2)
        else:
            sums = gradient.sum(1, keepdim=True)
        if self.placement.modulation_sample_axis:
            sums = sums.transpose(0, 1)
        return sums.reshape(modulation.shape).to(modulation.dtype)

    def _extent(self) -> tuple[int, int]:
        """Samples and tokens of x."""
        if self.placement.sequence_first:
            return self.shape[1], self.shape[0]
        return self.shape[0], self.shape[1:-1].numel()

    def _by_group(self, modulation: Tensor) -> Tensor:
        """[B, groups a sample, D]."""
        if self.placement.packed:
            return modulation.reshape(1, -1, modulation.shape[-1])
        if self.placement.modulation_sample_axis:
            return modulation.reshape(modulation.shape[0], modulation.shape[1], -1).transpose(0, 1)
        return modulation.reshape(modulation.shape[0], modulation.shape[1:-1].numel(), modulation.shape[-1])

    def _beside_axes(self, per_sample: Tensor) -> Tensor:
        return per_sample.reshape(self.shape[0], *[1] * (len(self.shape) - 2), self.shape[-1])

    def _lengths(self) -> list[int]:
        lengths = self.cu_seqlens.diff().tolist()
        if sum(lengths) != self._extent()[1]:
            raise ValueError(f"cu_seqlens covers {sum(lengths)} tokens, x has {self._extent()[1]}")
        return lengths


def internal_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def statistics(x: Tensor, eps: float, rms: bool) -> tuple[Tensor, Tensor]:
    """mean (zero for RMS norm) and 1 / sqrt(var + eps) of each row, x's shape without the last dim."""
    x = x.to(internal_dtype(x))
    if rms:
        mean = torch.zeros_like(x[..., 0])
    else:
        mean = x.mean(-1)
        mean = mean + (x - mean.unsqueeze(-1)).mean(-1)  # what the first sum lost to rounding
    variance = (x - mean.unsqueeze(-1)).square().mean(-1)
    return mean, torch.rsqrt(variance + eps)


def normalise(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return (x.to(mean.dtype) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)


def adaln(x, shift, scale, weight, bias, groups: Groups, eps: float, rms: bool, out_dtype) -> Tensor:
    y = normalise(x, *statistics(x, eps, rms))
    y = _affine(y, weight, bias)
    if scale is not None:
        y = y * (1 + groups.rows(scale, y.dtype))
    if shift is not None:
        y = y + groups.rows(shift, y.dtype)
    return y.to(out_dtype)


def gated_residual(residual, branch, gate, groups: Groups) -> Tensor:
    internal = internal_dtype(residual)
    branch = branch.to(internal)
    return (residual.to(internal) + (branch if gate is None else branch * groups.rows(gate, internal))).to(
        residual.dtype
    )


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def adaln_backward(dy, x, scale, weight, bias, shift, mean, rstd, groups: Groups, rms: bool, wanted) -> dict:
    """Gradients named in `wanted` out of x, shift, scale, weight, bias; `x` keeps the internal dtype."""
    dy = dy.to(mean.dtype)
    normed = normalise(x, mean, rstd)
    d_affine = dy if scale is None else dy * (1 + groups.rows(scale, dy.dtype))
    grads = {}
    if "x" in wanted:
        d_normed = d_affine if weight is None else d_affine * weight.to(dy.dtype)
        along = normed * (d_normed * normed).mean(-1, keepdim=True)
        centre = 0 if rms else d_normed.mean(-1, keepdim=True)
        grads["x"] = (d_normed - centre - along) * rstd.unsqueeze(-1)
    if "shift" in wanted:
        grads["shift"] = groups.sum_rows(dy, shift)
    if "scale" in wanted:
        grads["scale"] = groups.sum_rows(dy * _affine(normed, weight, bias), scale)
    features = x.shape[-1]
    if "weight" in wanted:
        grads["weight"] = (d_affine * normed).reshape(-1, features).sum(0).to(weight.dtype)
    if "bias" in wanted:
        grads["bias"] = d_affine.reshape(-1, features).sum(0).to(bias.dtype)
    return grads
