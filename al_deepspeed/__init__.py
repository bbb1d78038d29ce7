"""AdaptiveLoad (arXiv 2605.17923) for DeepSpeed: dual-constraint batches that stay balanced, and fused AdaLN.

Importing this package is cheap: no compiler, no CUDA, no DeepSpeed. `initialize` brings them in when called.
"""

__version__ = "0.1.0"
__all__ = ["__version__", "initialize", "patch_classes"]


def __getattr__(name: str):
    if name == "initialize":
        from al_deepspeed.engine import initialize

        return initialize
    if name == "patch_classes":
        from al_deepspeed.patching.in_memory import patch_classes

        return patch_classes
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
