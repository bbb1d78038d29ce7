"""A small grid of calls of the fused ops, forward and backward, for NVIDIA's checkers of device code.

    compute-sanitizer --tool memcheck python3 tests/sanitizer_grid.py
    compute-sanitizer --tool racecheck python3 tests/sanitizer_grid.py

Widths for the scalar kernels (33) and for the vector kernels with one and with several warps a row; one group
of modulation and several; types alike and mixed; both backwards.
"""

import itertools

import torch

from al_deepspeed.ops import adaln, gated_residual, residual_adaln, set_backend

SAMPLES, TOKENS = 2, 39
WIDTHS = (33, 1536, 5120)
TYPES = ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16))
GROUPS = (1, 3)
BACKWARDS = ("one_pass", "dtile")


def leaf(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def main() -> None:
    set_backend("cuda")
    torch.manual_seed(0)
    calls = 0
    for width, (dtype, modulation), groups, backward in itertools.product(WIDTHS, TYPES, GROUPS, BACKWARDS):
        x, branch = (leaf(SAMPLES, TOKENS, width, dtype=dtype) for _ in range(2))
        shift, scale, gate = (leaf(SAMPLES, groups, 1, width, dtype=modulation) for _ in range(3))
        weight, bias = (leaf(width, dtype=torch.float32) for _ in range(2))
        how = {"layout": "bsd", "backward": backward}
        affine = {"weight": weight, "bias": bias, **how}
        for outputs in (
            (adaln(x, shift, scale, **how),),
            residual_adaln(x, branch, gate, shift, scale, **how),
            residual_adaln(x, branch, gate, shift, scale, **affine),
            (gated_residual(x, branch, gate, layout="bsd"),),
        ):
            leaves = [x, branch, shift, scale, gate, weight, bias]
            torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs], allow_unused=True)
            calls += 1
    torch.cuda.synchronize()
    print(f"{calls} calls")


if __name__ == "__main__":
    main()
