"""What `al-deepspeed report-env` says: DeepSpeed's own report with our op in its table."""

from deepspeed import env_report
from deepspeed.accelerator import get_accelerator

from al_deepspeed.ops.builder import FusedAdaLNBuilder, prebuilt_module, source_folder, toolkit_architectures


def print_report() -> None:
    """Print DeepSpeed's report (`ds_report`); it has no hook for ops of others, so ours joins its tables."""
    builder = FusedAdaLNBuilder()
    env_report.ALL_OPS[builder.name] = builder
    env_report.installed_ops[builder.name] = prebuilt_module() is not None
    if prebuilt_module() is not None:
        env_report.accelerator_name = get_accelerator()._name
    env_report.main()
    print("fused_adaln sources ................", source_folder())
    print("fused_adaln prebuilt ...............", prebuilt_module() or "none for this PyTorch and CUDA")
    print("fused_adaln obstacle ...............", builder.obstacle() or "none")


def facts() -> dict:
    """The same for programs: what is there, and why not."""
    import deepspeed
    import torch

    builder = FusedAdaLNBuilder()
    obstacle = builder.obstacle()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "deepspeed": deepspeed.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "fused_adaln": {
            "compatible": obstacle is None,
            "obstacle": obstacle,
            "prebuilt": prebuilt_module(),
            "sources": str(source_folder()),
            "toolkit_architectures": sorted(toolkit_architectures(), key=float),
        },
    }
