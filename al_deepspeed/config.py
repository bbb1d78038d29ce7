"""Our part of a ds_config: `fused_adaln` and `data_efficiency.data_sampling.dual_constraint_batching`.

DeepSpeed keeps keys that it does not know, so both sections stand in the user's one ds_config file and are
read from the raw dictionary here: nothing depends on what DeepSpeed's own Data Efficiency parser makes of it.
Of DeepSpeed's keys beside ours we read the seed, the workers and the curriculum, and refuse the few settings
under which a planned batch would silently train something else.

A wrong value is a `ConfigError` that names the full key, what was given and what is allowed.
"""

import base64
import copy
import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import hjson
from pydantic import BaseModel, ValidationError

from al_deepspeed.config_sections import CurriculumMetric, DualConstraintBatching, FusedAdaLN
from al_deepspeed.errors import ConfigError

ADALN_KEY = "fused_adaln"
SAMPLING_KEY = "data_efficiency.data_sampling"
BATCHING_KEY = f"{SAMPLING_KEY}.dual_constraint_batching"
CURRICULUM_KEY = f"{SAMPLING_KEY}.curriculum_learning"
CURRICULUM_KEYS = ("enabled", "curriculum_metrics", "data_cluster_path")


@dataclass(frozen=True)
class Settings:
    """What a ds_config says about us. `batching` is None unless it is enabled."""

    fused_adaln: FusedAdaLN
    batching: DualConstraintBatching | None
    seed: int = 1234
    num_workers: int = 0
    pin_memory: bool | None = None
    curriculum: dict[str, CurriculumMetric] = field(default_factory=dict)


def load_config(config: dict | str | Path) -> dict:
    """The ds_config as a dictionary of our own, from a dictionary, a path, or base64 as DeepSpeed takes it.

    A copy, since DeepSpeed's parser writes defaults into the nested sections.
    """
    if isinstance(config, dict):
        return copy.deepcopy(config)
    path = Path(config)
    try:
        is_file = path.is_file()
    except OSError:  # a long base64 string is no possible file name
        is_file = False
    try:
        if is_file:
            loaded = hjson.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
        else:
            loaded = hjson.loads(base64.urlsafe_b64decode(str(config)).decode("utf-8"))
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}") from None
    except ValueError as error:
        what = f"{path} is not JSON: {error}" if is_file else f"there is no ds_config file {path.absolute()}"
        raise ConfigError(f"{what}. Give the path of a JSON file, or a dictionary.") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{config} holds a {type(loaded).__name__}; a ds_config is a JSON object.")
    return dict(loaded)


def read_config(config: dict | str | Path) -> Settings:
    """Checks and reads our sections.

    Args:
        config: a ds_config, as `deepspeed.initialize` takes it.
    Returns:
        the settings, every value checked; files that they name are opened elsewhere.
    """
    raw = load_config(config)
    efficiency = _section(raw, "data_efficiency", "")
    sampling = _section(efficiency, "data_sampling", "data_efficiency.")
    for where, keys in (("", raw), ("data_efficiency.", efficiency), (f"{SAMPLING_KEY}.", sampling)):
        _no_misspelt_section(where, keys)
    batching = None
    if "dual_constraint_batching" in sampling:
        section = _section(sampling, "dual_constraint_batching", f"{SAMPLING_KEY}.")
        if section.get("enabled") is not False:  # what is switched off may be incomplete, not misspelt
            batching = _validate(DualConstraintBatching, section, BATCHING_KEY)
        else:
            _known_keys(section, DualConstraintBatching, BATCHING_KEY)
    adaln = _validate(FusedAdaLN, _section(raw, ADALN_KEY, ""), ADALN_KEY)
    if batching is None or not batching.enabled:
        return Settings(fused_adaln=adaln, batching=None)
    for key, section in (("data_efficiency", efficiency), (SAMPLING_KEY, sampling)):
        if section.get("enabled") is not True:
            raise ConfigError(
                f"{BATCHING_KEY}.enabled is true, but {key}.enabled is {section.get('enabled', 'absent')!r}. "
                f"Set {key}.enabled to true, or {BATCHING_KEY}.enabled to false."
            )
    _refuse_what_changes_the_weights(raw)
    curriculum = _curriculum(sampling)
    if curriculum and batching.manifest is None:
        raise ConfigError(
            f"{CURRICULUM_KEY} is enabled, but {BATCHING_KEY} has no manifest: which samples of a stream a "
            "curriculum admits is not known ahead. Index the data and give a manifest, or disable it."
        )
    return Settings(
        fused_adaln=adaln,
        batching=batching,
        seed=_integer(efficiency, "seed", "data_efficiency", 1234),
        num_workers=_integer(sampling, "num_workers", SAMPLING_KEY, 0),
        pin_memory=_boolean(sampling, "pin_memory", SAMPLING_KEY),
        curriculum=curriculum,
    )


