"""What may stand in our sections of a ds_config: keys, types, defaults, and what does not go together.

One pydantic model a section. A validator's message follows the section's full key, which config.py adds.
"""

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from al_deepspeed.errors import PatchError


class Section(BaseModel):
    """Unknown keys and values of another type are errors; what was read does not change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FusedAdaLN(Section):
    """`fused_adaln`: which implementation the fused op runs, and which code of the model it replaces.

    patch: "auto" rewrites the classes of the model's modules in memory, a list of recipes' names those that
    they name, "off" none. verify: "first_step" compares each rewritten site with the original on the first
    batch.
    """

    enabled: bool = False
    backend: Literal["auto", "cuda", "reference"] = "auto"
    patch: str | tuple[str, ...] = "auto"
    verify: Literal["first_step", "off"] = "first_step"

    @field_validator("patch", mode="before")
    @classmethod
    def _auto_off_or_recipes(cls, given: Any) -> str | tuple[str, ...]:
        if isinstance(given, str) and given in ("auto", "off"):
            return given
        if isinstance(given, list | tuple) and given and all(isinstance(name, str) for name in given):
            return _known_recipes(tuple(given))
        raise ValueError(
            f"is {given!r}; allowed: 'auto', 'off', or a list of names that `al-deepspeed patch list` shows"
        )


def _known_recipes(names: tuple[str, ...]) -> tuple[str, ...]:
    from al_deepspeed.patching.recipes import choose_recipes

    if own := sorted({"auto", "off"}.intersection(names)):
        raise ValueError(f"is {list(names)!r}; {' and '.join(map(repr, own))} stands alone, not in a list")
    try:
        choose_recipes(names)
    except PatchError as error:
        raise ValueError(f"is {list(names)!r}: {error}") from None
    return names


NEED_A_MANIFEST = (
    "strategy",
    "group_by_shape",
    "mixture",
    "normalise_by",
    "tail",
    "on_oversize",
    "max_variants",
    "recalibrate",
)


class DualConstraintBatching(Section):
    """`dual_constraint_batching`: what the plan is made from, how batches are weighted, what is watched.

    manifest: rows of samples; without it the dataset is a stream. calibration: cost model and limits; without
    it max_tokens (M_mem), exponent (p) and max_cost (M_comp). With it they overrule its own. recalibrate:
    "epoch" refits it to the telemetry at each epoch's end. strategy .. max_variants: see
    scheduling/options.py. lr_scaling: see learning_rate.py. run_dir: where telemetry.jsonl goes; absent, no
    file. hang_timeout_s: see watchdog.py; 0 switches it off.
    """

    enabled: bool = False
    manifest: str | None = None
    calibration: str | None = None
    recalibrate: Literal["never", "epoch"] = "never"
    max_tokens: int | None = Field(None, gt=0)
    max_cost: float | None = Field(None, gt=0)
    exponent: float | None = Field(None, gt=0, le=8)
    strategy: Literal["equal_token", "dual_constraint", "balanced"] = "balanced"
    mixing: Literal["corpus", "free"] = "corpus"
    lookahead: int = Field(64, gt=0)
    group_by_shape: bool = False
    mixture: dict[str, float] | None = None
    loss_weighting: Literal["sample", "token", "micro_batch"] = "sample"
    normalise_by: Literal["step", "epoch"] = "step"
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    tail: Literal["split", "drop"] = "split"
    on_oversize: Literal["keep", "skip", "error"] = "keep"
    max_variants: int | None = Field(None, gt=0)
    run_dir: str | None = None
    hang_timeout_s: float = Field(900.0, ge=0)

    @model_validator(mode="after")
    def _a_stream_shows_only_what_was_read(self) -> "DualConstraintBatching":
        for name in NEED_A_MANIFEST if self.manifest is None else ():
            value, only = getattr(self, name), type(self).model_fields[name].default
            if value != only:
                raise ValueError(
                    f"has {name} {value!r} without a manifest; allowed for a stream, whose samples are not "
                    f"known ahead: {only!r}. Index the data and give a manifest, or leave {name} out"
                )
        return self

    @model_validator(mode="after")
    def _limits_come_from_one_place(self) -> "DualConstraintBatching":
        missing = [name for name in ("max_tokens", "exponent") if getattr(self, name) is None]
        if self.calibration is None and missing:
            raise ValueError(
                f"has no calibration and lacks {', '.join(missing)}; give a calibration file, or max_tokens, "
                "exponent and, unless it is to be chosen, max_cost"
            )
        if self.recalibrate == "epoch" and (self.calibration is None or self.run_dir is None):
            raise ValueError(
                'has recalibrate "epoch" without calibration or run_dir; it refits the one to the telemetry '
                "in the other, so give both"
            )
        if self.calibration is not None and self.exponent is not None and self.max_cost is None:
            raise ValueError(
                "has a calibration and an exponent, which asks for the rule B*S^exponent <= max_cost, but no "
                "max_cost; give M_comp as max_cost, or leave exponent out"
            )
        return self


SCHEDULES = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        for value in values
    )


class CurriculumMetric(Section):
    """One metric of DeepSpeed's `curriculum_metrics`; its keys for index files may stand, and do nothing."""

    index_to_sample_path: Any = Field(None, exclude=True)
    index_to_metric_path: Any = Field(None, exclude=True)
    clustering_type: Any = Field(None, exclude=True)
    min_difficulty: int = Field(ge=0)
    max_difficulty: int = Field(gt=0)
    difficulty_type: Literal["value", "percentile"] = "value"
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]
    schedule_config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _schedule_is_complete(self) -> "CurriculumMetric":
        known = SCHEDULES[self.schedule_type]
        unknown = [key for key in self.schedule_config if known and key not in known]
        if unknown:
            raise ValueError(
                f"has schedule_type {self.schedule_type!r} and {', '.join(map(repr, unknown))} in "
                f"schedule_config; allowed: {', '.join(known)}"
            )
        missing = [key for key in known if key not in self.schedule_config]
        if missing:
            raise ValueError(
                f"has schedule_type {self.schedule_type!r} and lacks {', '.join(missing)} in schedule_config"
            )
        if self.min_difficulty > self.max_difficulty:
            raise ValueError(
                f"has min_difficulty {self.min_difficulty} above max_difficulty {self.max_difficulty}"
            )
        if self.difficulty_type == "percentile" and self.max_difficulty > 100:
            raise ValueError(
                f"has difficulty_type 'percentile' and max_difficulty {self.max_difficulty}; allowed: at "
                "most 100"
            )
        takes_lists = self.schedule_type == "fixed_discrete"
        for key in known:
            value = self.schedule_config[key]
            if not (_are_numbers(value) if takes_lists else _are_numbers([value]) and value > 0):
                allowed = "a list of finite numbers" if takes_lists else "a finite number above 0"
                raise ValueError(f"has {key} {value!r} in schedule_config; allowed: {allowed}")
        if self.schedule_type == "fixed_discrete":
            levels, changes = (len(self.schedule_config[key]) for key in SCHEDULES["fixed_discrete"])
            if changes < 1 or levels != changes + 1:
                raise ValueError(
                    f"has {levels} difficulties and {changes} max_steps in schedule_config; allowed: one "
                    "max_step or more, and one difficulty more than those"
                )
            steps = self.schedule_config["max_step"]
            if steps != sorted(steps):
                raise ValueError(f"has max_step {steps} in schedule_config; allowed: ascending numbers")
        return self
