"""Batches of one rank in plan order: an iteration is what is left of an epoch.

Torch draws from the plan ahead of training, as far as workers prefetch. So two positions are kept apart: what
was drawn lives in an iteration and dies with it; what was trained on is the sampler's own position, which
only completed steps move. An iteration starts where training stands: after a `break`, a restored checkpoint
or an epoch's end, `for batch in loader` goes on from there.
"""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch.utils.data import DataLoader, Dataset, default_collate

from al_deepspeed.errors import ConfigError, PlanError
from al_deepspeed.scheduling.plan import MicroBatch, Plan
from al_deepspeed.scheduling.sampler import PlanSampler

OURS = ("loss_weight", "sample_ids", "shape", "tokens", "filler")


class Listener:
    """What the loader tells whoever counts and measures; by default nobody."""

    micro_steps_done = 0  # of the step in progress: trained on, but not yet counted by the sampler

    def wait(self) -> None:
        """The training loop asks for a batch."""

    def hand_out(self, plan: Plan, micro_step: int, wait_ms: float) -> None:
        """It gets the one of this micro-step, after waiting for so long."""

    def record_loss(self, mean_loss: torch.Tensor) -> None:
        """The mean loss of the batch in hand, unweighted."""

    def close(self) -> None:
        """An iteration ended, by itself or by a `break`."""


class Batches:
    """A loader that `initialize` returns. A batch is what `collate_fn` made of the samples, and with it

        loss_weight   float32 tensor without dimensions: engine.backward(mean_loss * batch["loss_weight"])
        sample_ids    int64 tensor [B], rows of the manifest; of a stream, counts of this rank's samples
        shape         latent (frames, height, width)
        tokens        sequence length S
        filler        whether the batch only keeps this rank in step, at weight 0

    Args:
        sampler: this rank's view of the plan.
        listener: told of every batch.
    """

    def __init__(self, sampler: Any, listener: Listener | None) -> None:
        self.data_sampler = DeepSpeedSampler(sampler)
        self.post_process_func: Callable | None = None  # DeepSpeed's set_data_post_process_func assigns it
        self._sampler = sampler
        self._listener = listener or Listener()
        self._iteration = 0

    @property
    def epoch(self) -> int:
        """The epoch that training stands in: the one that the next iteration goes through."""
        return self._sampler.epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.invalidate()
        return self._iterate(self._iteration)

    def record_loss(self, mean_loss: torch.Tensor) -> None:
        """For telemetry: the mean loss of the batch in hand, unweighted; once a micro-step, or never."""
        self._listener.record_loss(mean_loss)

    def invalidate(self) -> None:
        """Ends iterations in progress: the position jumps, or another iteration begins."""
        self._iteration += 1

    def collated(self) -> Iterator[tuple[Plan, int, MicroBatch, Any]]:
        """Micro-batches from the position on, each with what `collate_fn` made of its samples."""
        raise NotImplementedError

    def _iterate(self, iteration: int) -> Iterator[dict[str, Any]]:
        micro_batches = self.collated()
        try:
            while True:
                self._listener.wait()
                start = time.perf_counter()
                drawn = next(micro_batches, None) if iteration == self._iteration else None
                if iteration != self._iteration:
                    raise PlanError(
                        "this iteration over the loader ended when another began or a checkpoint was loaded. "
                        "Start a new one: for batch in loader."
                    )
                if drawn is None:
                    return
                plan, micro_step, micro_batch, batch = drawn
                batch = self._complete(batch, micro_batch)
                self._listener.hand_out(plan, micro_step, (time.perf_counter() - start) * 1e3)
                yield batch
        finally:
            self._listener.close()

    def _complete(self, batch: Any, micro_batch: MicroBatch) -> dict[str, Any]:
        if not isinstance(batch, dict):
            raise ConfigError(
                f"collate_fn returned a {type(batch).__name__}; allowed: a dict, which receives loss_weight."
            )
        taken = [name for name in OURS if name in batch]
        if taken:
            raise ConfigError(f"the batch already has {', '.join(taken)}; give your own entries other names.")
        batch = {
            **batch,
            "loss_weight": torch.tensor(micro_batch.loss_weight, dtype=torch.float32),
            "sample_ids": torch.from_numpy(micro_batch.sample_ids.astype(np.int64)),
            "shape": micro_batch.shape,
            "tokens": micro_batch.tokens,
            "filler": micro_batch.filler,
        }
        if self.post_process_func is not None:
            batch = self.post_process_func(batch, self._sampler.state_dict())
        return batch


