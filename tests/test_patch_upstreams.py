"""The matcher on code that people train with: sites against a count by hand, results against the original.

Nothing of that code is in this repository. What stands here as the truth is tests/data/patch_sites, written
before the matcher first ran on these files, and the unpatched code itself.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from upstream import nemo_layers
from upstream.twins import difference
from upstream_sites import counted
from upstreams import unpacked

from al_deepspeed.patching import on_disk
from al_deepspeed.patching.rewriter import rewrite
from al_deepspeed.patching.tree import resolver

LIMIT = 1e-5
PROGRAMS = Path(__file__).parent / "upstream"
# Of these files some classes were counted, of all others the whole file.
COUNTED_CLASSES = {"diffusers/models/attention.py": {"JointTransformerBlock"}}
# NeMo 2.5.3, 2.6.2 and 2.7.0 hold the same files as 2.7.3, byte for byte.
RELEASES = [
    *[("diffusers", version) for version in ("0.42.1", "0.35.2")],
    *[("megatron-bridge", version) for version in ("0.6.2", "0.4.0")],
    *[("nemo-toolkit", version) for version in ("2.7.3", "2.4.1", "2.3.3", "2.2.1", "2.1.0")],
]
NEWEST = {("diffusers", "0.42.1"), ("megatron-bridge", "0.6.2"), ("nemo-toolkit", "2.7.3")}
FILES = [
    pytest.param(package, version, file, id=f"{package}-{version}-{Path(file).stem}")
    for package, version in RELEASES
    for file in counted(package)[version]
]


@pytest.fixture(scope="session")
def cache(request) -> Path:
    return Path(request.config.cache.mkdir("upstreams"))


@dataclass
class Program:
    """A program of tests/upstream while it runs: of each release, errors by case and the places reached."""

    process: subprocess.Popen
    output: Path

    def results(self) -> list[tuple[dict[str, float], set[str]]]:
        assert self.process.wait(timeout=240) == 0, self.output.read_text()[-4000:]
        printed = json.loads(self.output.read_text().splitlines()[-1])
        return [(release["errors"], set(release["reached"])) for release in printed]


@pytest.fixture(scope="module")
def programs(cache, tmp_path_factory):
    """All programs, started together; in place of one whose release cannot be had, the reason."""
    folder = tmp_path_factory.mktemp("programs")
    started: dict[str, Program | str] = {}

    def start(name: str, program: str, arguments: Callable[[], list[object]]) -> None:
        try:
            command = [sys.executable, str(PROGRAMS / program), *map(str, arguments())]
        except pytest.skip.Exception as reason:
            started[name] = str(reason)
            return
        output = folder / name
        with output.open("w") as stream:
            process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        started[name] = Program(process, output)

    for version, form in (("0.42.1", "observed"), ("0.35.2", "plain")):
        arguments = partial(
            lambda version, form: [unpacked(cache, "diffusers", version), form], version, form
        )
        start(f"diffusers {version}", "diffusers_models.py", arguments)
    start("megatron-bridge", "megatron_layers.py", lambda: _megatron(cache))
    yield started
    for program in started.values():
        if isinstance(program, Program):
            program.process.kill()
            program.process.wait()


# Wan's full layer of 0.6.2 wants a newer megatron-core than there is for Python 3.11.
BRIDGES = {"0.4.0": "norms,wan_layer,flux_layers", "0.6.2": "norms,flux_layers"}


def _megatron(cache: Path) -> list[object]:
    core = unpacked(cache, "megatron-core", "0.16.1", foreign=False)
    bridges = [f"{unpacked(cache, 'megatron-bridge', version)}={parts}" for version, parts in BRIDGES.items()]
    return [core, *bridges]


def results_of(programs: dict[str, Program | str], name: str) -> list[tuple[dict[str, float], set[str]]]:
    program = programs[name]
    if isinstance(program, str):
        pytest.skip(program)
    return program.results()


def assert_equal(errors: dict[str, float]) -> None:
    assert errors
    assert {case: error for case, error in errors.items() if not error <= LIMIT} == {}


def places(package: str, version: str) -> set[str]:
    return {
        f"{file}:{line}"
        for file, classes in counted(package)[version].items()
        for entries in classes.values()
        for line, _ in entries
    }


def test_patched_models_of_the_newest_diffusers_equal_the_originals(programs):
    ((errors, reached),) = results_of(programs, "diffusers 0.42.1")
    assert_equal(errors)
    assert len(errors) == 16
    assert reached == places("diffusers", "0.42.1")  # every counted site was run, and nothing else


def test_patched_models_of_last_years_diffusers_equal_the_originals(programs):
    ((errors, reached),) = results_of(programs, "diffusers 0.35.2")
    assert_equal(errors)
    assert len(errors) == 16
    assert reached == {"adaln", "residual_adaln", "gated_residual"}


def test_patched_layers_of_megatron_bridge_equal_the_originals(programs):
    in_the_layer = {"megatron/bridge/diffusion/models/wan/wan_layer_spec.py:239"}
    releases = results_of(programs, "megatron-bridge")
    for (version, parts), (errors, reached) in zip(BRIDGES.items(), releases, strict=True):
        assert_equal(errors)
        assert len(errors) == (9 if "wan_layer" in parts else 8)
        not_run = set() if "wan_layer" in parts else in_the_layer
        assert reached == places("megatron-bridge", version) - not_run


@pytest.mark.parametrize("version", [version for package, version in RELEASES if package == "nemo-toolkit"])
def test_patched_classes_of_nemo_equal_the_originals(cache, version):
    root = unpacked(cache, "nemo-toolkit", version)
    generator = torch.Generator().manual_seed(0)
    x, branch = torch.randn(2, 6, 2, nemo_layers.FEATURES, generator=generator)
    row = torch.randn(1, 2, nemo_layers.FEATURES, generator=generator)

    def forward(adaln, x, branch, timestep):
        shift, scale, gate, shift2, scale2, _ = adaln(timestep)
        first = adaln.modulated_layernorm(x, shift=shift, scale=scale, layernorm_idx=0)
        return first, adaln.scaled_modulated_layernorm(x, branch, gate, shift2, scale2, layernorm_idx=1)

    layers, model = (nemo_layers.namespaces(root, file) for file in nemo_layers.NAMES)
    config = nemo_layers.settings()
    adaln = [space["AdaLN"](config, n_adaln_chunks=6, use_second_norm=True) for space in layers]
    continuous = [space["AdaLNContinuous"](config, nemo_layers.FEATURES) for space in layers]
    final = [space["FinalLayer"](nemo_layers.FEATURES, 2, 1, 4) for space in model]
    assert_equal(
        {
            "AdaLN": difference(*adaln, x, branch, row, call=forward),
            "AdaLNContinuous": difference(*continuous, x, row[0]),
            "FinalLayer": difference(*final, x, row[0, :1]),
        }
    )


@pytest.mark.parametrize(("package", "version", "file"), FILES)
def test_found_sites_are_those_counted_by_hand(cache, package, version, file):
    root = unpacked(cache, package, version)
    source = (root / file).read_text(encoding="utf-8")
    resolve = resolver(root / file, root, {})
    result = rewrite(source, file=file, resolve=resolve)
    found = Counter((site.function.split(".")[0], site.line, site.kind) for site in result.sites)
    if file in COUNTED_CLASSES:
        found = Counter({place: n for place, n in found.items() if place[0] in COUNTED_CLASSES[file]})
    expected = Counter(
        (name, *place) for name, places in counted(package)[version][file].items() for place in places
    )
    assert sorted(found.elements()) == sorted(expected.elements())
    compile(result.source, file, "exec")
    if (package, version) in NEWEST:
        again = rewrite(result.source, file=file, resolve=resolve)
        assert (again.sites, again.source) == ((), result.source)


@pytest.mark.parametrize(("package", "version"), [("diffusers", "0.35.2"), ("megatron-bridge", "0.4.0")])
def test_revert_restores_every_byte(cache, package, version, tmp_path):
    root = unpacked(cache, package, version)
    # Of diffusers one file: what each file becomes is tested above.
    files = [file for file in counted(package)[version] if package != "diffusers" or "_flux" in file]
    before = {file: (root / file).read_bytes() for file in files}
    for file, data in before.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(data)
    applied = on_disk.apply(tmp_path)
    assert {file.name for file in applied.examined.to_patch} == set(files)
    assert all((tmp_path / file).read_bytes() != data for file, data in before.items())
    on_disk.revert(tmp_path)
    after = {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*.py")}
    assert after == before
