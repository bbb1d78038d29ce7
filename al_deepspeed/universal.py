"""Checkpoints of another world: what ZeRO cut up for one number of ranks, loaded by another number.

DeepSpeed loads a ZeRO checkpoint at the size that saved it, and at any other only as a universal checkpoint,
which a program of its own makes. Here loading does that by itself: rank 0 runs the program while all ranks
wait, all load the result, and it is removed. DeepSpeed makes it for Adam's state alone.

What its load gets wrong is put right afterwards: buffers and frozen parameters stay as the model was built;
at ZeRO-3 every parameter group gets the settings (weight decay, ...) of the first, and all states share one
tensor as Adam's step, which then counts once for each of them.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger

from al_deepspeed.agreement import together
from al_deepspeed.errors import AdaptiveLoadError

WAIT_S = 20  # between the ranks' exchanges while one converts, far below any collective's time limit
CONVERTER = "deepspeed.checkpoint.ds_to_universal"


def load_at_any_size(
    engine: Any, load_checkpoint: Callable, load_dir: str, tag: str | None, **options: Any
) -> tuple[str | None, dict | None]:
    """`load_checkpoint` of a DeepSpeed engine, whatever world saved what it loads. Collective.

    Args:
        load_checkpoint: the engine's own. load_dir, tag, options: its arguments.
    Returns:
        (path, client_state) of the checkpoint as it was saved.
    """
    folder = _folder(Path(load_dir), tag)
    answer = [None]
    with together():
        if folder is not None and dist.get_rank() == 0:
            answer = [_saved_size(folder)]
    dist.broadcast_object_list(answer, src=0)
    saved, size = answer[0], engine.seq_dp_world_size
    weights_only = options.get("load_module_only") or not options.get("load_optimizer_states", True)
    stage = engine.zero_optimization_stage()
    whole_weights = weights_only and stage < 3  # those stand in the checkpoint uncut
    if saved in (None, size) or stage == 0 or whole_weights or engine.load_universal_checkpoint():
        return load_checkpoint(load_dir, tag, **options)
    start = time.perf_counter()
    converted = folder.parent / f".universal-{folder.name}"
    _convert(folder, converted / folder.name)
    engine._config.load_universal_checkpoint = True  # DeepSpeed reads it only while it loads
    try:
        with together():
            path, client_state = load_checkpoint(str(converted), folder.name, **options)
            _put_right(engine, folder, converted / folder.name, weights_only)
    finally:
        engine._config.load_universal_checkpoint = False
        if dist.get_rank() == 0:
            shutil.rmtree(converted, ignore_errors=True)
    if dist.get_rank() == 0:
        logger.warning(
            f"{folder} was saved with data-parallel size {saved} and is loaded with {size}: converted "
            f"through DeepSpeed's universal checkpoint in {time.perf_counter() - start:.0f} s."
        )
    return str(folder / Path(path).name), client_state


def _folder(load_dir: Path, tag: str | None) -> Path | None:
    """Where the checkpoint lies; None where DeepSpeed will find none either."""
    latest = load_dir / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    return load_dir / str(tag) if tag else None


def _saved_size(folder: Path) -> int | None:
    """Into how many parts ZeRO cut the optimizer's state; None for what is no checkpoint of ZeRO."""
    if not any(folder.glob("*zero_pp_rank_*_optim_states.pt")):
        return None
    return int(_read(_model_files(folder)[0])["dp_world_size"])


def _model_files(folder: Path, model_rank: int = 0) -> list[Path]:
    """Of one tensor-parallel rank: at ZeRO-1 and 2 one file, at ZeRO-3 one a data-parallel rank, in order."""
    found = folder.glob(f"*mp_rank_{model_rank:02d}_model_states.pt")
    files = [path for path in found if not path.name.startswith("layer_")]

    def numbers(path: Path) -> list[int]:
        return [int(word) for word in path.name.split("_") if word.isdecimal()]

    return sorted(files, key=numbers)


def _read(path: Path) -> dict[str, Any]:
    """Tensors stay on disk until they are used."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def _convert(source: Path, target: Path) -> None:
    """Rank 0 converts; all ranks return when it is done, or raise when it failed. Collective."""
    with ThreadPoolExecutor(1) as background:
        work = background.submit(_run_converter, source, target) if dist.get_rank() == 0 else None
        outcome = None
        while outcome is None:
            answer = [None if work is None else _outcome(work)]
            dist.broadcast_object_list(answer, src=0)
            outcome = answer[0]
    if outcome:
        raise AdaptiveLoadError(
            f"{source} was saved with another data-parallel size, and DeepSpeed could not convert it to a "
            f"universal checkpoint, which holds Adam's state alone: {outcome}. Resume with as many ranks as "
            "saved it, or take its weights only: load_module_only=True."
        )


def _outcome(work: Future) -> str | None:
    """None while at work, empty when done, else what failed."""
    if not wait([work], timeout=WAIT_S).done:
        return None
    return str(work.exception() or work.result())


def _run_converter(source: Path, target: Path) -> str:
    """In a process of its own: it forks workers, which one with a device must not."""
    shutil.rmtree(target.parent, ignore_errors=True)  # left by a conversion that was killed
    target.parent.mkdir()
    folders = ("--input_folder", str(source), "--output_folder", str(target))
    command = [sys.executable, "-m", CONVERTER, *folders, "--inject_missing_state"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode == 0 and any(target.glob("zero/*/exp_avg.pt")):
        return ""
    shutil.rmtree(target.parent, ignore_errors=True)
    if done.returncode == 0:  # the master weights are not in it either
        return "there is no exp_avg in it"
    lines = done.stdout.strip().splitlines() or ["it printed nothing"]
    return f"exit code {done.returncode}, {lines[-1]}"


def _put_right(engine: Any, folder: Path, converted: Path, weights_only: bool) -> None:
    """What DeepSpeed's universal load leaves out."""
    states = [_read(path) for path in _model_files(folder, engine.checkpoint_mp_rank)]
    saved, stage = states[0]["module"], engine.zero_optimization_stage()
    frozen = [(name, value) for name, value in engine.module.named_parameters() if not value.requires_grad]
    whole = [*engine.module.named_buffers(), *(frozen if stage < 3 else ())]
    with torch.no_grad():
        for name, value in whole:
            if name in saved:
                value.copy_(saved[name])
        for name, value in frozen if stage == 3 else ():
            first = dist.get_process_group_ranks(engine.optimizer.dp_process_group)[0]
            with deepspeed.zero.GatheredParameters([value], modifier_rank=first):
                parts = [state["frozen_param_fragments"][name].flatten() for state in states]
                value.copy_(torch.cat(parts)[: value.numel()].view_as(value))
    if stage == 3 and not weights_only:
        saved = _read(converted / "zero" / "optimizer_state.pt")["param_groups"]
        for group, settings in zip(engine.optimizer.param_groups, saved, strict=True):
            group.update({key: value for key, value in settings.items() if key != "params"})
        for state in engine.optimizer.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()
