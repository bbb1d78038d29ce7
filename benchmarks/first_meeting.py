"""What the first micro-batch of a shape costs: forward and backward of Wan's layers, shape after shape.

    python3 benchmarks/first_meeting.py

Some libraries prepare a kernel for each shape when they meet it, which a rank pays once a process while all
others wait. Each row is one op; the columns are the medians over shapes of the first, second and third call.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

WIDTH, HEADS, TEXT, CALLS = 1536, 12, 512, 3
OTHERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
WARM = (2, 1, 40, 40)  # loads the libraries
SHAPES = (  # B and latent frames, height, width
    (1, 1, 32, 32),
    (4, 1, 32, 48),
    (3, 1, 64, 64),
    (2, 5, 32, 32),
    (1, 9, 40, 48),
    (1, 21, 30, 52),
    (2, 13, 30, 52),
    (7, 1, 52, 60),
)
Shape = tuple[int, int, int, int]


def patch_embedding(shape: Shape) -> Callable[[], torch.Tensor]:
    batch, *latent = shape
    layer = nn.Conv3d(16, WIDTH, (1, 2, 2), (1, 2, 2), device="cuda", dtype=torch.bfloat16)
    x = torch.randn(batch, 16, *latent, device="cuda", dtype=torch.bfloat16)
    return lambda: layer(x)


def linear(shape: Shape) -> Callable[[], torch.Tensor]:
    layer = nn.Linear(WIDTH, 4 * WIDTH, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(shape[0], _tokens(shape), WIDTH, device="cuda", dtype=torch.bfloat16)
    return lambda: layer(x)


def attention(shape: Shape, keys: int | None = None) -> Callable[[], torch.Tensor]:
    query, key, value = (_heads(shape[0], tokens or _tokens(shape)) for tokens in (None, keys, keys))
    return lambda: F.scaled_dot_product_attention(query, key, value)


def attention_without_cudnn(shape: Shape) -> Callable[[], torch.Tensor]:
    run = attention(shape)

    def restricted() -> torch.Tensor:
        with sdpa_kernel(OTHERS):
            return run()

    return restricted


OPS = {
    "patch embedding": patch_embedding,
    "linear": linear,
    "self-attention": attention,
    "cross-attention": lambda shape: attention(shape, TEXT),
    "self-attention without cuDNN": attention_without_cudnn,
}


def _tokens(shape: Shape) -> int:
    _, frames, height, width = shape
    return frames * height * width // 4


def _heads(batch: int, tokens: int) -> torch.Tensor:
    size = (batch, HEADS, tokens, WIDTH // HEADS)
    return torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def milliseconds(run: Callable[[], torch.Tensor]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    y = run()
    y.backward(torch.ones_like(y))
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    )
    print(f"{'ms, median of ' + str(len(SHAPES)) + ' shapes':30s}  first  second  third")
    for name, op in OPS.items():
        milliseconds(op(WARM))
        calls = [[milliseconds(run) for _ in range(CALLS)] for run in map(op, SHAPES)]
        print(f"{name:30s}", *(f"{statistics.median(column):6.1f}" for column in zip(*calls, strict=True)))


if __name__ == "__main__":
    main()