def with_one_micro_batch(config: dict) -> dict:
    """The config for DeepSpeed: one planned micro-batch is what it calls a micro-batch of size 1."""
    return {"train_micro_batch_size_per_gpu": 1, **config}


def _curriculum(sampling: dict) -> dict[str, CurriculumMetric]:
    section = _section(sampling, "curriculum_learning", f"{SAMPLING_KEY}.")
    for key in section:
        if key not in CURRICULUM_KEYS:
            raise ConfigError(_unknown_key(CURRICULUM_KEY, key, list(CURRICULUM_KEYS)))
    if not _boolean(section, "enabled", CURRICULUM_KEY):
        return {}
    metrics = _section(section, "curriculum_metrics", f"{CURRICULUM_KEY}.")
    if not metrics:
        raise ConfigError(
            f'{CURRICULUM_KEY}.curriculum_metrics is missing or empty; name one metric or more, say "seqlen".'
        )
    return {
        name: _validate(CurriculumMetric, value, f"{CURRICULUM_KEY}.curriculum_metrics.{name}")
        for name, value in metrics.items()
    }


def _refuse_what_changes_the_weights(raw: dict) -> None:
    """Loss weights assume DeepSpeed's mean over R ranks and over G micro-steps of one planned micro-batch."""
    checks = (
        (
            "train_micro_batch_size_per_gpu",
            1,
            "1 or absent, which means one planned micro-batch",
        ),
        ("managed_gradient_accumulation", True, "true: the plan fixes how many micro-steps make a step"),
        (
            "gradient_allreduce_op",
            "mean",
            "'mean' or absent: the loss weights undo that mean",
        ),
    )
    for key, only, allowed in checks:
        value = raw.get(key, only)
        if value != only or isinstance(value, bool) is not isinstance(only, bool):
            raise ConfigError(f"{key} is {value!r}; allowed with {BATCHING_KEY}: {allowed}.")


def _section(parent: dict, key: str, where: str) -> dict:
    value = parent.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{where}{key} is {value!r}; allowed: a JSON object.")
    return value


def _integer(section: dict, key: str, where: str, default: int) -> int:
    value = section.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{where}.{key} is {value!r}; allowed: an integer of at least 0.")
    return value


def _boolean(section: dict, key: str, where: str) -> bool | None:
    value = section.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{where}.{key} is {value!r}; allowed: true or false.")
    return value


def _no_misspelt_section(where: str, keys: dict) -> None:
    """A misspelt section would be ignored in silence: DeepSpeed keeps what it does not know."""
    for right in ("fused_adaln", "dual_constraint_batching", "curriculum_learning"):
        home = "" if right == "fused_adaln" else f"{SAMPLING_KEY}."
        for key in keys if where or right != "curriculum_learning" else ():  # DeepSpeed has one there too
            close = difflib.SequenceMatcher(None, key.lower(), right).ratio() > 0.8
            if close and f"{where}{key}" != f"{home}{right}":
                raise ConfigError(f"{where}{key}: unknown key. Did you mean {home}{right}?")


def _known_keys(section: dict, model: type[BaseModel], where: str) -> None:
    for key in section:
        if key not in model.model_fields:
            raise ConfigError(_unknown_key(where, key, list(model.model_fields)))


def _validate(model: type[BaseModel], values: Any, where: str) -> Any:
    try:
        return model.model_validate(values)
    except ValidationError as failure:
        lines = [_explain(error, model, where) for error in failure.errors()]
        raise ConfigError("\n".join(lines)) from None


def _explain(error: dict, model: type[BaseModel], where: str) -> str:
    """One line a fault: the full key, what was given, what is allowed."""
    key = ".".join([where, *(str(part) for part in error["loc"])])
    given, context, kind = error["input"], error.get("ctx", {}), error["type"]
    if kind == "extra_forbidden":
        return _unknown_key(where, str(error["loc"][-1]), list(model.model_fields))
    if kind == "missing":
        return f"{key} is missing; it has no default."
    if kind == "value_error":
        return f"{key} {context['error']}."
    if kind == "literal_error":
        choices = list(get_args(model.model_fields[error["loc"][-1]].annotation))
        return f"{key} is {given!r}; allowed: {', '.join(map(repr, choices))}.{_suggest(str(given), choices)}"
    if kind in _BOUNDS:
        word, name = _BOUNDS[kind]
        return f"{key} is {given!r}; allowed: {word} {context[name]}."
    return f"{key} is {given!r}; allowed: {_TYPES.get(kind, error['msg'])}."


_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than_equal": ("at most", "le"),
}
_TYPES = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "dict_type": "a JSON object",
    "model_type": "a JSON object",
}


def _unknown_key(where: str, key: str, allowed: list[str]) -> str:
    return f"{where}.{key}: unknown key.{_suggest(key, allowed)} Allowed: {', '.join(allowed)}."


def _suggest(given: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(given, allowed, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"the key {twice[0]!r} stands twice in one object. Remove one of them.")
    return dict(pairs)
