"""Trains diffusers' Wan transformer on a corpus of latents.

    deepspeed launch/train_wan.py --config launch/configs/zero3.json --run runs/first --preset 1.3b

The run's folder receives `ds_config.json` as used, `telemetry.jsonl` (a line a step), `validation.jsonl`,
`checkpoints/` and, at the end, `model/`, which diffusers loads. Nodes share it. On SIGTERM to the launcher
the ranks agree at the next step boundary, save together and leave; `--resume` goes on from there.
`al-deepspeed calibrate --factory launch.train_wan:calibration` scans the same model under the same options.
"""

import argparse
import json
import sys
import warnings

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm

import al_deepspeed
from al_deepspeed.agreement import StopOnSignal, together
from al_deepspeed.build_locks import told_of_build_locks
from al_deepspeed.config import BATCHING_KEY, read_config
from al_deepspeed.data.files import write_whole
from al_deepspeed.data.manifest import read_manifest
from al_deepspeed.data.shards import LatentDataset
from al_deepspeed.errors import AdaptiveLoadError, ConfigError
from al_deepspeed.telemetry import FILE_NAME
from al_deepspeed.training import checkpoints, options, wan
from al_deepspeed.training import model as models
from al_deepspeed.training.objective import FlowDataset, Objective, flow_loss
from al_deepspeed.training.synthetic import calibration
from al_deepspeed.training.validation import Validation, ValidationFile

__all__ = ["Trainer", "calibration", "main"]


class Trainer:
    """One rank of a run, from its command line to its exported model."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.folder = arguments.run
        self.checkpoints = self.folder / "checkpoints"
        with together():
            config, seed = self._read_config()
            self.dataset, corpus = _open(self.manifest, arguments, seed)
            held_out = arguments.validation_manifest
            validation_data = _open(held_out, arguments, seed) if held_out else (self.dataset, corpus)
            source = self._model_source()
        dist.barrier()  # every rank has looked into the folder
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / "ds_config.json", json.dumps(config, indent=2) + "\n")
        self.model = models.make(source, arguments, config)
        self.engine, _, self.loader, _ = al_deepspeed.initialize(
            model=self.model, model_parameters=self.model.parameters(), dataset=self.dataset, config=config
        )
        if arguments.resume and checkpoints.latest(self.checkpoints):
            self.engine.load_checkpoint(str(self.checkpoints))
        device = torch.device(get_accelerator().current_device_name())
        self.placement = (device, next(self.model.parameters()).dtype)
        self.validation = Validation(*validation_data, samples_a_shape=arguments.validation_samples)
        self.validation_file = ValidationFile(self.folder)

    def _read_config(self) -> tuple[dict, int]:
        """The ds_config as this run uses it, and its seed."""
        arguments = self.arguments
        config = options.changed_config(arguments.config, arguments.set, arguments.precision)
        batching = read_config(config).batching
        if batching is None:
            raise ConfigError(f"{arguments.config} does not enable {BATCHING_KEY}; see launch/configs.")
        if batching.manifest is None:
            raise ConfigError(f"{BATCHING_KEY}.manifest is missing; this trainer reads no stream.")
        if (self.folder / FILE_NAME).exists() and not arguments.resume:
            raise ConfigError(f"{self.folder} holds a run. Give --resume to go on with it, or another --run.")
        self.manifest = batching.manifest
        sampling = config["data_efficiency"]["data_sampling"]
        sampling["dual_constraint_batching"]["run_dir"] = str(self.folder)
        return config, read_config(config).seed

    def _model_source(self) -> wan.Source:
        latent, text = (self.dataset.latents[0][name] for name in ("latent", "text"))
        return models.source(self.arguments, channels=latent.shape[0], text_dim=text.shape[1])

    def train(self) -> None:
        """Runs to the last step, or to a signal. Saves in both cases, exports in the first."""
        if self.engine.global_steps == 0:
            self._validate()
        with StopOnSignal() as stop:
            self._progress = tqdm(
                desc=str(self.folder),
                total=self.arguments.max_steps,
                initial=self.engine.global_steps,
                disable=dist.get_rank() > 0,
                unit="step",
            )
            stopped = self._run_epochs(stop)
            self._progress.close()
            self._save()
        if not stopped:
            wan.export(self.model, self.folder / "model")

    def _run_epochs(self, stop: StopOnSignal) -> bool:
        """Trains until the end or a signal; whether a signal came before the end."""
        while not self._at_the_end():
            self.dataset.epoch = self.loader.epoch
            for batch in self.loader:
                steps_before = self.engine.global_steps
                loss = self.micro_step(batch)
                if self.engine.global_steps == steps_before:
                    continue
                self._after_step(batch, loss)
                if self._at_the_end():
                    break
                if stop.agreed():
                    return True
        return False

    def _at_the_end(self) -> bool:
        limit = self.arguments.max_steps
        enough_steps = limit is not None and self.engine.global_steps >= limit
        return enough_steps or self.loader.epoch >= self.arguments.epochs

    def micro_step(self, batch: dict) -> torch.Tensor:
        """Forward, backward and the engine's step on one planned batch; its mean loss."""
        loss = flow_loss(self.engine, batch, *self.placement).mean()
        self.loader.record_loss(loss)
        self.engine.backward(loss * batch["loss_weight"].to(loss.device))
        self.engine.step()
        return loss

    def _after_step(self, batch: dict, loss: torch.Tensor) -> None:
        step = self.engine.global_steps
        self._progress.update()
        if dist.get_rank() == 0:
            shape = "x".join(str(side) for side in batch["shape"])
            self._progress.set_postfix_str(
                f"epoch {self.loader.epoch}, {len(batch['sample_ids'])} of {shape}, loss {loss.item():.3f}"
            )
        if self.arguments.validate_every and step % self.arguments.validate_every == 0:
            self._validate()
        if self.arguments.save_every and step % self.arguments.save_every == 0:
            self._save()

    def _save(self) -> None:
        checkpoints.save(self.engine, self.checkpoints, self.engine.global_steps, keep=self.arguments.keep)

    def _validate(self) -> None:
        if not self.arguments.validate_every:
            return
        losses = self.validation(self.engine, *self.placement)
        if dist.get_rank() == 0:
            self.validation_file.write(self.engine.global_steps, losses)


def _open(manifest: str, arguments: argparse.Namespace, seed: int) -> tuple[FlowDataset, object]:
    """The samples of a manifest with noise, and the corpus that they make up."""
    rows = read_manifest(manifest)
    corpus = rows.corpus()
    wan.check_shapes(corpus, manifest)
    objective = Objective(arguments.timesteps, arguments.shift, arguments.condition_dropout)
    return FlowDataset(LatentDataset(rows), objective, seed=seed), corpus


def main() -> None:
    arguments = options.parser(__doc__.splitlines()[0]).parse_args()
    # DeepSpeed calls collectives by names that newer torch deprecates, at every layer.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    get_accelerator().set_device(arguments.local_rank)
    with told_of_build_locks():
        deepspeed.init_distributed()
    try:
        Trainer(arguments).train()
    except AdaptiveLoadError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
