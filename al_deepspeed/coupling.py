"""Ties an engine to its loader: counts completed steps, carries the position in checkpoints, keeps telemetry.

Position counts what was trained on: G micro-steps each time DeepSpeed completed a step (its `global_steps`
went up, also when fp16 overflow skipped the update). What workers prefetched or a `break` threw away was
never trained on and comes again; so does a step that a stop cut short between two of its micro-steps.
"""

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import logger

from al_deepspeed.agreement import differing_names, together
from al_deepspeed.calibration.file import Calibration
from al_deepspeed.calibration.recalibration import recalibrate, recall
from al_deepspeed.config_sections import DualConstraintBatching
from al_deepspeed.errors import ConfigError, PlanError
from al_deepspeed.groups import DataRanks
from al_deepspeed.inputs import cost_and_limits
from al_deepspeed.learning_rate import ScaledLearningRate
from al_deepspeed.loader import Batches, Listener
from al_deepspeed.scheduling.plan import Plan
from al_deepspeed.scheduling.sampler import PlanSampler
from al_deepspeed.scheduling.streaming import StreamSampler
from al_deepspeed.telemetry import (
    Stopwatch,
    TelemetryFile,
    gather_rows,
    monitor_events,
    planned_figures,
    step_counts,
)
from al_deepspeed.universal import load_at_any_size
from al_deepspeed.watchdog import Watchdog

CHECKPOINT_KEY = "al_deepspeed"


