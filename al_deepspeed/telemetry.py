"""What each step was planned to cost and what it took: one JSON line a step in RUN/telemetry.jsonl.

Rank 0 writes the file; it knows the plan of every rank, so only measurements travel: one all-gather of a few
numbers a rank, after the optimizer step. R is the data-parallel size, G the micro-steps of a step.

    step                  optimizer steps completed, counted over restarts (DeepSpeed's global_steps)
    epoch, micro_step     of the step's first micro-step; micro_step counts from the epoch's start, with a
                          stream from its window's
    samples, tokens       of this step over all ranks, fillers not counted
    samples_total, tokens_total    since the first step, over restarts
    fillers               micro-batches of the step that repeat a sample at weight 0
    shape                 latent frames x height x width, [G][R]
    kind                  "image", "video" or the manifest's own word, [G][R]
    batch_size            B, [G][R]
    sequence_length       S, [G][R]
    loss_weight           what the mean loss was multiplied with, [G][R]
    predicted_cost        of each micro-batch by the cost model, [G][R]; ms with a calibration, else relative
    measured_ms           from hand-out of the batch to the entry of engine.step(), [G][R]: forward and
                          backward, and the waiting for other ranks inside: under ZeRO-3 every layer waits
    wait_ms               for data before the hand-out, [G][R]
    optimizer_ms          the engine.step() that updates, [R]
    step_ms               first hand-out to the end of the update, plus the waiting for data between, [R]
    peak_memory_bytes     largest allocation during the step, [R]; resident set on CPUs
    peak_reserved_bytes   largest reservation of the allocator, [R]
    loss                  the step's mean loss, exact, if the loop gave it to `record_loss`; else null
    learning_rate         of the first parameter group, as the update used it
    lr_factor             what lr_scaling multiplied it with
    time                  seconds since 1970

The same figures, summed up over ranks, go to DeepSpeed's monitor (TensorBoard, W&B, Comet, CSV) under
`AdaptiveLoad/` where the config turns it on. Their x axis is DeepSpeed's own sample counter, as for its
events: W&B drops an event whose x is below the last one's. That counter counts micro-batches, R*G a step;
`AdaptiveLoad/samples_total` is the true count.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from al_deepspeed.scheduling.plan import Plan

FILE_NAME = "telemetry.jsonl"
MEBI = 1 << 20


class HostClock:
    """Marks in host time, for devices that run in step with the host."""

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3

    def settle(self, mark: float) -> None:
        """Host marks are valid at once."""


class DeviceClock:
    """Marks in the device's stream; reading them waits for the last one, so once a step."""

    def mark(self) -> Any:
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end)

    def settle(self, mark: Any) -> None:
        mark.synchronize()


def clock() -> HostClock | DeviceClock:
    """The clock of the accelerator in use."""
    return HostClock() if get_accelerator().Event is None else DeviceClock()


class Stopwatch:
    """One rank's measurements of the step in progress."""

    def __init__(self) -> None:
        self._clock = clock()
        self._handed_out: list[Any] = []
        self._step_entered: list[Any] = []
        self._wait_ms: list[float] = []
        self._loss: torch.Tensor | None = None

    def hand_out(self, wait_ms: float) -> None:
        """A micro-batch goes to the training loop, which waited this long for it."""
        if not self._handed_out:
            get_accelerator().reset_peak_memory_stats()
        if len(self._handed_out) > len(self._step_entered):  # drawn, but dropped without engine.step()
            self._handed_out.pop()
            self._wait_ms.pop()
        self._handed_out.append(self._clock.mark())
        self._wait_ms.append(wait_ms)

    def add_loss(self, weighted: torch.Tensor) -> None:
        """Sums up this rank's weighted losses, on the device."""
        self._loss = weighted if self._loss is None else self._loss + weighted

    def enter_step(self) -> None:
        """engine.step() begins: forward and backward of the micro-batch are behind."""
        if len(self._step_entered) < len(self._handed_out):
            self._step_entered.append(self._clock.mark())

    def read(self) -> torch.Tensor:
        """The step's numbers, fp32 on the device, [4 + 2 G + 1]; starts the next step."""
        end = self._clock.mark()
        self._clock.settle(end)
        elapsed, accelerator = self._clock.elapsed_ms, get_accelerator()
        pairs = zip(self._handed_out, self._step_entered, strict=True)
        numbers = [
            elapsed(self._step_entered[-1], end),
            elapsed(self._handed_out[0], end) + self._wait_ms[0],
            accelerator.max_memory_allocated() / MEBI,
            accelerator.max_memory_reserved() / MEBI,
            *(elapsed(start, entered) for start, entered in pairs),
            *self._wait_ms,
        ]
        device = accelerator.current_device_name()
        loss = torch.tensor(float("nan"), device=device) if self._loss is None else self._loss
        row = torch.cat([torch.tensor(numbers, device=device), loss.float().reshape(1).to(device)])
        self.reset()
        return row

    def reset(self) -> None:
        """Forgets the step in progress."""
        self._handed_out, self._step_entered, self._wait_ms, self._loss = [], [], [], None


