"""What a plan is made from, opened and checked: the manifest, the dataset it indexes, cost and limits.

Without a manifest the dataset is a stream, whose shapes show only as it is read.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch.utils.data import Dataset

from al_deepspeed.calibration.file import Calibration, read_calibration
from al_deepspeed.config import BATCHING_KEY
from al_deepspeed.config_sections import DualConstraintBatching
from al_deepspeed.data.manifest import Manifest, read_manifest
from al_deepspeed.errors import AdaptiveLoadError, ConfigError
from al_deepspeed.scheduling.constraints import Limits
from al_deepspeed.scheduling.cost import CostModel, PowerCost
from al_deepspeed.scheduling.shapes import Corpus


@dataclass(frozen=True)
class Inputs:
    """corpus: None of a stream. calibration: None where the config gives limits and exponent itself."""

    dataset: Dataset | Iterable
    corpus: Corpus | None
    cost: CostModel
    limits: Limits
    calibration: Calibration | None


def open_inputs(batching: DualConstraintBatching, dataset: Dataset | Iterable | None) -> Inputs:
    """Opens what the config names; errors name the key that named it."""
    if batching.manifest is None:
        corpus, dataset = None, _stream(dataset)
    else:
        manifest = _named("manifest", batching.manifest, read_manifest)
        corpus, dataset = manifest.corpus(), _matching_dataset(manifest, dataset)
    calibration = None
    if batching.calibration is not None:
        calibration = _named("calibration", batching.calibration, read_calibration)
    cost, limits = cost_and_limits(batching, calibration)
    return Inputs(dataset, corpus, cost, limits, calibration)


def cost_and_limits(
    batching: DualConstraintBatching, calibration: Calibration | None
) -> tuple[CostModel, Limits]:
    """A calibration's cost model and limits, where the config does not overrule the latter."""
    if calibration is None:
        cost = PowerCost(exponent=batching.exponent)
        return cost, Limits(max_tokens=batching.max_tokens, max_cost=batching.max_cost)
    max_tokens = batching.max_tokens or calibration.max_tokens
    if max_tokens is None:
        raise ConfigError(
            f"{BATCHING_KEY}.max_tokens is missing, and {batching.calibration} has none either: its scan "
            "knew no memory capacity. Give max_tokens, the B*S that a rank's memory holds."
        )
    max_cost = batching.max_cost or calibration.max_cost
    limits = Limits(max_tokens, max_cost, batching.exponent, step_cost=calibration.step_ms or 0.0)
    return calibration.cost, limits


def _named(key: str, path: str, read):
    try:
        return read(path)
    except AdaptiveLoadError as error:
        raise type(error)(f"{BATCHING_KEY}.{key} is {path!r} (from {Path.cwd()}): {error}") from error


def _stream(dataset: Dataset | Iterable | None) -> Iterable:
    if not hasattr(dataset, "__iter__"):
        given = "no dataset was given" if dataset is None else f"dataset is a {type(dataset).__name__}"
        raise ConfigError(
            f"{BATCHING_KEY}.manifest is missing, and {given}; allowed: a manifest, or without one a dataset "
            "to iterate over, each rank its own part: a WebDataset pipeline or an IterableDataset."
        )
    return dataset


def _matching_dataset(manifest: Manifest, dataset: Dataset | None) -> Dataset:
    from al_deepspeed.data.shards import LatentDataset

    if dataset is None:
        return LatentDataset(manifest)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"dataset is a {type(dataset).__name__}; allowed: a map-style dataset, with __len__ and "
            f"__getitem__, whose index is the row of the manifest. To read a stream, leave {BATCHING_KEY}."
            "manifest out."
        )
    rows = manifest.table.num_rows
    if len(dataset) != rows:
        raise ConfigError(
            f"the dataset has {len(dataset)} samples, but the manifest {manifest.path} has {rows} rows; "
            "allowed: one sample a row, in the manifest's order. Index the data again, or pass the dataset "
            "that was indexed."
        )
    fingerprint = getattr(dataset, "fingerprint", manifest.fingerprint)
    if fingerprint != manifest.fingerprint:
        raise ConfigError(
            f"the dataset was made from a manifest with fingerprint {fingerprint}, but {manifest.path} has "
            f"{manifest.fingerprint}. Make the dataset from this manifest, or name the other in "
            f"{BATCHING_KEY}.manifest."
        )
    return dataset
