"""Training from a stream: shapes are seen only as samples are read, and there is no manifest to plan from.

Each rank buffers samples of its own stream, up to `lookahead * max_tokens` tokens. Before each window of
`lookahead` micro-steps the ranks gather what they have read and hold, a few numbers a shape, and all compute
the same window (windows.py). Reading, gathering and planning of the next window go on in a thread while this
one runs. Ranks read as much as they use; one whose stream ends early repeats samples at weight 0 until all
have ended, and the epoch ends on all ranks together. One that has read none yet is lent one. A stream has no
position to go back to: resuming starts the epoch's streams again. To go on with the next sample, index the
data and plan from the manifest.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from al_deepspeed.errors import PlanError
from al_deepspeed.scheduling.arrangement import Task
from al_deepspeed.scheduling.budget import Deal, best_max_cost
from al_deepspeed.scheduling.constraints import Limits, batch_sizes, oversize_buckets
from al_deepspeed.scheduling.cost import CostModel
from al_deepspeed.scheduling.layout import MicroBatch, Plan
from al_deepspeed.scheduling.options import PlanOptions
from al_deepspeed.scheduling.pieces import random_stream
from al_deepspeed.scheduling.shapes import PATCH, Corpus, IntArray, corpus_from_samples, latent_tokens
from al_deepspeed.scheduling.weights import loss_weights
from al_deepspeed.scheduling.windows import plan_window

PATIENCE = 8  # windows that a shape may wait for a full batch
NOT_READ = -1  # the sample id of one that another rank lent

Shape = tuple[str, int, int, int]  # kind, latent frames, height, width


@dataclass(frozen=True)
class Report:
    """What a rank tells the others before a window. failure: what stopped it from reading, if anything."""

    read: dict[Shape, int]
    held: dict[Shape, int]
    overdue: frozenset[Shape]
    ended: bool
    failure: str | None = None


class StreamSampler:
    """Balanced micro-batches of one rank from its own stream.

    Args:
        source: pairs of (shape, sample), shape being (kind, frames, height, width); iterated over once an
            epoch.
        cost, limits: as for a plan; a max_cost of None is chosen from what the first window shows.
        rank, world_size, accumulation, seed: as for a plan.
        gather: gives all ranks' objects for this rank's, as `torch.distributed.all_gather_object` does. It is
            called from a thread, so it needs a process group of its own.
        share: calls a function on one of the ranks that share batches, and gives what it returns, or raises,
            on all of them; from the same thread. Left out, no ranks do.
        patch: the model's, for sequence lengths.
        options: fields of `PlanOptions`; the strategy is always `balanced`.
    Attributes:
        epoch: the epoch that training stands in.
        plan: the current window. Its figures are those of metrics.py; `sample_ids` count this rank's reads.
        position: micro-steps of the window that were consumed.
    """

    def __init__(
        self,
        source: Iterable[tuple[Shape, Any]],
        cost: CostModel,
        limits: Limits,
        *,
        rank: int,
        world_size: int,
        gather: Callable[[Any], list],
        share: Callable[[Callable[[], Any]], Any] = lambda read: read(),
        accumulation: int = 1,
        seed: int = 0,
        patch: tuple[int, int, int] = PATCH,
        **options,
    ) -> None:
        self.rank, self.world_size, self.accumulation, self.seed = rank, world_size, accumulation, seed
        self.epoch = self.position = 0
        self.plan: Plan | None = None
        self._source, self._gather, self._share = source, gather, share
        self._cost, self._limits = cost, limits
        self._patch = patch
        self._options = PlanOptions(**options)
        self._buffer: dict[Shape, deque] = defaultdict(deque)
        self._repeats: dict[Shape, tuple[int, Any]] = {}
        self._waited: dict[Shape, int] = {}
        self._unreported: dict[Shape, int] = {}
        self._seen: dict[Shape, int] = {}
        self._idle: list[Shape] = []
        self._number = self._windows = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stream")
        self._ahead: Future | None = None
        self._batches: list[tuple[MicroBatch, list]] = []
        self._begin_epoch()

    def upcoming(self, done: Callable[[], int] = lambda: 0) -> Iterator[tuple[Plan, int, MicroBatch, list]]:
        """(window, micro-step in it, micro-batch, its samples) from the position to the epoch's end.

        Args:
            done: micro-steps that were trained on, but are not yet consumed.
        """
        while self._window():
            plan = self.plan
            for micro_step in range(self.position + done(), plan.micro_steps):
                yield plan, micro_step, *self._batches[micro_step]
            if self.plan is plan:
                raise PlanError(
                    "a window of the stream was drawn to its end, but not trained on. Give every batch one "
                    "forward, backward and engine.step()."
                )

    def advance(self, micro_steps: int = 1) -> None:
        """Count micro-steps as consumed."""
        self.position += micro_steps
        if self.position == self.plan.micro_steps:
            self.plan, self.position, self._batches = None, 0, []

    def state_dict(self) -> dict:
        """For a checkpoint: the epoch, the same on all ranks."""
        return {"streaming": True, "epoch": self.epoch, "windows": self._windows}

    def load_state_dict(self, state: dict) -> str:
        """Go to the beginning of a saved epoch. Returns what the user should know."""
        if self._ahead is not None:
            self._ahead.exception()  # until it is done: the other ranks count on this one
        self.epoch, self.plan, self.position, self._batches = state["epoch"], None, 0, []
        self._buffer.clear()
        self._unreported.clear()
        self._waited.clear()
        self._begin_epoch()
        return (
            f"a stream has no position to go back to: epoch {self.epoch} begins again, with what the stream "
            "gives first. To go on with the next sample, index the data (`al-deepspeed index`) and plan from "
            "the manifest."
        )

    def _begin_epoch(self) -> None:
        self._reader: Iterator | None = None
        self._ended = False
        self._ahead, self._windows_of_epoch = None, 0

    def _window(self) -> bool:
        """Whether there is one: the current one, or the next. At the end of all streams the epoch ends."""
        if self.plan is not None:
            return True
        if self._ahead is None:
            self._ahead = self._thread.submit(self._next_window)
        window = self._ahead.result()
        if window is None:
            if self._windows_of_epoch == 0:
                raise PlanError(
                    f"the streams of all ranks gave no sample in epoch {self.epoch}. Give a dataset that can "
                    "be iterated over once an epoch; a generator cannot."
                )
            self.epoch += 1
            self._begin_epoch()
            return False
        self.plan, self._batches = window
        self._windows_of_epoch += 1
        self._ahead = self._thread.submit(self._next_window)
        return True

    def _next_window(self) -> tuple[Plan, list[tuple[MicroBatch, list]]] | None:
        failure: Exception | None = None
        try:
            self._fill()
        except Exception as error:
            failure = error
        reports = self._gather(self._report(failure))
        for report in reports:
            for shape, count in report.read.items():
                self._seen[shape] = self._seen.get(shape, 0) + count
        _raise_failures(reports, failure)
        if not any(report.held for report in reports):
            return None
        self._lend(reports)
        plan = self._plan_window(reports)
        self._windows += 1
        return plan, self._take(plan)

    def _lend(self, reports: list[Report]) -> None:
        """Before the first window: ranks that have read nothing get a sample of another to repeat."""
        if self._idle:
            return
        lender = next(rank for rank, report in enumerate(reports) if report.held)
        lent = min(reports[lender].held)
        self._idle = [min(report.held, default=lent) for report in reports]
        if all(report.held for report in reports):
            return
        samples = self._gather(self._buffer[lent][0][1] if self.rank == lender else None)
        self._repeats.setdefault(lent, (NOT_READ, samples[lender]))

    def _fill(self) -> None:
        """Read until the buffer holds its tokens or the stream ends."""
        room = self._options.lookahead * self._limits.max_tokens - sum(
            len(samples) * self._tokens(shape) for shape, samples in self._buffer.items()
        )
        while room > 0 and not self._ended:
            item = self._share(self._read)
            if item is None:
                self._ended = True
                return
            shape, sample = item
            self._buffer[shape].append((self._number, sample))
            self._unreported[shape] = self._unreported.get(shape, 0) + 1
            self._number += 1
            room -= self._tokens(shape)

    def _read(self) -> tuple[Shape, Any] | None:
        """The next of the stream; None at its end."""
        if self._reader is None:
            self._reader = iter(self._source)
        return next(self._reader, None)

    def _tokens(self, shape: Shape) -> int:
        return latent_tokens(*shape[1:], patch=self._patch)

    def _report(self, failure: Exception | None) -> Report:
        read, self._unreported = self._unreported, {}
        held = {shape: len(samples) for shape, samples in self._buffer.items() if samples}
        overdue = frozenset(shape for shape in held if self._ended or self._waited.get(shape, 0) > PATIENCE)
        what = None if failure is None else f"{type(failure).__name__}: {failure}"
        return Report(read, held, overdue, self._ended, what)

    def _plan_window(self, reports: list[Report]) -> Plan:
        """The same on every rank: from reports alone."""
        shapes = sorted(self._seen, key=lambda shape: (self._tokens(shape), shape[1:], shape[0]))
        counts = np.array([self._seen[shape] for shape in shapes])
        corpus = _corpus(shapes, counts, self._patch)
        if self._limits.max_cost is None:
            deal = Deal(
                world_size=self.world_size,
                accumulation=self.accumulation,
                step_cost=self._limits.step_cost,
                endless=True,
            )
            budget, _ = best_max_cost(corpus, self._cost, self._limits.max_tokens, deal)
            self._limits = replace(self._limits, max_cost=budget)
        held = np.array([[report.held.get(shape, 0) for shape in shapes] for report in reports])
        overdue = np.array([[shape in report.overdue for shape in shapes] for report in reports])
        micro_steps = self._micro_steps(corpus, held, all(report.ended for report in reports))
        task = Task(
            corpus,
            counts,
            self._cost,
            self._limits,
            self.world_size,
            self.accumulation,
            self._options,
            random_stream(self.seed, self._windows),
        )
        idle = np.array([shapes.index(shape) for shape in self._idle])
        window = plan_window(task, held, micro_steps, overdue, idle)
        self._idle = [shapes[bucket] for bucket in window.bucket[-1]]
        tokens = corpus.tokens[window.bucket]
        weights = loss_weights(
            window.size,
            tokens,
            window.filler,
            self.accumulation,
            self._options.loss_weighting,
            "step",
        )
        return Plan(
            corpus=corpus,
            limits=self._limits,
            options=self._options,
            accumulation=self.accumulation,
            sample_order=np.zeros(0, dtype=np.int64),
            bucket=window.bucket,
            first=np.zeros_like(window.bucket),
            size=window.size,
            cost=self._cost.cost(window.size, tokens),
            loss_weight=weights,
            filler=window.filler,
            warnings=tuple(self._oversize(corpus)),
        )

    def _oversize(self, corpus: Corpus) -> Iterator[str]:
        for bucket in oversize_buckets(corpus, self._limits).tolist():
            yield (
                f"max_tokens is {self._limits.max_tokens}, but the stream has samples of "
                f"{corpus.tokens[bucket]} tokens ({corpus.bucket_name(bucket)}). Each is trained alone "
                "(B = 1)."
            )

    def _micro_steps(self, corpus: Corpus, held: IntArray, ended: bool) -> int:
        """A window's length: the look-ahead, or what the fullest rank still needs once all streams ended."""
        length = self._options.lookahead
        if ended:
            sizes = batch_sizes(corpus.tokens, self._cost, self._limits)
            length = min(length, int(np.ceil(held / sizes).sum(axis=1).max()))
        return -(-length // self.accumulation) * self.accumulation

    def _take(self, plan: Plan) -> list[tuple[MicroBatch, list]]:
        """This rank's micro-batches, out of the buffer; fillers repeat a sample that the rank has run."""
        batches = [plan.micro_batch(micro_step, self.rank) for micro_step in range(plan.micro_steps)]
        shapes = [(plan.corpus.kinds[batch.bucket], *batch.shape) for batch in batches]
        sizes = plan.size[:, self.rank].tolist()
        runs: list[list] = [[] for _ in batches]
        for place, batch in enumerate(batches):
            if not batch.filler:
                runs[place] = [self._buffer[shapes[place]].popleft() for _ in range(sizes[place])]
                self._repeats[shapes[place]] = runs[place][-1]
        for place, batch in enumerate(batches):
            if batch.filler:
                runs[place] = [self._repeats[shapes[place]]]
        used = {shape for shape, batch in zip(shapes, batches, strict=True) if not batch.filler}
        waiting = [shape for shape, samples in self._buffer.items() if samples and shape not in used]
        self._waited = {shape: self._waited.get(shape, 0) + 1 for shape in waiting}
        return [
            (
                replace(batch, sample_ids=np.array([number for number, _ in run])),
                [sample for _, sample in run],
            )
            for batch, run in zip(batches, runs, strict=True)
        ]


def _raise_failures(reports: list[Report], own: Exception | None) -> None:
    """On every rank, if any could not read."""
    for rank, report in enumerate(reports):
        if report.failure is not None:
            raise PlanError(f"rank {rank} could not read its stream: {report.failure}") from own


def _corpus(shapes: list[Shape], counts: IntArray, patch: tuple[int, int, int]) -> Corpus:
    """What was seen so far as a corpus."""
    rows = [np.repeat([shape[side] for shape in shapes], counts) for side in (1, 2, 3)]
    kinds = np.repeat([shape[0] for shape in shapes], counts)
    return corpus_from_samples(*rows, kinds=kinds, patch=patch, fingerprint="stream")
