"""Builds the CUDA kernels of csrc/ the DeepSpeed way: just in time at first use, or once at installation.

    DS_BUILD_FUSED_ADALN=1 pip install --no-build-isolation .
makes a prebuilt object whose file name is its stamp: PyTorch, CUDA, architectures. `load()` takes one whose
stamp fits this process, and compiles otherwise. One process a build folder compiles; the others wait for it,
take its result, and fail with its message if it failed.
"""

import importlib
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch
from deepspeed.ops.op_builder.builder import CUDAOpBuilder, OpBuilder
from torch.utils import cpp_extension

from al_deepspeed.errors import AdaptiveLoadError
from al_deepspeed.ops.build_lock import build_once

ARCHITECTURES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
ENTRY = re.compile(r"(\d+)\.(\d)[a-z]?(\+PTX)?")


class BuildError(AdaptiveLoadError):
    """The kernels cannot be had on this machine. The message ends with the compiler's own words."""


def source_folder() -> Path:
    """csrc, inside the installed package or beside it in a checkout."""
    packaged = Path(__file__).parents[1] / "csrc"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "csrc"


def plain_architectures(listed: str) -> list[str]:
    """Entries of TORCH_CUDA_ARCH_LIST as X.Y or X.Y+PTX: letters dropped, names (Hopper) left out.

    The kernels use nothing that 9.0a has and 9.0 has not, and DeepSpeed's parser takes numbers only.
    """
    found = (ENTRY.fullmatch(entry) for entry in re.split(r"[;\s]+", listed.strip()))
    return list(dict.fromkeys(f"{m[1]}.{m[2]}{m[3] or ''}" for m in found if m))


