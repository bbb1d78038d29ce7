"""Checkpoints of a run: `step_N` folders, and `latest` that always names a complete one.

DeepSpeed writes `latest` in place; a kill at that moment leaves it empty. Here every rank's files are on disk
before rank 0 puts the new name in by a rename, and only then do older checkpoints go.
"""

import shutil
from pathlib import Path

import torch.distributed as dist

from al_deepspeed.data.files import write_whole


def save(engine, folder: Path, step: int, *, keep: int) -> None:
    """Collective. Afterwards `latest` names step_N, and at most `keep` checkpoints are left."""
    tag = f"step_{step}"
    if latest(folder) == tag:
        return
    engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
    dist.barrier()
    if dist.get_rank() == 0:
        write_whole(folder / "latest", tag)
        for old in sorted(folder.glob("step_*"), key=_step)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def latest(folder: Path) -> str | None:
    """The tag of the last complete checkpoint."""
    name = folder / "latest"
    return name.read_text().strip() if name.is_file() else None


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))