def gather_rows(row: torch.Tensor, data_rank_of: Sequence[int]) -> dict[str, Any] | None:
    """Collects every rank's numbers; rank 0 gets them by data-parallel rank, others None. Collective.

    Ranks that share a batch (tensor, pipeline, sequence parallel) are one column: the slowest and the fullest
    of them counts, and the mean of their losses.
    """
    table = torch.empty(len(data_rank_of), len(row), device=row.device)
    dist.all_gather(list(table.unbind()), row)
    if dist.get_rank() != 0:
        return None
    data_rank_of = np.asarray(data_rank_of)
    values = table.cpu().numpy().astype(np.float64)
    columns = [values[data_rank_of == rank] for rank in range(int(data_rank_of.max()) + 1)]
    slowest = np.stack([column[:, :-1].max(axis=0) for column in columns])
    losses = np.stack([column[:, -1].mean() for column in columns])
    micro_steps = (slowest.shape[1] - 4) // 2
    return {
        "measured_ms": _rounded(slowest[:, 4 : 4 + micro_steps].T),
        "wait_ms": _rounded(slowest[:, 4 + micro_steps :].T),
        "optimizer_ms": _rounded(slowest[:, 0]),
        "step_ms": _rounded(slowest[:, 1]),
        "peak_memory_bytes": (slowest[:, 2] * MEBI).astype(np.int64).tolist(),
        "peak_reserved_bytes": (slowest[:, 3] * MEBI).astype(np.int64).tolist(),
        "loss": None if np.isnan(losses).any() else float(losses.mean()) / micro_steps,
    }


def step_counts(plan: Plan, rows: slice) -> dict[str, int]:
    """What counts of a step, `rows` being its micro-steps: cheap, as a plan may have millions of rows."""
    filler = plan.filler[rows]
    samples = np.where(filler, 0, plan.size[rows])
    tokens = samples.astype(np.int64) * plan.corpus.tokens[plan.bucket[rows]]
    return {"samples": int(samples.sum()), "tokens": int(tokens.sum()), "fillers": int(filler.sum())}


def planned_figures(plan: Plan, rows: slice) -> dict[str, Any]:
    """What the plan says of a step, `rows` being its micro-steps; see the head of this file."""
    bucket = plan.bucket[rows]
    shapes = ["x".join(map(str, shape)) for shape in plan.corpus.shapes.tolist()]
    return {
        "micro_step": rows.start,
        "shape": [[shapes[index] for index in row] for row in bucket.tolist()],
        "kind": [[plan.corpus.kinds[index] for index in row] for row in bucket.tolist()],
        "batch_size": plan.size[rows].tolist(),
        "sequence_length": plan.corpus.tokens[bucket].tolist(),
        "loss_weight": plan.loss_weight[rows].tolist(),
        "predicted_cost": plan.cost[rows].tolist(),
        "time": time.time(),
    }


class TelemetryFile:
    """Appends lines to RUN/telemetry.jsonl. A line that a kill cut short is ended before the next."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / FILE_NAME
        self._file = self.path.open("ab")
        if self._file.tell():
            with self.path.open("rb") as earlier:
                earlier.seek(-1, os.SEEK_END)
                if earlier.read(1) != b"\n":
                    self._file.write(b"\n")

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._file.flush()


def read_telemetry(run_dir: Path | str) -> list[dict[str, Any]]:
    """The lines of a run, one a step: where a restart repeated steps, what it did counts.

    Args:
        run_dir: the folder that holds telemetry.jsonl.
    Returns:
        the lines in order of `step`; a line cut short by a kill is left out.
    """
    lines: list[dict[str, Any]] = []
    for text in _lines(Path(run_dir) / FILE_NAME):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        while lines and lines[-1]["step"] >= line["step"]:
            lines.pop()
        lines.append(line)
    return lines


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from file


def monitor_events(line: dict[str, Any], x: int) -> list[tuple[str, float, int]]:
    """A line for `engine.monitor.write_events`, summed up over ranks."""
    cost = np.asarray(line["predicted_cost"])
    measured = np.asarray(line["measured_ms"])
    step_ms = max(line["step_ms"])
    figures: dict[str, float] = {
        "samples": line["samples"],
        "samples_total": line["samples_total"],
        "tokens": line["tokens"],
        "tokens_total": line["tokens_total"],
        "fillers": line["fillers"],
        "step_ms": step_ms,
        "tokens_per_s": line["tokens"] / step_ms * 1e3,
        "samples_per_s": line["samples"] / step_ms * 1e3,
        "wait_ms": float(np.max(line["wait_ms"])),
        "predicted_cost_mean": float(cost.mean()),
        "predicted_cost_max": float(cost.max()),
        "predicted_efficiency": float(cost.mean(axis=1).sum() / cost.max(axis=1).sum()),
        "measured_ms_mean": float(measured.mean()),
        "measured_ms_max": float(measured.max()),
        "batch_size_mean": float(np.mean(line["batch_size"])),
        "batch_size_max": float(np.max(line["batch_size"])),
        "sequence_length_mean": float(np.mean(line["sequence_length"])),
        "sequence_length_max": float(np.max(line["sequence_length"])),
        "peak_memory_gb": max(line["peak_memory_bytes"]) / 1e9,
        "peak_reserved_gb": max(line["peak_reserved_bytes"]) / 1e9,
        "lr_factor": line["lr_factor"],
    }
    if line["loss"] is not None:
        figures["loss"] = line["loss"]
    return [(f"AdaptiveLoad/{name}", float(value), x) for name, value in figures.items()]


def _rounded(values: np.ndarray) -> list:
    return np.round(values, 3).tolist()
