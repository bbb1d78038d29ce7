"""Which implementation CUDA tensors get: the kernels, or the eager reference.

    auto       the kernels; where they cannot be had, one warning with the reason, then the reference
    cuda       the kernels; where they cannot be had, an error with the compiler's message
    reference  plain PyTorch, also on CPU tensors
The kernels are built or loaded at first use. CPU tensors take the reference in every case.
"""

import warnings
from dataclasses import dataclass

import torch

from al_deepspeed.errors import ConfigError

BACKENDS = ("auto", "cuda", "reference")


@dataclass
class _State:
    """The choice of this process, and whether its kernels are there (None: nobody has asked yet)."""

    backend: str = "auto"
    kernels: bool | None = None


_state = _State()


def set_backend(backend: str) -> None:
    """Choose for this process. "cuda" builds or loads the kernels now and raises if that fails."""
    if backend not in BACKENDS:
        raise ConfigError(f"fused_adaln backend is {backend!r}; allowed: {', '.join(map(repr, BACKENDS))}")
    if backend == "cuda":
        load_kernels()
    _state.backend = backend


def get_backend() -> str:
    return _state.backend


def load_kernels() -> None:
    """Build or load the CUDA kernels; raises BuildError with the reason when that is impossible."""
    if _state.kernels:
        return
    from al_deepspeed.ops.builder import FusedAdaLNBuilder

    FusedAdaLNBuilder().load()
    _state.kernels = True


def uses_ops(x: torch.Tensor) -> bool:
    """Whether x goes through the ops of library.py; otherwise through the plain reference."""
    if _state.backend == "reference":
        return False
    if not x.is_cuda:
        return True
    return _kernels_or_warning() if _state.kernels is None else _state.kernels


@torch.compiler.assume_constant_result
def _kernels_or_warning() -> bool:
    if _state.kernels is None:
        try:
            load_kernels()
        except Exception as error:  # whatever a compiler, a driver or a file system can come up with
            if _state.backend == "cuda":
                raise
            _state.kernels = False
            warnings.warn(f"fused AdaLN runs as plain PyTorch: {error}", RuntimeWarning, stacklevel=3)
    return _state.kernels
