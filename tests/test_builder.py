"""The op builder without a GPU: architectures, stamps, who builds and who waits, what a failure says."""

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from al_deepspeed.errors import AdaptiveLoadError
from al_deepspeed.ops import adaln, backend, build_lock, builder, environment
from al_deepspeed.ops.build_lock import build_once
from al_deepspeed.ops.builder import (
    BuildError,
    FusedAdaLNBuilder,
    covers,
    plain_architectures,
    prebuilt_module,
)

NVCC = """#!/bin/sh
case "$1" in
  -V) echo "Cuda compilation tools, release 12.8, V12.8.93" ;;
  --list-gpu-arch) printf 'compute_%s\\n' 75 80 86 89 90 100 120 ;;
esac
"""


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A CUDA 12.8 toolkit that knows its architectures and compiles nothing, and a PyTorch built for it."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(nvcc.parents[1]))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(builder, "toolkit_architectures", builder.toolkit_architectures.__wrapped__)
    return nvcc


@pytest.mark.parametrize(
    "listed, plain",
    [
        ("9.0a", ["9.0"]),
        ("8.0;9.0a+PTX", ["8.0", "9.0+PTX"]),
        ("8.0 8.6  12.0f", ["8.0", "8.6", "12.0"]),
        ("Hopper;9.0", ["9.0"]),
        ("9.0;9.0a", ["9.0"]),
        ("", []),
    ],
)
def test_arch_lists_with_letters_are_read(listed, plain):
    assert plain_architectures(listed) == plain


def gencode(arguments):
    return [argument for argument in arguments if argument.startswith("-gencode")]


def test_installation_takes_the_architectures_the_toolkit_has(toolkit):
    flags = gencode(FusedAdaLNBuilder().nvcc_args())
    assert flags == [f"-gencode=arch=compute_{n},code=sm_{n}" for n in (80, 86, 89, 90, 100, 120)]


def test_toolkit_without_blackwell(toolkit):
    toolkit.write_text(NVCC.replace(" 100 120", "").replace("75 ", "60 70 75 "))
    flags = gencode(FusedAdaLNBuilder().nvcc_args())
    assert flags == [f"-gencode=arch=compute_{n},code=sm_{n}" for n in (80, 86, 89, 90)]


@pytest.mark.parametrize("listed, expected", [("9.0a", "9.0+PTX"), ("7.0;8.0+PTX;9.0a", "8.0+PTX;9.0")])
def test_just_in_time_arch_list_reaches_pytorch_as_numbers(toolkit, monkeypatch, listed, expected):
    # As DeepSpeed calls it in jit_load(): with the list from the environment, and jit_mode set.
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    one = FusedAdaLNBuilder()
    one.jit_mode, one._jit_arch_list = True, listed
    assert gencode(one.nvcc_args()) == []
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == expected


def test_no_fast_math(toolkit):
    assert "--use_fast_math" not in FusedAdaLNBuilder().nvcc_args()


