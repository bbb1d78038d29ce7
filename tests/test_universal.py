"""Elastic resume through the `deepspeed` launcher: two ranks are killed, then one, and three go on."""

import json
import signal

import pytest
import torch
from launched import tiny
from launching import LAUNCHED, launch

from al_deepspeed.telemetry import read_telemetry

pytestmark = pytest.mark.timeout(900)  # the first test waits for three launches
STAGES = (1, 2, 3)
LIVES = {1: (2, 2), 2: (1, 3), 3: (3, 1)}  # R and G of each


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    """The folder of a run at each ZeRO stage that was killed twice within an epoch."""
    out = tmp_path_factory.mktemp("elastic")
    for life, (ranks, accumulation) in LIVES.items():
        script = (LAUNCHED / "elastic.py", str(out), "--life", str(life), "--accumulation", str(accumulation))
        script += ("--last",) if life == 3 else ()
        with launch(*script, ranks=ranks, folder=out / f"launch{life}", time_limit_s=300) as run:
            if life == 3:
                run.wait()
                continue
            run.wait_for_line("ZeRO-3 is past its checkpoint")
            for process in run.rank_processes().values():
                process.send_signal(signal.SIGKILL)
            assert run.wait(expect=None) != 0
    return out


def records(out, stage, life) -> list[dict]:
    """Steps of all ranks that count: two of a killed life, all of the last."""
    lines = []
    for rank in range(LIVES[life][0]):
        own = [json.loads(line) for line in (out / f"zero{stage}/ids_life{life}_rank{rank}.jsonl").open()]
        assert len(own) > 2 or life == 3  # it was past its checkpoint when it was killed
        lines += own if life == 3 else own[:2]
    return lines


@pytest.mark.parametrize("stage", STAGES)
def test_every_sample_once_over_three_lives_of_an_epoch(lives, stage):
    lines = [line for life in LIVES for line in records(lives, stage, life)]
    assert sorted(row for line in lines for row in line["ids"]) == list(range(len(tiny.ROWS)))
    assert sorted({line["step"] for line in lines if line["life"] < 3}) == [1, 2, 3, 4]
    assert min(line["step"] for line in lines if line["life"] == 3) == 5
    telemetry = read_telemetry(lives / f"zero{stage}")
    assert telemetry[-1]["samples_total"] == len(tiny.ROWS)
    assert {line["epoch"] for line in telemetry} == {0}
    shapes = [(len(line["batch_size"][0]), len(line["batch_size"])) for line in telemetry]
    assert shapes[:4] == [LIVES[1]] * 2 + [LIVES[2]] * 2 and set(shapes[4:]) == {LIVES[3]}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("life", [2, 3])
def test_the_optimizer_goes_on_from_the_very_bits_that_were_saved(lives, stage, life):
    saved = torch.load(lives / f"zero{stage}_saved{life - 1}.pt")
    loaded = torch.load(lives / f"zero{stage}_loaded{life}.pt")
    assert saved.keys() == loaded.keys()
    for name, value in saved.items():
        assert torch.equal(value, loaded[name]), name
    assert saved["first.weight.exp_avg_sq"].max() > 0
    assert saved["step"].tolist() == [2.0 * (life - 1)]  # Adam's own count is that of the run
    assert saved["group 0"][1] != saved["group 1"][1]  # weight decay
    # What no optimizer holds: each life builds the model with its own number in buffer and frozen layer.
    assert saved["count"] == 1 and (saved["frozen.weight"] == 1).all()


@pytest.mark.parametrize("life", [2, 3])
def test_the_conversion_says_so_once_and_leaves_nothing(lives, life):
    log = "".join(path.read_text() for path in (lives / f"launch{life}/ranks").glob("*.log"))
    size, before = LIVES[life][0], LIVES[life - 1][0]
    assert log.count(f"was saved with data-parallel size {before} and is loaded with {size}") == len(STAGES)
    for stage in STAGES:
        folders = {path.name for path in (lives / f"zero{stage}").iterdir() if path.is_dir()}
        assert folders == {"global_step2", "global_step4"}


def test_what_cannot_be_converted_is_refused_on_every_rank_alike(lives):
    refusals = {(lives / f"refused_rank{rank}.txt").read_text() for rank in range(LIVES[3][0])}
    assert len(refusals) == 1
    refusal = refusals.pop()
    assert "another data-parallel size" in refusal and "there is no exp_avg in it" in refusal
    assert not any((lives / "sgd").glob(".universal*"))