class PlannedBatches(Batches):
    """Batches of a manifest's samples. `len(loader)` is the number of micro-steps left in the epoch.

    Args:
        dataset: map-style, indexed by row of the manifest.
        sampler: this rank's view of the plan.
        collate_fn: list of samples -> dict; torch's default stacks tensors.
        num_workers: processes that read ahead, forked for each iteration.
        pin_memory: page-locked batches; None: where the accelerator is a GPU.
        listener: told of every batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: PlanSampler,
        *,
        collate_fn: Callable[[list], dict] | None = None,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        listener: Listener | None = None,
    ) -> None:
        super().__init__(sampler, listener)
        if pin_memory is None:
            pin_memory = get_accelerator().device_name() != "cpu"
        self._drawn: deque[tuple[Plan, int, MicroBatch]] = deque()
        self._batches = DataLoader(
            dataset,
            batch_sampler=_Draws(self),
            collate_fn=collate_fn or default_collate,
            num_workers=num_workers,
            pin_memory=pin_memory,
            worker_init_fn=heed_only_the_rank,
        )

    def __len__(self) -> int:
        return len(self._sampler) - self._listener.micro_steps_done

    def invalidate(self) -> None:
        super().invalidate()
        self._drawn.clear()

    def draw(self) -> Iterator[list[int]]:
        """Sample ids for torch's DataLoader, ahead of training; notes what it gave out, in order."""
        plan, rank = self._sampler.plan, self._sampler.rank
        for micro_step in range(self._sampler.position + self._listener.micro_steps_done, plan.micro_steps):
            micro_batch = plan.micro_batch(micro_step, rank)
            self._drawn.append((plan, micro_step, micro_batch))
            yield micro_batch.sample_ids.tolist()

    def collated(self) -> Iterator[tuple[Plan, int, MicroBatch, Any]]:
        for batch in self._batches:
            if self._drawn:  # else the iteration was ended, which whoever asks finds out
                yield *self._drawn.popleft(), batch


class _Draws:
    """The loader's `draw` as an object that torch can iterate over anew each epoch."""

    def __init__(self, loader: PlannedBatches) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.draw()


class DeepSpeedSampler:
    """What DeepSpeed's engine asks of `training_dataloader.data_sampler`.

    With curriculum learning on, DeepSpeed puts this state into its checkpoint and hands it back on load,
    or None from a checkpoint made with curriculum off. With it off, DeepSpeed does neither. The position must
    survive in every case, so it travels in our own part of the checkpoint (coupling.py), and nothing is
    loaded here.
    """

    def __init__(self, sampler: PlanSampler) -> None:
        self._sampler = sampler

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """The position is restored after DeepSpeed's own loading."""

    def set_custom_curriculum_learning_schedule(self, schedule: dict[str, Callable[[int], int]]) -> None:
        self._sampler.set_custom_curriculum_learning_schedule(schedule)


def heed_only_the_rank(_worker: int) -> None:
    """For worker processes: the launcher signals a rank's whole process tree, workers first, and without
    them the rank could not finish its step and save. So SIGTERM ends a worker only when its own rank sent it,
    as Python does at its exit; a handler cannot see the sender, waiting for the signal can."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(rank_process: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank_process:
        pass
    os._exit(0)
