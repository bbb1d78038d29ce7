"""Peak memory of this process between two moments: the device's allocator, or on CPUs the resident set.

DeepSpeed's CPU accelerator looks at the resident set only when asked, when activations are gone again. Linux
keeps the true peak (`VmHWM`) and resets it on a write to /proc/self/clear_refs. But the resident set holds
whatever the process ever came by. Between two points it may grow by blocks that the C library keeps, and by
the scan's own fits, profile and picture: the former are given back, the latter are counted out, so that a
point reads the same early in a scan, late in it, and in a check that follows.
"""

import ctypes
import math
import os
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator

GB = 1e9
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class DeviceMemory:
    """The caching allocator of a CUDA device."""

    def reset(self) -> None:
        get_accelerator().reset_peak_memory_stats()

    def release(self) -> None:
        """Gives cached blocks back, so that one point does not see what another reserved."""
        get_accelerator().empty_cache()

    def peak_gb(self) -> float:
        return get_accelerator().max_memory_allocated() / GB

    def reserved_gb(self) -> float:
        return get_accelerator().max_memory_reserved() / GB

    def capacity_gb(self) -> float:
        """What the allocator can reserve: the device without what lies outside it (context, NCCL, others)."""
        free, _ = torch.cuda.mem_get_info()
        return (free + get_accelerator().memory_reserved()) / GB


class HostMemory:
    """The resident set of a CPU rank; unknown (NaN) where the system does not keep its peak."""

    def __init__(self) -> None:
        self._known = os.access(CLEAR, os.W_OK)
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)  # glibc alone has it
        self._first_rest_gb: float | None = None
        self._grown_gb = 0.0

    def reset(self) -> None:
        if self._known:
            CLEAR.write_text("5")

    def release(self) -> None:
        """Gives unused blocks back; what the process then holds above the first such rest counts no more."""
        if not self._known:
            return
        self._trim(0)
        rest_gb = _status_gb("VmRSS")
        if self._first_rest_gb is None:
            self._first_rest_gb = rest_gb
        self._grown_gb = rest_gb - self._first_rest_gb

    def peak_gb(self) -> float:
        return _status_gb("VmHWM") - self._grown_gb if self._known else math.nan

    reserved_gb = peak_gb

    def capacity_gb(self) -> float:
        """An equal share of the machine's memory for each rank on it."""
        return get_accelerator().total_memory() / int(os.environ.get("LOCAL_SIZE", "1")) / GB


def _status_gb(name: str) -> float:
    """A line of this process's status: `VmRSS` is the resident set, `VmHWM` its peak."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / GB


def memory_meter() -> DeviceMemory | HostMemory:
    """The meter for the accelerator in use."""
    return HostMemory() if get_accelerator().device_name() == "cpu" else DeviceMemory()
