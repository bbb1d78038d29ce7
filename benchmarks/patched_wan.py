"""diffusers' Wan patched in memory against unpatched, on one device: loss curves, then time and memory.

    deepspeed --num_accelerators 1 benchmarks/patched_wan.py OUT --seconds 150 [--size tiny]

OUT/patched_wan.json is written anew after each part, so a run that is cut off leaves what it had;
patched_wan_report.py judges it, patched_wan_h200.sh runs both.

curves  Trainings from the same weights on the same data and noise: unpatched, unpatched with PyTorch's other
        attention kernel, patched. The second is the same mathematics, rounded elsewhere: how far it drifts
        from the first is the noise of bf16, which the third may show as well.
cases   One engine trains the same micro-batch with and without the patches; only code objects change hands.
        The order unpatched, patched, patched, unpatched cancels a drift of the device's clock. A case that
        one of the two has no memory for is measured again with fewer layers.

All at ZeRO-0: one device has nothing to partition, and the 1.2 s that the host needs for a micro-step of 30
layers at ZeRO-3 would hide what is compared.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import diffusers
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset, default_collate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import al_deepspeed
from al_deepspeed.calibration.alarm import is_out_of_memory
from al_deepspeed.calibration.memory_meter import GB, memory_meter
from al_deepspeed.config import load_config
from al_deepspeed.data.files import write_whole
from al_deepspeed.patching import in_memory
from al_deepspeed.scheduling.shapes import latent_tokens
from al_deepspeed.telemetry import clock
from al_deepspeed.training import wan
from al_deepspeed.training.objective import FlowDataset, Objective, flow_loss

CONFIG = Path(__file__).resolve().parent.parent / "launch" / "configs" / "zero0.json"
SEED, CHANNELS, SAMPLES, WAVES = 1234, 16, 8, 6
UNPATCHED, NOISE, PATCHED = "unpatched", "other attention", "patched"
BLOCKS = (UNPATCHED, PATCHED, PATCHED, UNPATCHED)
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Case:
    """Latent shape; activations computed twice or kept; micro-steps of a block; the first `layers` alone."""

    shape: Shape
    checkpointing: bool
    warm_up: int
    measured: int
    layers: int


@dataclass(frozen=True)
class Size:
    """text: caption length and width. lesson: the shapes of the curves, two samples of one in a micro-batch.
    fewer_layers: of a case that does not fit."""

    preset: str
    backend: str
    learning_rate: float
    text: tuple[int, int]
    steps: int
    lesson: tuple[Shape, ...]
    cases: tuple[Case, ...]
    fewer_layers: int


SIZES = {
    "1.3b": Size(
        preset="1.3b",
        backend="cuda",
        learning_rate=1e-4,
        text=(512, 4096),
        steps=100,
        lesson=((1, 52, 60), (5, 24, 26)),
        cases=(
            Case((21, 30, 52), True, 2, 6, 30),
            Case((21, 30, 52), False, 2, 6, 30),
            Case((21, 60, 104), True, 1, 2, 30),
            Case((21, 60, 104), False, 1, 2, 30),
        ),
        fewer_layers=24,
    ),
    "tiny": Size(
        preset="tiny",
        backend="auto",  # on CPUs that is the reference, behind the same ops
        learning_rate=3e-3,
        text=(16, 64),
        steps=30,
        lesson=((1, 8, 12), (3, 8, 4)),
        cases=(Case((3, 8, 8), True, 1, 2, 3), Case((3, 8, 8), False, 1, 2, 3)),
        fewer_layers=2,
    ),
}


class SmoothLatents(Dataset):
    """A few latents to learn by heart: plane waves, mixed over the channels, each with its own caption."""

    def __init__(self, size: Size) -> None:
        self._samples = [self._sample(i, size) for i in range(SAMPLES)]
        self.empty_text = torch.zeros(size.text, dtype=torch.float16)

    @staticmethod
    def _sample(number: int, size: Size) -> dict[str, torch.Tensor]:
        random = np.random.default_rng((SEED, number))
        shape = size.lesson[number // 2 % len(size.lesson)]
        places = np.meshgrid(*(np.arange(side) / side for side in shape), indexing="ij")
        turns = np.tensordot(random.integers(0, 3, (WAVES, 3)), np.stack(places), axes=1)
        waves = np.cos(2 * np.pi * (turns + random.random((WAVES, 1, 1, 1))))
        latent = np.tensordot(random.standard_normal((CHANNELS, WAVES)), waves, axes=1)
        text = random.standard_normal(size.text)
        return {
            "latent": torch.from_numpy(latent / latent.std()).half(),
            "text": torch.from_numpy(text).half(),
        }

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return self._samples[number]


def lessons(size: Size) -> Iterator[dict[str, torch.Tensor]]:
    """The micro-batches of a curve: the samples in pairs, round after round, each with noise of its own."""
    dataset = FlowDataset(SmoothLatents(size), Objective(), seed=SEED)
    pairs = SAMPLES // 2
    for step in range(size.steps):
        dataset.epoch, pair = divmod(step, pairs)
        yield default_collate([dataset[2 * pair], dataset[2 * pair + 1]])


def random_batch(shape: Shape, text: tuple[int, int], device: torch.device) -> dict[str, torch.Tensor]:
    """B = 1, the same numbers in every block."""
    torch.manual_seed(SEED)
    noisy, target = (torch.randn(1, CHANNELS, *shape, device=device) for _ in range(2))
    words = torch.randn(1, *text, device=device)
    return {
        "noisy": noisy,
        "target": target,
        "text": words,
        "timestep": torch.full((1,), 500.0, device=device),
    }


class Comparison:
    """What was measured so far, on disk at any time."""

    def __init__(self, out: Path, name: str, seconds: float) -> None:
        self.size = SIZES[name]
        self._file = out / "patched_wan.json"
        self._deadline = time.monotonic() + seconds
        self._device = torch.device(get_accelerator().current_device_name())
        self._memory = memory_meter()
        self._record: dict[str, Any] = {
            "size": name,
            "device": torch.cuda.get_device_name() if self._device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "diffusers": diffusers.__version__,
            "steps": self.size.steps,
            "planned_cases": len(self.size.cases),
            "seconds": {},
            "curves": {},
            "cases": [],
        }

    def run(self) -> None:
        for version in (UNPATCHED, NOISE, PATCHED):
            engine = self._timed(f"engine, {version}", self._engine, version)
            self._record["curves"][version] = self._timed(f"curve, {version}", self._curve, engine, version)
            if version != PATCHED:
                engine.destroy()
                del engine
                gc.unfreeze()  # initialize froze the heap, and with it this engine
                gc.collect()
                self._memory.release()
            self._save()
        self._look_at_sites(engine)
        for case in self.size.cases:
            if self._case(engine, case) and case.layers > self.size.fewer_layers:
                self._case(engine, replace(case, layers=self.size.fewer_layers))

    def _save(self) -> None:
        write_whole(self._file, json.dumps(self._record, indent=1) + "\n")

    def _timed(self, what: str, function: Any, *arguments: Any) -> Any:
        start = time.monotonic()
        result = function(*arguments)
        self._record["seconds"][what] = round(time.monotonic() - start, 1)
        print(f"{what}: {self._record['seconds'][what]} s", flush=True)
        return result

    # curves ------------------------------------------------------------------------------------------------

    def _engine(self, version: str) -> Any:
        """A new engine; the weights are the same in all."""
        torch.manual_seed(SEED)
        source = wan.preset(self.size.preset, channels=CHANNELS, text_dim=self.size.text[1])
        with self._device:
            model = wan.build(source, {}).train()
        config = load_config(CONFIG)
        del config["data_efficiency"]
        config["scheduler"]["params"] |= {
            "warmup_num_steps": 10,
            "warmup_max_lr": self.size.learning_rate,
        }
        config["fused_adaln"] = {"enabled": False}
        if version == PATCHED:
            config["fused_adaln"] = {"enabled": True, "patch": "auto", "backend": self.size.backend}
        return al_deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def _curve(self, engine: Any, version: str) -> list[float]:
        other = SDPBackend.EFFICIENT_ATTENTION if self._device.type == "cuda" else SDPBackend.MATH
        losses = []
        with sdpa_kernel(other) if version == NOISE else nullcontext():
            for batch in lessons(self.size):
                if time.monotonic() > self._deadline:
                    break
                loss = self._loss(engine, batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
        return [float(loss) for loss in losses]

    def _loss(self, engine: Any, batch: dict) -> torch.Tensor:
        return flow_loss(engine, batch, self._device, torch.float32).mean()

    # cases --------------------------------------------------------------------------------------------------

    def _look_at_sites(self, engine: Any) -> None:
        """Which functions were rewritten, and how often a forward pass calls the op with and without that."""
        report = al_deepspeed.patch_classes("diffusers.wan")  # they are already: this reads
        self._record["sites"] = {
            name: [f"{site.kind} {Path(site.file).name}:{site.line}" for site in sites]
            for name, sites in report.sites.items()
        }
        batch = next(lessons(self.size))
        calls = {}
        for version in (PATCHED, UNPATCHED):
            self._switch(version)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                self._loss(engine, batch)
            ours = [event for event in profile.events() if event.name.startswith("al_deepspeed::")]
            calls[version] = len(ours)
        self._record["op_calls_a_forward"] = calls
        self._save()

    @staticmethod
    def _switch(version: str) -> None:
        if version == PATCHED:
            al_deepspeed.patch_classes("diffusers.wan")
        else:
            in_memory.unpatch()

    def _case(self, engine: Any, case: Case) -> bool:
        """Measures one case into the record; whether memory was too little for one of the versions."""
        versions = {
            version: {"forward_backward_ms": [], "optimizer_ms": []} for version in (UNPATCHED, PATCHED)
        }
        self._record["cases"].append(
            {
                "tokens": int(latent_tokens(*case.shape)),
                "latent": case.shape,
                "checkpointing": case.checkpointing,
                "layers": case.layers,
                "versions": versions,
            }
        )
        model = engine.module
        whole = model.blocks
        model.blocks = whole[: case.layers]
        if case.checkpointing:
            model.enable_gradient_checkpointing()
        else:
            model.disable_gradient_checkpointing()
        started = time.monotonic()
        longest = 0.0
        for version in BLOCKS:
            measured, begin = versions[version], time.monotonic()
            if measured.get("status") and any(map(_too_large, versions.values())):
                continue  # one block tells whether the other version fits; there is nothing to set beside it
            if begin + longest > self._deadline:
                measured.setdefault("status", "no time left")
                continue
            self._switch(version)
            measured["status"] = self._block(engine, case, measured)
            longest = max(longest, time.monotonic() - begin)
            self._save()
        model.blocks = whole
        print(f"{self._record['cases'][-1]} in {time.monotonic() - started:.1f} s", flush=True)
        return any(map(_too_large, versions.values()))

    def _block(self, engine: Any, case: Case, measured: dict[str, Any]) -> str:
        """Some micro-steps of one version; adds to `measured` and says how it went."""
        engine.module.zero_grad(set_to_none=True)
        gc.collect()
        self._memory.release()
        try:
            self._micro_steps(engine, case, measured)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            print(f"out of memory: {str(error).splitlines()[0]}", flush=True)
            return "out of memory"
        return "measured"

    def _micro_steps(self, engine: Any, case: Case, measured: dict[str, Any]) -> None:
        batch = random_batch(case.shape, self.size.text, self._device)
        held = get_accelerator().memory_allocated() / GB
        timer, marks, peak, reserved = clock(), [], 0.0, 0.0
        for _ in range(case.warm_up + case.measured):
            self._memory.reset()
            start = timer.mark()
            loss = self._loss(engine, batch)
            engine.backward(loss)
            end = timer.mark()
            peak, reserved = max(peak, self._memory.peak_gb()), max(reserved, self._memory.reserved_gb())
            engine.step()
            marks.append((start, end, timer.mark()))
        timer.settle(marks[-1][-1])
        for start, end, stepped in marks[case.warm_up :]:
            measured["forward_backward_ms"].append(timer.elapsed_ms(start, end))
            measured["optimizer_ms"].append(timer.elapsed_ms(end, stepped))
        measured["held_gb"] = held
        measured["peak_gb"] = max(peak, measured.get("peak_gb", 0.0))
        measured["reserved_gb"] = max(reserved, measured.get("reserved_gb", 0.0))


def _too_large(measured: dict[str, Any]) -> bool:
    return measured.get("status") == "out of memory"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--size", choices=list(SIZES), default="1.3b")
    arguments.add_argument("--seconds", type=float, required=True, help="begin nothing after that")
    arguments.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # from the launcher
    given = arguments.parse_args()
    get_accelerator().set_device(given.local_rank)
    deepspeed.init_distributed()
    Comparison(given.out, given.size, given.seconds).run()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
