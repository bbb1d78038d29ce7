"""What a wheel holds: an installed package must be able to compile its kernels and know its recipes."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from al_deepspeed.ops import builder
from al_deepspeed.patching import recipes

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of what git tracks, so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for relative in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "al_deepspeed", "csrc", "patches"):
        files = [ROOT / relative] if (ROOT / relative).is_file() else (ROOT / relative).rglob("*.*")
        for path in files:
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":
                target = source / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
    ]
    subprocess.run([*command, str(source)], check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_kernel_sources_are_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {Path(name).name for name in archive.namelist() if name.startswith("al_deepspeed/csrc/")}
    sources = {
        path.name for path in (ROOT / "csrc").iterdir() if path.suffix in {".cu", ".cuh", ".h", ".cpp"}
    }
    assert sources and sources <= held


def test_an_installed_package_finds_its_sources(wheel, tmp_path, monkeypatch):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    monkeypatch.setattr(builder, "__file__", str(tmp_path / "al_deepspeed" / "ops" / "builder.py"))
    sources = [Path(source) for source in builder.FusedAdaLNBuilder().sources()]
    assert tmp_path / "al_deepspeed" / "csrc" / "binding.cpp" in sources
    assert {source.parent for source in sources} == {tmp_path / "al_deepspeed" / "csrc"}


def test_the_recipes_are_in_the_wheel(wheel, tmp_path, monkeypatch):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    monkeypatch.setattr(recipes, "__file__", str(tmp_path / "al_deepspeed" / "patching" / "recipes.py"))
    assert recipes.recipe_folder() == tmp_path / "al_deepspeed" / "patches"
    assert {path.name for path in recipes.recipe_folder().glob("*")} >= {
        path.name for path in (ROOT / "patches").glob("*.toml")
    }
    assert recipes.load_recipes() == recipes.load_recipes(ROOT / "patches")
