"""The order of the tests; and the `gpu` marker: such tests skip on a machine without a CUDA device."""

import pytest


def launches(module) -> bool:
    """Whether a test module uses the `deepspeed` launcher."""
    return any(getattr(value, "__module__", None) == "launching" for value in vars(module).values())


def pytest_collection_modifyitems(items):
    import torch

    # A file that launches takes a minute or more: first, so that no worker is left with one at the end.
    items.sort(key=lambda item: not launches(item.module))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
