"""Four ranks through the `deepspeed` launcher: who shares a batch, unequal streams, plans that differ."""

import json
from itertools import chain

import pytest
from launched import tiny
from launching import LAUNCHED, launch

from al_deepspeed.telemetry import read_telemetry

ROWS = list(range(len(tiny.ROWS)))
PARTS = [ROWS[0::4], ROWS[1::4], ROWS[2::4], ROWS[3::4][:5]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """[rank] -> what groups_and_streams.py saw there."""
    out = tmp_path_factory.mktemp("groups")
    script = LAUNCHED / "groups_and_streams.py"
    with launch(script, str(out), ranks=4, folder=out / "launch", time_limit_s=280) as run:
        assert run.wait(expect=None) == 1, run.logs()  # its last line is a bad config that nobody catches
        logs = [run.rank_log(rank) for rank in range(4)]
    seen = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(4)]
    telemetry = read_telemetry(out / "stream")
    return [one | {"telemetry": telemetry, "log": log} for one, log in zip(seen, logs, strict=True)]


def rows_of(micro_steps: list[dict], key: str = "ids") -> list[int]:
    return sorted(chain.from_iterable(one[key] for one in micro_steps if not one["filler"]))


@pytest.mark.parametrize("how", ["mpu", "mesh", "ulysses", "autotp"])
def test_two_models_of_two_ranks_get_two_batches(ranks, how):
    first, again, second, again_too = (rank[how] for rank in ranks)
    assert first == again and second == again_too  # ranks of one model
    assert rows_of(first + second) == ROWS  # R is 2: together every sample once
    assert len(first) == len(second)


def test_a_stream_ends_its_epochs_on_all_ranks_together_with_every_sample_once(ranks):
    epochs = [rank["first epoch"] for rank in ranks]
    assert len({len(batches) for batches in epochs}) == 1
    for part, batches in zip(PARTS, epochs, strict=True):
        assert rows_of(batches, "names") == part
        for batch in batches:
            assert batch["latents"] == batch["shape"] and len(batch["names"]) == len(batch["ids"]) > 0
    assert any(batch["filler"] for batch in epochs[3])
    assert [rank["epoch after"] for rank in ranks] == [1] * 4


def test_a_streams_telemetry_is_that_of_a_plan(ranks):
    lines = [line for line in ranks[0]["telemetry"] if line["epoch"] == 0]
    assert lines[-1]["samples_total"] == sum(len(part) for part in PARTS)
    for line in lines:
        assert line["loss"] > 0 and sum(map(sum, line["loss_weight"])) == pytest.approx(4 * 2)
        assert len(line["shape"]) == 2 and len(line["measured_ms"][0]) == len(line["predicted_cost"][0]) == 4


def test_a_resumed_stream_begins_its_epoch_again_and_says_so(ranks):
    for part, rank in zip(PARTS, ranks, strict=True):
        assert rank["resumed"] == [0, 1]
        assert rows_of(rank["second epoch again"], "names") == part
    assert "a stream has no position to go back to: epoch 1 begins again" in ranks[0]["log"]


def test_ranks_of_one_model_share_the_stream_of_the_first(ranks):
    first, again, second, again_too = (rank["stream of models"] for rank in ranks)
    assert first == again and second == again_too
    assert rows_of(first, "names") == ROWS[0::2] and rows_of(second, "names") == ROWS[1::2]
    assert len(first) == len(second)


def test_a_pipeline_that_steps_by_itself_is_refused(ranks):
    refusals = [rank["pipeline"] for rank in ranks]
    assert refusals == [refusals[0]] * 4 and refusals[0][0] == "ConfigError"
    assert "model is a PipelineModule, which takes batches and steps by itself" in refusals[0][1]


def test_plans_that_differ_are_refused_before_the_first_step(ranks):
    refusals = [rank["plans differ"] for rank in ranks]
    assert refusals == [refusals[0]] * 4 and refusals[0][0] == "PlanError"
    assert "rank 2's plan of epoch 0 differs from rank 0's in " in refusals[0][1]
    assert "size" in refusals[0][1] and "loss_weight" in refusals[0][1]


def test_an_error_that_nobody_catches_is_in_the_log_of_every_rank(ranks):
    for rank in ranks:
        assert "ConfigError: data_efficiency.data_sampling" in rank["log"]
        assert "lookahead" in rank["log"].splitlines()[-1]
