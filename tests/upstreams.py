"""Releases of the code bases that recipes name, fetched with pip into a cache and never into the tree.

A test that needs one is skipped, with pip's own last words, where no index can be reached. What was fetched
once stays in the cache folder.
"""

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

# Wheels for Python 3.12 alone are unpacked, not installed: only their source is read.
FOREIGN = ("--only-binary=:all:", "--python-version", "3.12")
FOLDERS = {
    "diffusers": "diffusers/",
    "megatron-bridge": "megatron/bridge/diffusion/",
    "nemo-toolkit": "nemo/collections/diffusion/models/",
    "megatron-core": "megatron/core/",
}
failures: dict[str, str] = {}  # a wheel that could not be had is asked for once


def unpacked(cache: Path, package: str, version: str, *, foreign: bool = True) -> Path:
    """Folder to import from that holds this release's source; fetched when it is not there yet.

    Args:
        foreign: the wheel may be for another Python than this one.
    """
    installed = _installed(package, version)
    if installed:
        return installed
    folder = cache / f"{package}-{version}"
    if not folder.is_dir():
        partial = cache / f"{package}-{version}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        downloaded = _download(cache, package, version, foreign)
        with zipfile.ZipFile(downloaded) as wheel:
            members = [name for name in wheel.namelist() if name.startswith(FOLDERS[package])]
            wheel.extractall(partial, members)
        partial.rename(folder)
        downloaded.unlink()
    return folder


def _installed(package: str, version: str) -> Path | None:
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return None
    return Path(str(found.locate_file(""))) if found.version == version else None


def _download(cache: Path, package: str, version: str, foreign: bool) -> Path:
    wanted = f"{package}=={version}"
    if wanted not in failures:
        wheels = cache / "wheels" / wanted
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), wanted]
        try:
            done = subprocess.run(
                [*command, *(FOREIGN if foreign else ())], capture_output=True, text=True, timeout=120
            )
            words = done.stderr.strip().splitlines()
            failures[wanted] = "" if done.returncode == 0 else (words[-1] if words else "pip failed")
        except subprocess.TimeoutExpired:
            failures[wanted] = "pip took more than two minutes"
    if failures[wanted]:
        pytest.skip(f"{wanted} cannot be downloaded: {failures[wanted]}")
    (wheel,) = (cache / "wheels" / wanted).glob("*.whl")
    return wheel
