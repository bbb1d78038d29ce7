"""One rank's view of the plans, epoch after epoch, and the small state from which it goes on.

The sampler is a torch batch sampler: it yields lists of sample ids. Worker processes draw ahead of
training, so the position counts *consumed* micro-steps: whoever trains calls `advance()`.

A state saved in one world goes on in another. It lists the parts of the epoch, [R, G, consumed micro-steps]
each; every part plans afresh what the parts before it left. Nothing is lost and nothing comes twice, however
often the world changes, and the state never lists samples. A step that was not finished was never applied:
loading goes back to its first micro-step.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from al_deepspeed.errors import PlanError, TooFewForAStep
from al_deepspeed.scheduling.constraints import Limits
from al_deepspeed.scheduling.cost import CostModel, cost_to_dict
from al_deepspeed.scheduling.curriculum import Schedule
from al_deepspeed.scheduling.layout import MicroBatch, Plan
from al_deepspeed.scheduling.options import PlanOptions
from al_deepspeed.scheduling.plan import make_plan
from al_deepspeed.scheduling.shapes import Corpus

STATE_VERSION = 1


class PlanSampler:
    """Batches of one data-parallel rank.

    Args:
        corpus, cost, limits: what plans are made of, equal on all ranks.
        rank, world_size: place and number of data-parallel ranks (not of tensor or sequence parallel ones).
        accumulation: micro-steps a step.
        seed: what chance depends on, with the epoch.
        curriculum: DeepSpeed's `curriculum_metrics` (name -> its settings); empty or None without one.
        options: fields of `PlanOptions`.
    Attributes:
        epoch: the epoch that training stands in.
        position: micro-steps of the current plan that were consumed.
    """

    def __init__(
        self,
        corpus: Corpus,
        cost: CostModel,
        limits: Limits,
        *,
        rank: int,
        world_size: int,
        accumulation: int = 1,
        seed: int = 0,
        curriculum: Mapping[str, Mapping[str, Any]] | None = None,
        **options,
    ) -> None:
        if not 0 <= rank < world_size:
            raise PlanError(f"rank is {rank}; it must be at least 0 and below the world size {world_size}.")
        self.corpus, self.cost, self.limits = corpus, cost, limits
        self.rank, self.world_size, self.accumulation, self.seed = rank, world_size, accumulation, seed
        self.options = PlanOptions(**options)
        self._curriculum_settings = {name: dict(values) for name, values in (curriculum or {}).items()}
        self._schedules = schedules_of(self._curriculum_settings)
        self.epoch = 0
        self.position = 0
        self._steps_before_epoch = 0
        self._earlier_parts: list[tuple[int, int, int]] = []
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the current part of the current epoch."""
        if self._plan is None:
            try:
                self._plan = self._make_plan()
            except TooFewForAStep:
                if not self._earlier_parts:
                    raise
                self._begin_next_epoch(self._steps_before_part())  # what this epoch has left is dropped
                self._plan = self._make_plan()
        return self._plan

    def __len__(self) -> int:
        """Micro-steps left in this epoch."""
        return self.plan.micro_steps - self.position

    def __iter__(self) -> Iterator[list[int]]:
        """Sample ids of this rank from the position to the end of the epoch."""
        for _, micro_batch in self.upcoming():
            yield micro_batch.sample_ids.tolist()

    def upcoming(self) -> Iterator[tuple[int, MicroBatch]]:
        """(micro-step, this rank's micro-batch) from the position to the end of the epoch."""
        plan = self.plan
        for micro_step in range(self.position, plan.micro_steps):
            yield micro_step, plan.micro_batch(micro_step, self.rank)

    def advance(self, micro_steps: int = 1) -> None:
        """Count micro-steps as consumed; the last one of an epoch begins the next epoch."""
        if not 0 <= micro_steps <= len(self):
            raise PlanError(
                f"{micro_steps} micro-steps cannot be consumed: {len(self)} are left in the epoch."
            )
        self.position += micro_steps
        if self.position == self.plan.micro_steps:
            self._begin_next_epoch(self._steps_before_part() + self.plan.steps)

    def _begin_next_epoch(self, steps_before: int) -> None:
        self.set_epoch(self.epoch + 1)
        self._steps_before_epoch = steps_before

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.epoch, self.position, self._earlier_parts, self._plan = epoch, 0, [], None

    def set_custom_curriculum_learning_schedule(self, schedule: Mapping[str, Callable[[int], float]]) -> None:
        """Give the functions of global step (from 1 on) that metrics with schedule_type "custom" need.

        As in DeepSpeed, they are not part of a checkpoint: give them again before resuming.
        """
        for name, function in schedule.items():
            if name in self._schedules:
                self._schedules[name] = replace(self._schedules[name], difficulty=function)
        self._plan = None

    @property
    def planning_fingerprint(self) -> str:
        """Digest of everything a plan depends on beside the corpus, the epoch and the world."""
        inputs = [cost_to_dict(self.cost), asdict(self.limits), asdict(self.options), self.seed]
        inputs.append(self._curriculum_settings)
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()

    def state_dict(self) -> dict:
        """Position and fingerprints, a few hundred bytes, the same on all ranks."""
        parts = [*self._earlier_parts, (self.world_size, self.accumulation, self.position)]
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "steps_before_epoch": self._steps_before_epoch,
            "seed": self.seed,
            "parts": [list(part) for part in parts],
            "manifest": self.corpus.fingerprint,
            "planning": self.planning_fingerprint,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from a saved position, in this world whatever world it was saved in."""
        if state.get("streaming"):
            raise PlanError(
                "the saved position is a stream's, which names no samples, but this run plans from a "
                "manifest. Start a new epoch without the sampler state."
            )
        version, missing = state.get("version"), sorted(self.state_dict().keys() - state.keys())
        if version != STATE_VERSION or missing:
            found = f"lacks {', '.join(missing)}" if version == STATE_VERSION else f"has version {version!r}"
            raise PlanError(
                f"the sampler state {found}; this release reads a whole one of version {STATE_VERSION}. "
                "Resume with the release that saved it."
            )
        self._check("manifest", state["manifest"], self.corpus.fingerprint, "its rows changed since")
        planning, reason = self.planning_fingerprint, "cost, limits, options, seed or curriculum changed"
        self._check("planning", state["planning"], planning, reason)
        parts = [(ranks, group, done // group * group) for ranks, group, done in state["parts"]]
        self.set_epoch(state["epoch"])
        self._steps_before_epoch = state["steps_before_epoch"]
        if parts[-1][:2] == (self.world_size, self.accumulation):
            self.position = parts.pop()[2]
        self._earlier_parts = [part for part in parts if part[2] > 0]
        if self._earlier_parts and self.options.tail == "drop":
            _ = self.plan  # which may be the next epoch's

    @staticmethod
    def _check(name: str, saved: str, current: str, reason: str) -> None:
        if saved != current:
            raise PlanError(
                f"the saved position belongs to {name} fingerprint {saved}, but this run has {current}: "
                f"{reason}."
                " Restore what the checkpoint was made with, or start a new epoch without the sampler state."
            )

    def _steps_before_part(self) -> int:
        """Global steps done before the current part began."""
        earlier = sum(consumed // accumulation for _, accumulation, consumed in self._earlier_parts)
        return self._steps_before_epoch + earlier

    def _make_plan(self) -> Plan:
        """Replay the earlier parts of the epoch, then plan what they left."""
        population, step = None, self._steps_before_epoch
        worlds = [*self._earlier_parts, (self.world_size, self.accumulation, 0)]
        for part, (world_size, accumulation, consumed) in enumerate(worlds):
            plan = make_plan(
                self.corpus,
                self.cost,
                self.limits,
                world_size=world_size,
                accumulation=accumulation,
                seed=self.seed,
                epoch=self.epoch,
                part=part,
                population=population,
                curriculum=self._schedules,
                first_step=step,
                **asdict(self.options),
            )
            if part < len(self._earlier_parts):
                population = plan.left_after(consumed)
                step += consumed // accumulation
        return plan


def schedules_of(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, Schedule]:
    """Schedules from DeepSpeed's `curriculum_metrics`, by DeepSpeed's own scheduler.

    `difficulty_type` "percentile" compares ranks in place of values; what DeepSpeed needs index files for
    comes from the manifest here.
    """
    if not metrics:
        return {}
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    schedules = {}
    for name, settings in metrics.items():
        percentile = settings.get("difficulty_type", "value") == "percentile"
        scheduler = CurriculumScheduler(dict(settings))
        custom = settings["schedule_type"] == "custom"
        schedules[name] = Schedule(
            _missing_custom(name) if custom else scheduler.get_difficulty,
            int(settings["max_difficulty"]) if percentile else None,
        )
    return schedules


def _missing_custom(name: str) -> Callable[[int], float]:
    def difficulty(_step: int) -> float:
        raise PlanError(
            f'curriculum metric {name!r} has schedule_type "custom" and no function yet. Call '
            "engine.set_custom_curriculum_learning_schedule({" + repr(name) + ": function}) before training."
        )

    return difficulty
