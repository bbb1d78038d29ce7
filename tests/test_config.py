"""ds_config: what is refused, in which words, and that DeepSpeed's own parser takes what we take."""

import base64
import copy
import json

import pytest

from al_deepspeed.config import (
    BATCHING_KEY,
    SAMPLING_KEY,
    load_config,
    read_config,
    with_one_micro_batch,
)
from al_deepspeed.config_sections import DualConstraintBatching
from al_deepspeed.errors import ConfigError

BATCHING = {"enabled": True, "manifest": "m.parquet", "max_tokens": 16384, "max_cost": 1e8, "exponent": 2.0}


def ds_config(batching=None, *, curriculum=None, sampling=None, **top) -> dict:
    section = {**BATCHING, **(batching or {})}
    section = {key: value for key, value in section.items() if value is not ...}
    data_sampling = {"enabled": True, "dual_constraint_batching": section, **(sampling or {})}
    if curriculum is not None:
        data_sampling["curriculum_learning"] = curriculum
    return {"data_efficiency": {"enabled": True, "seed": 7, "data_sampling": data_sampling}, **top}


CURRICULUM = {
    "enabled": True,
    "curriculum_metrics": {
        "seqlen": {
            "index_to_sample_path": "unused",
            "difficulty_type": "value",
            "clustering_type": "single_cluster",
            "min_difficulty": 64,
            "max_difficulty": 1024,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
        }
    },
}


def curriculum_of(**changes) -> dict:
    """A ds_config with CURRICULUM, its metric changed."""
    metric = {**CURRICULUM["curriculum_metrics"]["seqlen"], **changes}
    return ds_config(curriculum={"enabled": True, "curriculum_metrics": {"seqlen": metric}})


def test_reads_what_is_given():
    settings = read_config(ds_config(sampling={"num_workers": 4}, fused_adaln={"enabled": True}))
    assert settings.batching.manifest == "m.parquet"
    assert (settings.seed, settings.num_workers, settings.pin_memory) == (7, 4, None)
    assert settings.fused_adaln.enabled
    assert settings.curriculum == {}


def test_without_our_sections_nothing_is_on():
    settings = read_config({"train_batch_size": 8})
    assert settings.batching is None
    assert not settings.fused_adaln.enabled


@pytest.mark.parametrize("patch", ["auto", "off", ["diffusers.wan", "wan2.1"]])
def test_where_the_fused_op_is_patched_in(patch):
    section = read_config({"fused_adaln": {"enabled": True, "patch": patch, "verify": "off"}}).fused_adaln
    assert section.patch == (tuple(patch) if isinstance(patch, list) else patch)
    assert section.verify == "off"
    default = read_config({"fused_adaln": {"enabled": True}}).fused_adaln
    assert (default.patch, default.verify) == ("auto", "first_step")


def test_a_section_that_is_off_may_be_incomplete_but_not_misspelt():
    assert read_config(ds_config({"enabled": False, "manifest": ...})).batching is None
    with pytest.raises(ConfigError, match="unknown key"):
        read_config(ds_config({"enabled": False, "manifst": "m"}))


