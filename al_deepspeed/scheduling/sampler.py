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
from collections.abc import Iterator
from dataclasses import asdict

from al_deepspeed.errors import PlanError
from al_deepspeed.scheduling.constraints import Limits
from al_deepspeed.scheduling.cost import CostModel, cost_to_dict
from al_deepspeed.scheduling.options import PlanOptions
from al_deepspeed.scheduling.plan import MicroBatch, Plan, make_plan
from al_deepspeed.scheduling.shapes import Corpus

STATE_VERSION = 1


class PlanSampler:
    """Batches of one data-parallel rank.

    Args:
        corpus, cost, limits: what plans are made of, equal on all ranks.
        rank, world_size: place and number of data-parallel ranks (not of tensor or sequence parallel ones).
        accumulation: micro-steps a step.
        seed: what chance depends on, with the epoch.
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
        **options,
    ) -> None:
        if not 0 <= rank < world_size:
            raise PlanError(f"rank is {rank}; it must be at least 0 and below the world size {world_size}.")
        self.corpus, self.cost, self.limits = corpus, cost, limits
        self.rank, self.world_size, self.accumulation, self.seed = rank, world_size, accumulation, seed
        self.options = PlanOptions(**options)
        self.epoch = 0
        self.position = 0
        self._earlier_parts: list[tuple[int, int, int]] = []
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the current part of the current epoch."""
        if self._plan is None:
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
            self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.epoch, self.position, self._earlier_parts, self._plan = epoch, 0, [], None

    @property
    def planning_fingerprint(self) -> str:
        """Digest of everything a plan depends on beside the corpus, the epoch and the world."""
        inputs = [cost_to_dict(self.cost), asdict(self.limits), asdict(self.options), self.seed]
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()

    def state_dict(self) -> dict:
        """Position and fingerprints, a few hundred bytes, the same on all ranks."""
        parts = [*self._earlier_parts, (self.world_size, self.accumulation, self.position)]
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "seed": self.seed,
            "parts": [list(part) for part in parts],
            "manifest": self.corpus.fingerprint,
            "planning": self.planning_fingerprint,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from a saved position, in this world whatever world it was saved in."""
        if state.get("version") != STATE_VERSION:
            raise PlanError(
                f"the sampler state has version {state.get('version')!r}; this release reads "
                f"{STATE_VERSION}. "
                "Resume with the release that saved it."
            )
        self._check("manifest", state["manifest"], self.corpus.fingerprint, "its rows changed since")
        self._check(
            "planning", state["planning"], self.planning_fingerprint, "cost, limits, options or seed changed"
        )
        parts = [(ranks, group, done // group * group) for ranks, group, done in state["parts"]]
        self.set_epoch(state["epoch"])
        if parts[-1][:2] == (self.world_size, self.accumulation):
            self.position = parts.pop()[2]
        self._earlier_parts = [part for part in parts if part[2] > 0]

    @staticmethod
    def _check(name: str, saved: str, current: str, reason: str) -> None:
        if saved != current:
            raise PlanError(
                f"the saved position belongs to {name} fingerprint {saved}, but this run has {current}: "
                f"{reason}. "
                "Restore what the checkpoint was made with, or start a new epoch without the sampler state."
            )

    def _make_plan(self) -> Plan:
        """Replay the earlier parts of the epoch, then plan what they left."""
        population = None
        for part, (world_size, accumulation, consumed) in enumerate(self._earlier_parts):
            population = self._plan_part(part, world_size, accumulation, population).left_after(consumed)
        return self._plan_part(len(self._earlier_parts), self.world_size, self.accumulation, population)

    def _plan_part(self, part: int, world_size: int, accumulation: int, population) -> Plan:
        return make_plan(
            self.corpus,
            self.cost,
            self.limits,
            world_size=world_size,
            accumulation=accumulation,
            seed=self.seed,
            epoch=self.epoch,
            part=part,
            population=population,
            **asdict(self.options),
        )
