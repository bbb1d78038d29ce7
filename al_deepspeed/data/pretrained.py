"""Models that `encode` loads from a folder or a hub, alone or as a part of a diffusers pipeline."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from al_deepspeed.errors import CorpusError


def library(name: str) -> ModuleType:
    """diffusers or transformers, which only the codec and the text encoder that have weights need."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CorpusError(
            f"{name} cannot be imported ({error}): pip install 'al-deepspeed[train]'"
        ) from error


def load_part(kind: type, source: str, part: str, **options: Any) -> Any:
    """`kind.from_pretrained` on SOURCE, or on its subfolder PART where SOURCE is a whole pipeline.

    Raises:
        CorpusError: neither place holds such a model.
    """
    folder = Path(source)
    subfolders = [""] if folder.is_dir() and not (folder / part).is_dir() else [part, ""]
    reasons = []
    for subfolder in subfolders:
        try:
            return kind.from_pretrained(source, subfolder=subfolder, **options)
        except (OSError, ValueError) as error:
            reasons.append(f"{subfolder or 'itself'}: {str(error).splitlines()[0]}")
    raise CorpusError(
        f"{source} holds no {kind.__name__} that can be loaded ({'; '.join(reasons)}). Give a folder "
        "written by save_pretrained, or the name of a repository on the hub."
    )


def pick_device(device: str) -> torch.device:
    """`auto` is the first CUDA device where there is one; kernels are asked to be deterministic."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise CorpusError(f"--device is {device!r}, which this machine does not have: {error}") from error