# what is wrong -> words that the message must hold: the full key, what was given, what is allowed
FAULTS = {
    "unknown key": (
        ds_config({"stratgy": "balanced"}),
        [f"{BATCHING_KEY}.stratgy", "unknown key", "Did you mean 'strategy'?", "loss_weighting"],
    ),
    "max_tokens 0": (ds_config({"max_tokens": 0}), [f"{BATCHING_KEY}.max_tokens", "is 0", "more than 0"]),
    "max_tokens text": (ds_config({"max_tokens": "16k"}), ["max_tokens is '16k'", "an integer"]),
    "max_tokens true": (ds_config({"max_tokens": True}), ["max_tokens is True", "an integer"]),
    "stream by another strategy": (
        ds_config({"manifest": ..., "strategy": "dual_constraint"}),
        [
            f"{BATCHING_KEY} has strategy 'dual_constraint' without a manifest",
            "allowed for a stream",
            "balanced",
        ],
    ),
    "stream weighted by the epoch": (
        ds_config({"manifest": ..., "normalise_by": "epoch"}),
        ["normalise_by 'epoch' without a manifest", "'step'. Index the data"],
    ),
    "stream with a curriculum": (
        ds_config({"manifest": ...}, curriculum=CURRICULUM),
        ["curriculum_learning is enabled", "has no manifest"],
    ),
    "curriculum switched on by another key": (
        ds_config(curriculum={"enable": True, "curriculum_metrics": {}}),
        [f"{SAMPLING_KEY}.curriculum_learning.enable: unknown key", "Did you mean 'enabled'?"],
    ),
    "curriculum misspelt": (
        ds_config(sampling={"curriculum_learnin": {"enabled": True}, "dual_constraint_batching": BATCHING}),
        [f"{SAMPLING_KEY}.curriculum_learnin: unknown", f"Did you mean {SAMPLING_KEY}.curriculum_learning?"],
    ),
    "exponent 9": (ds_config({"exponent": 9.0}), [f"{BATCHING_KEY}.exponent is 9.0", "at most 8"]),
    "unknown strategy": (
        ds_config({"strategy": "dual_constrain"}),
        ["strategy is 'dual_constrain'", "'equal_token'", "Did you mean 'dual_constraint'?"],
    ),
    "no limits": (
        ds_config({"max_tokens": ..., "exponent": ...}),
        [BATCHING_KEY, "no calibration", "max_tokens, exponent"],
    ),
    "parent off": (
        {**ds_config(), "data_efficiency": {**ds_config()["data_efficiency"], "enabled": False}},
        ["data_efficiency.enabled is False", f"{BATCHING_KEY}.enabled"],
    ),
    "section misspelt": (
        {"data_efficiency": {"enabled": True, "data_sampling": {"dual_constrain_batching": {}}}},
        ["data_efficiency.data_sampling.dual_constrain_batching", f"Did you mean {BATCHING_KEY}?"],
    ),
    "section in the wrong place": (
        {"dual_constraint_batching": BATCHING},
        ["dual_constraint_batching: unknown key", f"Did you mean {BATCHING_KEY}?"],
    ),
    "section no object": (ds_config(sampling={"dual_constraint_batching": 3}), ["is 3", "a JSON object"]),
    "micro-batch 2": (
        ds_config(train_micro_batch_size_per_gpu=2),
        ["train_micro_batch_size_per_gpu is 2", "one planned micro-batch"],
    ),
    "sum over ranks": (ds_config(gradient_allreduce_op="sum"), ["gradient_allreduce_op is 'sum'", "'mean'"]),
    "own boundaries": (
        ds_config(managed_gradient_accumulation=False),
        ["managed_gradient_accumulation is False"],
    ),
    "workers": (ds_config(sampling={"num_workers": -1}), ["data_sampling.num_workers is -1", "at least 0"]),
    "backend": (ds_config(fused_adaln={"backend": "triton"}), ["fused_adaln.backend is 'triton'", "'auto'"]),
    "patch": (
        ds_config(fused_adaln={"patch": "on"}),
        ["fused_adaln.patch is 'on'", "'auto', 'off'", "al-deepspeed patch list"],
    ),
    "patch empty": (ds_config(fused_adaln={"patch": []}), ["fused_adaln.patch is []", "'auto', 'off'"]),
    "patch unknown": (
        ds_config(fused_adaln={"patch": ["diffusers.wan", "diffusers.wam"]}),
        ["no patch target is called diffusers.wam", "known: ", "diffusers.wan"],
    ),
    "patch auto in a list": (
        ds_config(fused_adaln={"patch": ["auto", "diffusers.wan"]}),
        ["fused_adaln.patch is ['auto', 'diffusers.wan']", "'auto' stands alone"],
    ),
    "patch numbers": (ds_config(fused_adaln={"patch": [1]}), ["fused_adaln.patch is [1]"]),
    "verify": (
        ds_config(fused_adaln={"verify": True}),
        ["fused_adaln.verify is True", "'first_step', 'off'"],
    ),
    "curriculum without metrics": (ds_config(curriculum={"enabled": True}), ["curriculum_metrics", "seqlen"]),
    "curriculum schedule": (
        ds_config(
            curriculum={
                "enabled": True,
                "curriculum_metrics": {
                    "seqlen": {**CURRICULUM["curriculum_metrics"]["seqlen"], "schedule_type": "fixed_lin"}
                },
            }
        ),
        ["curriculum_metrics.seqlen.schedule_type is 'fixed_lin'", "'fixed_linear'"],
    ),
    "curriculum step of nothing": (
        curriculum_of(schedule_config={"total_curriculum_step": 0, "difficulty_step": 8}),
        ["curriculum_metrics.seqlen", "total_curriculum_step 0", "above 0"],
    ),
    "curriculum step in words": (
        curriculum_of(schedule_config={"total_curriculum_step": "10", "difficulty_step": 8}),
        ["total_curriculum_step '10'", "a finite number above 0"],
    ),
    "curriculum level alone": (
        curriculum_of(schedule_type="fixed_discrete", schedule_config={"difficulty": 5, "max_step": 3}),
        ["difficulty 5", "a list of finite numbers"],
    ),
    "curriculum that falls": (
        curriculum_of(min_difficulty=200, max_difficulty=100),
        ["min_difficulty 200 above max_difficulty 100"],
    ),
    "curriculum key misspelt": (
        curriculum_of(max_dificulty=512),
        ["curriculum_metrics.seqlen.max_dificulty: unknown key", "Did you mean 'max_difficulty'?"],
    ),
    "curriculum type misspelt": (
        curriculum_of(difficulty_types="percentile"),
        ["curriculum_metrics.seqlen.difficulty_types: unknown key", "Did you mean 'difficulty_type'?"],
    ),
    "curriculum key of nobody": (curriculum_of(foo=1), ["curriculum_metrics.seqlen.foo: unknown key"]),
    "curriculum schedule's key": (
        curriculum_of(
            schedule_config={"total_curriculum_step": 10, "difficulty_step": 8, "root_degre": 2},
        ),
        ["curriculum_metrics.seqlen has schedule_type 'fixed_linear'", "'root_degre' in schedule_config"],
    ),
    "curriculum schedule's key misspelt": (
        curriculum_of(schedule_config={"total_curriculum_steps": 10, "difficulty_step": 8}),
        ["'total_curriculum_steps' in schedule_config; allowed: total_curriculum_step, difficulty_step"],
    ),
    "curriculum without end": (
        curriculum_of(schedule_config={"total_curriculum_step": float("inf"), "difficulty_step": 8}),
        ["total_curriculum_step inf", "a finite number above 0"],
    ),
    "curriculum back in time": (
        curriculum_of(
            schedule_type="fixed_discrete",
            schedule_config={"difficulty": [64, 128, 256], "max_step": [9, 5]},
        ),
        ["max_step [9, 5]", "ascending"],
    ),
    "curriculum beyond all": (
        curriculum_of(difficulty_type="percentile", max_difficulty=200),
        ["'percentile' and max_difficulty 200", "at most 100"],
    ),
}


