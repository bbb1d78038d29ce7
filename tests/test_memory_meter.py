"""The resident set as a meter: a point reads the same whatever the process has come to hold before it."""

import os

import numpy as np
import pytest

from al_deepspeed.calibration.memory_meter import CLEAR, HostMemory

BLOCK = 100_000_000  # bytes; written to, so resident
SMALL = 4_096  # bytes a block: below what the C library maps by itself, so it may keep it


def passes(memory: HostMemory, size: int) -> float:
    """Peak GB of a point that holds so many bytes for a moment."""
    memory.release()
    memory.reset()
    np.ones(size, np.uint8)
    return memory.peak_gb()


@pytest.mark.skipif(not os.access(CLEAR, os.W_OK), reason="the system does not keep the peak")
def test_what_the_process_came_to_hold_between_two_points_is_not_the_points():
    memory = HostMemory()
    before = passes(memory, BLOCK)
    kept = np.ones(3 * BLOCK, np.uint8)  # as a picture's libraries are
    assert passes(memory, BLOCK) == pytest.approx(before, abs=0.01)
    assert passes(memory, 2 * BLOCK) == pytest.approx(before + 0.1, abs=0.01)
    del kept


@pytest.mark.skipif(not os.access(CLEAR, os.W_OK), reason="the system does not keep the peak")
def test_blocks_that_were_freed_are_given_back():
    memory = HostMemory()
    before = passes(memory, BLOCK)
    blocks = [bytes(SMALL) for _ in range(BLOCK // SMALL)]
    del blocks
    assert passes(memory, BLOCK) == pytest.approx(before, abs=0.01)
