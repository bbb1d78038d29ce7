"""The kernels compile for the oldest and for the newest architecture in daily use, and nothing spills.

Every kernel serves D <= 5120, so every kernel counts. ptxas reports what it did with `-v`; nothing is run.
"""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"
SOURCES = sorted(path.name for path in CSRC.glob("*.cu"))
ARCHITECTURES = ["80", "90"]

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def compile_to_cubin(source: str, architecture: str, folder: Path) -> subprocess.CompletedProcess:
    target = folder / f"{source}.{architecture}.cubin"
    command = ["nvcc", "-std=c++17", "-O3", "-cubin", f"-arch=sm_{architecture}", "-Xptxas", "-v"]
    return subprocess.run(
        [*command, "-o", str(target), str(CSRC / source)], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What nvcc answered, for every (source, architecture)."""
    folder = tmp_path_factory.mktemp("cubin")
    keys = [(source, architecture) for source in SOURCES for architecture in ARCHITECTURES]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(keys, pool.map(lambda key: compile_to_cubin(*key, folder), keys), strict=True))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES)
def test_compiles_without_a_spill(compiled, source, architecture):
    result = compiled[source, architecture]
    assert result.returncode == 0, result.stderr
    kernel, spills, kernels = "", {}, 0
    for line in result.stderr.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = found[1]
            kernels += 1
        elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills |= {kernel: found[0]} if any(map(int, found.groups())) else {}
    assert not spills
    assert kernels > 0 or source == "adaln_backward.cu", "ptxas named no kernel: has its report changed?"