@cache
def toolkit_architectures() -> frozenset[str]:
    """X.Y of every architecture that nvcc compiles for; empty without an nvcc that runs."""
    if cpp_extension.CUDA_HOME is None:
        return frozenset()
    command = [Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc", "--list-gpu-arch"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    return frozenset(f"{number[:-1]}.{number[-1]}" for number in re.findall(r"compute_(\d+)", listed))


def stamp(architectures: list[str]) -> str:
    """What a prebuilt object was made for, as a part of its file name."""
    names = (entry.replace(".", "").replace("+PTX", "p") for entry in architectures)
    return f"{_versions()}_sm{'_'.join(names)}"


def _versions() -> str:
    release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    return f"torch{release}_cu{torch.version.cuda}".replace(".", "_")


def covers(architectures: list[str], capability: tuple[int, int]) -> bool:
    """Whether code for these architectures runs on this device: the same major version, or by way of PTX."""
    for entry in architectures:
        major, minor = (int(part) for part in entry.removesuffix("+PTX").split("."))
        if (major == capability[0] and minor <= capability[1]) or (
            entry.endswith("+PTX") and (major, minor) <= capability
        ):
            return True
    return False


def prebuilt_module(capability: tuple[int, int] | None = None) -> str | None:
    """Module name of a prebuilt object for this PyTorch and CUDA (and this device), if there is one."""
    if torch.version.cuda is None:
        return None
    prefix = f"_fused_adaln_{_versions()}_sm"
    for path in sorted(Path(__file__).parent.glob(f"{prefix}*")):
        name = path.name.split(".")[0]
        entries = [
            f"{digits[:-1]}.{digits[-1]}{'+PTX' if ptx else ''}"
            for digits, ptx in re.findall(r"(\d+)(p?)", name.removeprefix(prefix))
        ]
        if capability is None or covers(entries, capability):
            return f"al_deepspeed.ops.{name}"
    return None


class FusedAdaLNBuilder(CUDAOpBuilder):
    BUILD_VAR = "DS_BUILD_FUSED_ADALN"
    NAME = "fused_adaln"

    def __init__(self) -> None:
        super().__init__(name=self.NAME)

    def absolute_name(self) -> str:
        return f"al_deepspeed.ops._fused_adaln_{stamp(self.build_architectures())}"

    def sources(self) -> list[str]:
        folder = source_folder()
        return [str(path) for path in sorted([*folder.glob("*.cu"), *folder.glob("*.cpp")])]

    def include_paths(self) -> list[str]:
        return [str(source_folder())]

    def cxx_args(self) -> list[str]:
        # The versions make ninja compile again after an upgrade of PyTorch in place.
        return [*(arg for arg in super().cxx_args() if arg != "-g"), f"-DADALN_BUILT_FOR={_versions()}"]

    def nvcc_args(self) -> list[str]:
        return [arg for arg in super().nvcc_args() if arg != "--use_fast_math"]

    def build_architectures(self) -> list[str]:
        """For an installation: TORCH_CUDA_ARCH_LIST, else ours, as far as the toolkit goes."""
        listed = plain_architectures(os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
        return [".".join(cc) for cc in self.filter_ccs(listed or list(ARCHITECTURES))]

    def compute_capability_args(self, cross_compile_archs: str | None = None) -> list[str]:
        """DeepSpeed's, given a list that it can read."""
        if self.jit_mode:
            self._jit_arch_list = ";".join(plain_architectures(self._jit_arch_list or "")) or None
            if self._jit_arch_list is None:
                os.environ.pop("TORCH_CUDA_ARCH_LIST", None)  # jit_load() puts it back
            return super().compute_capability_args()
        os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(self.build_architectures())
        return super().compute_capability_args()

    def filter_ccs(self, ccs: list[str]) -> list[list[str]]:
        """Those that the kernels (8.0 and up: bf16, asynchronous copies) and the toolkit support."""
        supported = toolkit_architectures()
        kept = []
        for cc in ccs:
            number = cc.removesuffix("+PTX")
            if int(number.split(".")[0]) >= 8 and number in supported:
                kept.append(cc.split("."))
        return kept

    def is_compatible(self, verbose: bool = False) -> bool:
        self.error_log = self.obstacle()
        if self.error_log and verbose:
            self.warning(f"{self.name}: {self.error_log}")
        return self.error_log is None

    def obstacle(self) -> str | None:
        """Why the kernels cannot be built here, or None."""
        if torch.version.cuda is None:
            return f"PyTorch {torch.__version__} is built without CUDA"
        if not toolkit_architectures():
            home = cpp_extension.CUDA_HOME
            return f"no nvcc that runs (CUDA_HOME is {home}); install the CUDA {torch.version.cuda} toolkit"
        if shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None:
            return "no C++ compiler (c++ or g++) on PATH"
        capability = self._capability()
        if capability is not None and capability < (8, 0):
            return f"the device has compute capability {capability[0]}.{capability[1]}; the kernels need 8.0"
        return None

    def _capability(self) -> tuple[int, int] | None:
        """Of the current device, without making a CUDA context just to know."""
        return None if self.cuda_capability_major() is None else torch.cuda.get_device_capability()

    def load(self, verbose: bool = False):
        """The compiled module: prebuilt if its stamp fits, else compiled now. Import registers the ops."""
        if self.name in OpBuilder._loaded_ops:
            return OpBuilder._loaded_ops[self.name]
        if not torch.cuda.is_available():
            raise BuildError(
                f"fused AdaLN kernels need a CUDA device and PyTorch {torch.__version__} sees none; "
                'use "backend": "auto" or "reference"'
            )
        prebuilt = prebuilt_module(torch.cuda.get_device_capability())
        if prebuilt is None:
            return self.jit_load(verbose)
        OpBuilder._loaded_ops[self.name] = importlib.import_module(prebuilt)
        return OpBuilder._loaded_ops[self.name]

    def jit_load(self, verbose: bool = False):
        if not self.is_compatible(verbose):
            raise BuildError(f"fused AdaLN kernels cannot be compiled: {self.error_log}")
        folder = Path(cpp_extension._get_build_directory(self.name, verbose=False))
        try:
            return build_once(folder, lambda: super(FusedAdaLNBuilder, self).jit_load(verbose))
        except Exception as error:
            raise BuildError(f"fused AdaLN kernels failed to build in {folder}: {error}") from error

    def builder(self):
        """The extension for setup.py."""
        reason = self.obstacle()
        if reason:
            raise BuildError(f"{self.BUILD_VAR}=1, but the kernels cannot be compiled: {reason}")
        extension = super().builder()
        extension.sources = [os.path.relpath(source) for source in extension.sources]
        return extension