class Coupling(Listener):
    """Hears of every batch from the loader and of every step from the engine.

    Args:
        engine: as DeepSpeed built it; `hook` wraps its methods.
        sampler: this rank's view of the plan.
        batching: run_dir, recalibrate, hang_timeout_s and lr_scaling of the config.
        calibration: that the plan is made by, or None.
        ranks: which ranks share a batch.
    """

    def __init__(
        self,
        engine: Any,
        sampler: PlanSampler | StreamSampler,
        batching: DualConstraintBatching,
        calibration: Calibration | None,
        ranks: DataRanks,
    ) -> None:
        self._engine, self._sampler, self._ranks = engine, sampler, ranks
        self._batching, self._first_calibration, self._calibration = batching, calibration, calibration
        self._loader: Batches | None = None
        self._learning_rate = ScaledLearningRate(engine, batching.lr_scaling)
        self._watchdog = Watchdog(batching.hang_timeout_s, self._describe)
        self._stopwatch = Stopwatch()
        self._handed_out: list[tuple[Plan, int]] = []  # of the step in progress
        self._entered_step = 0  # how many of them reached engine.step()
        self._totals = {"samples": 0, "tokens": 0}
        self._warned: set[str] = set()
        self._compared: Plan | None = None
        self._measures = batching.run_dir is not None or engine.monitor.enabled
        self._file = None
        if batching.run_dir is not None and dist.get_rank() == 0:
            self._file = TelemetryFile(Path(batching.run_dir))

    def hook(self, loader: Batches) -> None:
        """Wraps the engine's `step`, `save_checkpoint` and `load_checkpoint`, on this instance alone."""
        engine, self._loader = self._engine, loader
        # DeepSpeed's throughput timer starts in the forward pass unless there is a training_dataloader, which
        # then has to start it: `wait` does.
        engine.training_dataloader = loader
        engine.step = self._wrap_step(engine.step)
        engine.save_checkpoint = self._wrap_save(engine.save_checkpoint)
        engine.load_checkpoint = self._wrap_load(engine.load_checkpoint)

    # what the loader tells

    @property
    def micro_steps_done(self) -> int:
        return self._entered_step

    def wait(self) -> None:
        self._engine.tput_timer.start()

    def hand_out(self, plan: Plan, micro_step: int, wait_ms: float) -> None:
        for warning in plan.warnings:
            if warning not in self._warned and dist.get_rank() == 0:
                logger.warning(warning)
            self._warned.add(warning)
        del self._handed_out[self._entered_step :]  # drawn by an iteration that was left
        self._handed_out.append((plan, micro_step))
        if self._measures:
            self._stopwatch.hand_out(wait_ms)
        self._watchdog.begin(micro_step)

    def close(self) -> None:
        self._watchdog.end()

    def record_loss(self, mean_loss: torch.Tensor) -> None:
        if not self._measures:
            return
        plan, micro_step = self._handed_out[-1]
        weight = plan.loss_weight[micro_step, self._sampler.rank]
        self._stopwatch.add_loss(mean_loss.detach().float() * float(weight))

    # what the engine does

    def _wrap_step(self, step: Callable) -> Callable:
        engine = self._engine

        def counted_step(*args: Any, **kwargs: Any) -> Any:
            self._enter_step()
            if self._handed_out:
                self._compare_plans(self._handed_out[-1][0])
            steps, factor = engine.global_steps, 1.0
            if self._handed_out and engine.is_gradient_accumulation_boundary():
                plan, micro_step = self._handed_out[0]
                factor = self._learning_rate.factor(plan, micro_step // plan.accumulation)
                self._learning_rate.scale(factor)
            rate = engine.get_lr()[0] if self._measures else None
            try:
                result = step(*args, **kwargs)
            finally:
                self._learning_rate.restore()
                self._watchdog.end()
            if engine.global_steps > steps and self._handed_out:
                self._complete_step({"learning_rate": rate, "lr_factor": factor})
            return result

        return counted_step

    def _compare_plans(self, plan: Plan) -> None:
        """Before a plan's first step: ranks made it without talking, and a last bit may part machines."""
        if plan is self._compared:
            return
        difference = differing_names(plan.digests())
        if difference is not None:
            rank, names = difference
            raise PlanError(
                f"rank {rank}'s plan of epoch {self._sampler.epoch} differs from rank 0's in "
                f"{', '.join(names)}, though settings, manifest and calibration are the same: the machines' "
                "arithmetic differs. Use one NumPy version and one kind of CPU for all ranks."
            )
        self._compared = plan

    def _enter_step(self) -> None:
        if len(self._handed_out) > self._entered_step:
            self._entered_step = len(self._handed_out)
            if self._measures:
                self._stopwatch.enter_step()

    def _complete_step(self, figures: dict[str, Any]) -> None:
        plan, first = self._handed_out[0]
        trained = [micro_step for _, micro_step in self._handed_out]
        expected = list(range(self._sampler.position, self._sampler.position + plan.accumulation))
        if trained != expected:
            raise PlanError(
                f"the optimizer's step came after micro-steps {trained} of the loader, but the loss "
                f"weights hold for {expected}. Give every batch of the loader one forward, backward and "
                "engine.step(), in order, and do not move DeepSpeed's gradient accumulation boundary."
            )
        rows = slice(first, first + plan.accumulation)
        counts = step_counts(plan, rows)
        self._totals["samples"] += counts["samples"]
        self._totals["tokens"] += counts["tokens"]
        if self._measures:
            self._report(counts | planned_figures(plan, rows) | figures)
        epoch = self._sampler.epoch
        self._sampler.advance(plan.accumulation)
        self._begin_step()
        if self._sampler.epoch > epoch and self._batching.recalibrate == "epoch":
            run_dir, world = Path(self._batching.run_dir), (self._sampler.world_size, plan.accumulation)
            self._plan_by(recalibrate(self._calibration, run_dir, self._sampler.corpus, world, epoch))

    def _plan_by(self, calibration: Calibration) -> None:
        """From the next plan on."""
        self._calibration = calibration
        self._sampler.cost, self._sampler.limits = cost_and_limits(self._batching, calibration)

    def _begin_step(self) -> None:
        self._handed_out, self._entered_step = [], 0
        self._stopwatch.reset()

    def _report(self, planned: dict[str, Any]) -> None:
        measured = gather_rows(self._stopwatch.read(), self._ranks.of_rank)
        if measured is None:
            return
        line = {
            "step": self._engine.global_steps,
            "epoch": self._sampler.epoch,
            **planned,
            "samples_total": self._totals["samples"],
            "tokens_total": self._totals["tokens"],
            **measured,
        }
        if self._file is not None:
            self._file.write(line)
        if self._engine.monitor.enabled:
            self._engine.monitor.write_events(monitor_events(line, self._engine.global_samples))

    # checkpoints

    def _wrap_save(self, save_checkpoint: Callable) -> Callable:
        def save(save_dir, tag=None, client_state=None, *args: Any, **kwargs: Any) -> Any:
            self._watchdog.end()
            client_state = client_state or {}
            if CHECKPOINT_KEY in client_state:
                raise ConfigError(
                    f"client_state has the key {CHECKPOINT_KEY!r}, which is ours; rename yours."
                )
            client_state = {**client_state, CHECKPOINT_KEY: self._state()}
            return save_checkpoint(save_dir, tag, client_state, *args, **kwargs)

        return save

    def _wrap_load(self, load_checkpoint: Callable) -> Callable:
        def load(*args: Any, **kwargs: Any) -> Any:
            self._watchdog.end()
            options = signature(load_checkpoint).bind(*args, **kwargs).arguments
            options.setdefault("tag", None)
            path, client_state = load_at_any_size(self._engine, load_checkpoint, **options)
            state = (client_state or {}).pop(CHECKPOINT_KEY, None)
            if path is not None and not options.get("load_module_only", False):
                with together():
                    self._restore(state, path)
            return path, client_state

        return load

    def _state(self) -> dict[str, Any]:
        """The same on all ranks: at ZeRO 0 to 2 every rank reads what rank 0 wrote."""
        return {"sampler": self._sampler.state_dict(), "totals": dict(self._totals)}

    def _restore(self, state: dict[str, Any] | None, path: str) -> None:
        if state is None:
            if dist.get_rank() == 0:
                logger.warning(
                    f"{path} holds no position in the data, as it was saved without al_deepspeed: the "
                    f"data start at epoch {self._sampler.epoch}, micro-step {self._sampler.position}."
                )
            return
        if self._batching.recalibrate == "epoch":
            recalled = recall(Path(self._batching.run_dir), state["sampler"]["epoch"])
            self._plan_by(recalled or self._first_calibration)
        try:
            note = self._sampler.load_state_dict(state["sampler"])
        except PlanError as error:
            raise PlanError(f"{path}: {error} To take its weights only: load_module_only=True.") from error
        if note is not None and dist.get_rank() == 0:
            logger.warning(f"{path}: {note}")
        self._totals = dict(state["totals"])
        self._begin_step()
        self._loader.invalidate()

    def _describe(self, micro_step: int) -> str:
        """For the watchdog."""
        plan = self._handed_out[-1][0]
        own = self._ranks.own

        def runs(rank: int) -> str:
            bucket = plan.bucket[micro_step, rank]
            return f"{plan.corpus.bucket_name(bucket)}, B={plan.size[micro_step, rank]}"

        others = "; ".join(f"{rank}: {runs(rank)}" for rank in range(plan.world_size) if rank != own)
        return (
            f"Rank {dist.get_rank()} is in micro-step {micro_step} of epoch {self._sampler.epoch} (step "
            f"{self._engine.global_steps + 1}) with shape {runs(own)}. Data-parallel rank {own} of "
            f"{plan.world_size}; the others run {others}."
        )
