"""How unequal the ranks are at equal work: it bounds what balancing can win.

Step times do not show it: under ZeRO-3 a fast rank waits for a slow one inside every all-gather, so both take
equally long. But waiting is spent inside collectives. The profiler sees when they run (gloo's on CPUs, NCCL's
kernels on GPUs); what is left of a rank's step is its own work.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

COLLECTIVES = ("gloo:", "nccl")


def union_ms(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals in microseconds, in ms."""
    total, reached = 0.0, -np.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e3


def busy_ms(run, device: torch.device) -> list[float]:
    """Each rank's time in one call of `run` outside collectives. Collective.

    Args:
        run: one micro-step; returns a row whose first number is its ms.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        total_ms = run()[0]
    intervals = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.name.startswith(COLLECTIVES)
    ]
    mine = torch.tensor([max(0.0, total_ms - union_ms(intervals))], dtype=torch.float64, device=device)
    table = mine.new_empty(dist.get_world_size())
    dist.all_gather_into_tensor(table, mine)
    return table.cpu().tolist()