def test_a_prebuilt_object_is_taken_only_if_its_stamp_fits(toolkit, tmp_path, monkeypatch):
    monkeypatch.setattr(builder, "__file__", str(tmp_path / "builder.py"))
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu128")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a+PTX")
    name = FusedAdaLNBuilder().absolute_name()
    assert name == "al_deepspeed.ops._fused_adaln_torch2_11_cu12_8_sm80_90p"
    assert prebuilt_module() is None
    (tmp_path / (name.rsplit(".", 1)[1] + ".cpython-312-x86_64-linux-gnu.so")).touch()
    assert prebuilt_module() == name
    assert prebuilt_module((8, 6)) == name  # binary of 8.0
    assert prebuilt_module((12, 0)) == name  # PTX of 9.0
    assert prebuilt_module((7, 5)) is None
    monkeypatch.setattr(torch, "__version__", "2.12.0+cu128")
    assert prebuilt_module() is None
    monkeypatch.setattr(torch, "__version__", "2.11.1+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert prebuilt_module() is None


def test_code_runs_within_a_major_version_or_from_ptx():
    assert covers(["8.0"], (8, 9)) and not covers(["8.6"], (8, 0)) and not covers(["8.0"], (9, 0))
    assert covers(["8.0+PTX"], (9, 0)) and not covers(["10.0+PTX"], (9, 0))


def test_why_it_cannot_be_built(toolkit, monkeypatch):
    assert FusedAdaLNBuilder().is_compatible()
    monkeypatch.setenv("PATH", "")
    one = FusedAdaLNBuilder()
    assert not one.is_compatible() and "no C++ compiler" in one.error_log
    toolkit.unlink()
    assert "no nvcc" in FusedAdaLNBuilder().obstacle()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in FusedAdaLNBuilder().obstacle()


WORKER = """
import os, runpy, sys, time
from pathlib import Path

folder, mode, wait_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
build_once = runpy.run_path(sys.argv[4])["build_once"]

def build():
    (folder / f"started.{os.getpid()}").touch()
    if mode == "hang":
        (folder / "lock").touch()  # as PyTorch's loader leaves it when it is killed
        time.sleep(60)
    while mode == "slow" and not (folder / "go").exists():
        time.sleep(0.02)
    if (folder / "broken").exists():
        raise RuntimeError("nvcc: error on line 7")

try:
    (folder / f"there.{os.getpid()}").touch()
    build_once(folder, build, wait_s)
    print("ok")
except Exception as error:
    print(type(error).__name__, error)
"""


def workers(folder: Path, *modes: str, wait_s: float = 30):
    """Start processes one after the other: the first is building when the second comes to the lock."""
    started = []
    for mode in modes:
        command = [sys.executable, "-c", WORKER, str(folder), mode, str(wait_s), build_lock.__file__]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        sign = folder / (f"there.{started[-1].pid}" if started[1:] else f"started.{started[-1].pid}")
        deadline = time.monotonic() + 30
        while not sign.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    time.sleep(0.5)
    return started


def outcome(process) -> str:
    return process.communicate(timeout=60)[0].strip()


def test_a_killed_builder_does_not_hang_the_others(tmp_path):
    dead, living = workers(tmp_path, "hang", "quick")
    dead.send_signal(signal.SIGKILL)
    dead.communicate()
    assert outcome(living) == "ok"
    assert not (tmp_path / "lock").exists()


def test_who_waits_for_a_failed_build_fails_with_its_message(tmp_path):
    (tmp_path / "broken").touch()
    first, second = workers(tmp_path, "slow", "quick")
    (tmp_path / "go").touch()
    assert outcome(first) == "RuntimeError nvcc: error on line 7"
    assert outcome(second) == "RuntimeError nvcc: error on line 7"
    assert len(list(tmp_path.glob("started.*"))) == 1
    (tmp_path / "broken").unlink()
    assert build_once(tmp_path, lambda: "built") == "built"  # a later try starts anew


def test_waiting_ends(tmp_path):
    holder, waiting = workers(tmp_path, "hang", "quick", wait_s=0.5)
    said = outcome(waiting)
    holder.kill()
    holder.communicate()
    assert said.startswith("TimeoutError") and f"process {holder.pid}" in said


@pytest.fixture
def fresh_backend(monkeypatch):
    monkeypatch.setattr(backend, "_state", backend._State())


def refuse():
    raise BuildError("fused AdaLN kernels failed to build: kernel.cu(7): error: no such thing")


def test_auto_warns_once_and_takes_the_reference(fresh_backend, monkeypatch):
    monkeypatch.setattr(backend, "load_kernels", refuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [backend._kernels_or_warning() for _ in range(3)] == [False] * 3
    assert len(caught) == 1 and "kernel.cu(7): error" in str(caught[0].message)


def test_cuda_stops_with_the_compilers_message(fresh_backend, monkeypatch):
    monkeypatch.setattr(backend, "load_kernels", refuse)
    with pytest.raises(AdaptiveLoadError, match=r"kernel.cu\(7\): error"):
        backend.set_backend("cuda")
    assert torch.isfinite(adaln(torch.randn(1, 2, 4))).all()


def test_report_env_puts_the_op_into_deepspeeds_table(capsys):
    environment.print_report()
    report = capsys.readouterr().out
    (row,) = [line for line in report.splitlines() if line.startswith("fused_adaln ...")]
    assert "[NO]" in row or "[YES]" in row
    assert "DeepSpeed general environment info" in report
    facts = environment.facts()["fused_adaln"]
    assert facts["compatible"] is (facts["obstacle"] is None)