def test_keys_for_deepspeeds_index_files_may_stand_and_do_nothing():
    metric = read_config(curriculum_of(index_to_metric_path="unused")).curriculum["seqlen"]
    assert sorted(metric.model_dump()) == [
        "difficulty_type", "max_difficulty", "min_difficulty", "schedule_config", "schedule_type",
    ]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_names_key_given_and_allowed(fault):
    config, words = FAULTS[fault]
    with pytest.raises(ConfigError) as raised:
        read_config(config)
    for word in words:
        assert word in str(raised.value)


def test_every_fault_of_a_section_is_named_at_once():
    with pytest.raises(ConfigError) as raised:
        read_config(ds_config({"max_tokens": 0, "tail": "keep", "lookahed": 4}))
    message = str(raised.value)
    assert all(word in message for word in ("max_tokens is 0", "tail is 'keep'", "lookahed: unknown key"))


def test_strategies_are_those_of_the_planner():
    from al_deepspeed.scheduling.plan import STRATEGIES

    allowed = DualConstraintBatching.model_fields["strategy"].annotation.__args__
    assert set(allowed) == set(STRATEGIES)


@pytest.mark.parametrize("curriculum", [None, CURRICULUM], ids=["plain", "curriculum"])
def test_deepspeed_parses_our_file_and_leaves_the_users_alone(curriculum):
    from deepspeed.runtime.config import DeepSpeedConfig

    given = ds_config(curriculum=copy.deepcopy(curriculum), fused_adaln={"enabled": True})
    before = copy.deepcopy(given)
    settings = read_config(given)
    parsed = DeepSpeedConfig(with_one_micro_batch(load_config(given)))
    assert given == before
    assert parsed.train_micro_batch_size_per_gpu == 1
    sampling = parsed.data_efficiency_config["data_sampling"]
    assert sampling["dual_constraint_batching"] == BATCHING
    assert sampling["curriculum_learning"]["enabled"] is bool(settings.curriculum)


def test_file_base64_and_dictionary_read_alike(tmp_path):
    config = ds_config()
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    assert read_config(path) == read_config(str(path)) == read_config(encoded) == read_config(config)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", ["is not JSON"]), ("[1]", ["JSON object"]), ('{"a": 1, "a": 2}', ["'a' stands twice"])],
)
def test_broken_files(tmp_path, text, words):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_config(path)
    assert all(word in str(raised.value) for word in [*words, str(path)])


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no ds_config file .*absent\.json"):
        read_config(tmp_path / "absent.json")
