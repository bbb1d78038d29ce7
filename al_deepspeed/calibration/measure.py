"""Measures one (B, S) in the live engine: forward and backward of a micro-batch on all ranks at once.

A warm-up, then repeats until the median is known within 2% or a cap is reached: a number of repeats, or the
point's time, so that none but the first repeat ends after its deadline. Each repeat begins together
and counts with its slowest rank's time; the optimizer step, whose turn comes every G-th repeat as in
training, has a time of its own and lies inside the memory. All ranks see the same numbers, so they stop after
the same one.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from scipy.stats import t as student

from al_deepspeed.calibration.memory_meter import memory_meter
from al_deepspeed.calibration.points import Point
from al_deepspeed.calibration.workload import Shape, Synthetic, to_device
from al_deepspeed.telemetry import clock

CONFIDENCE = 0.95
HALF_WIDTH = 0.02
FEWEST_REPEATS = 2
MEDIAN_OVER_MEAN = math.sqrt(math.pi / 2)  # standard error of a median over that of a mean, normal noise


class Meter:
    """Runs micro-batches in one engine.

    Args:
        engine: DeepSpeed's, in training mode.
        synthetic: (B, shape) to a batch and its loss.
        most_repeats: timed runs of a point at most.
    """

    def __init__(self, engine: Any, synthetic: Synthetic, most_repeats: int = 10) -> None:
        self._engine, self._synthetic, self._most_repeats = engine, synthetic, most_repeats
        self.device = torch.device(get_accelerator().current_device_name())
        self._clock = clock()
        self.memory = memory_meter()
        self._optimizer_gb = self._step_gb = 0.0
        self.prepared = False
        self._started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def prepare(self, batch_size: int, shape: Shape) -> None:
        """Two whole steps: optimizer state and buffers exist from the first on; the second is looked at.

        The optimizer step is the same at every point; beside a small batch that lies on the device all the
        while, as a training loop's does not, it is seen by itself.
        """
        for _ in range(2):
            for _ in range(self._engine.gradient_accumulation_steps()):
                self.run(*self.batch(batch_size, shape))
            self._optimizer_gb = self._step_gb
        self.prepared = True

    def capacity_gb(self) -> float:
        """The memory of the rank that has least. Collective."""
        return float(self._gathered([self.memory.capacity_gb()]).min())

    def batch(self, batch_size: int, shape: Shape) -> tuple[Any, Any]:
        """A synthetic batch on the device, and its loss."""
        batch, loss = self._synthetic(batch_size, shape)
        return to_device(batch, self.device), loss

    def measure(self, batch_size: int, shape: Shape, tokens: int, deadline_s: float) -> Point:
        """One point. Collective.

        Args:
            deadline_s: by the clock that `elapsed_s` of rank 0 shows; no second repeat that would end later.
        """
        self.memory.release()
        batch, loss = self.batch(batch_size, shape)
        rows = [self._gathered(self.run(batch, loss))]
        times: list[np.ndarray] = []
        while True:
            rows.append(self._gathered(self.run(batch, loss)))
            times.append(rows[-1][:, 0])
            slowest = [row.max() for row in times]
            before_s, now_s = rows[-2][0, 1], rows[-1][0, 1]
            out_of_time = now_s + (now_s - before_s) > deadline_s
            if len(times) >= self._most_repeats or out_of_time or is_certain(slowest):
                break
        pass_gb, peak_gb, reserved_gb = (
            float(np.max([row[:, column] for row in rows])) for column in (2, 3, 4)
        )
        steps = [row[:, 5].max() for row in rows if not np.isnan(row[:, 5]).any()]
        return Point(
            batch_size=batch_size,
            tokens=tokens,
            ms=float(np.median(slowest)),
            peak_gb=_known(peak_gb),
            reserved_gb=_known(reserved_gb),
            pass_gb=_known(pass_gb),
            shape=shape,
            repeats=len(times),
            step_ms=float(np.median(steps)) if steps else None,
            repeat_ms=tuple(map(float, slowest)),
        )

    def run(self, batch: Any, loss: Any) -> list[float]:
        """One micro-step: ms, seconds since the start, GB of the passes, of the whole step, reserved; and the
        ms of the step that it ends beside its micro-batches, NaN where it ends none."""
        engine, memory = self._engine, self.memory
        dist.barrier()
        get_accelerator().synchronize()
        memory.reset()
        start = self._clock.mark()
        engine.backward(loss(engine, batch))
        end = self._clock.mark()
        self._clock.settle(end)
        pass_gb, reserved_gb = memory.peak_gb(), memory.reserved_gb()
        memory.reset()
        ends_step = engine.is_gradient_accumulation_boundary()
        entered = self._clock.mark()
        engine.step()
        left = self._clock.mark()
        get_accelerator().synchronize()
        step_ms = self._clock.elapsed_ms(entered, left) if ends_step else math.nan
        self._step_gb = memory.peak_gb()
        peak_gb = max(pass_gb, self._optimizer_gb)
        reserved_gb = max(reserved_gb, memory.reserved_gb())
        return [self._clock.elapsed_ms(start, end), self.elapsed_s, pass_gb, peak_gb, reserved_gb, step_ms]

    def _gathered(self, row: list[float]) -> np.ndarray:
        """Every rank's row, [ranks, columns]."""
        mine = torch.tensor(row, dtype=torch.float64, device=self.device)
        table = mine.new_empty(dist.get_world_size(), len(row))
        dist.all_gather_into_tensor(table.view(-1), mine)
        return table.cpu().numpy()


def is_certain(values: Sequence[float]) -> bool:
    """Whether the median of the values is known within HALF_WIDTH of itself."""
    count = len(values)
    if count < FEWEST_REPEATS:
        return False
    error = MEDIAN_OVER_MEAN * np.std(values, ddof=1) / math.sqrt(count)
    quantile = student.ppf((1 + CONFIDENCE) / 2, count - 1)
    return bool(quantile * error <= HALF_WIDTH * np.median(values))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
