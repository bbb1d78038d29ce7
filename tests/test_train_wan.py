"""launch/train_wan.py on one node and on two emulated ones: what a run leaves, precision, refusals."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from launching import EXTENSIONS, free_port, launch
from multinode import stand_in_for_pdsh, start
from training_runs import (
    BATCHING,
    REPOSITORY,
    STEPS,
    TRAINER,
    largest_difference,
    trainer_arguments,
    unbroken_run,
    what_was_trained,
)

from al_deepspeed.data.files import write_whole
from al_deepspeed.errors import ConfigError
from al_deepspeed.telemetry import FILE_NAME, read_telemetry
from al_deepspeed.training.checkpoints import latest
from al_deepspeed.training.options import changed_config
from al_deepspeed.training.validation import read_validation


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.getbasetemp()


def test_a_run_leaves_its_record_its_checkpoints_and_a_diffusers_model(base):
    run = unbroken_run(base)
    lines = read_telemetry(run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    # Wherever an epoch ends, each of its 24 samples has been seen once.
    ends = [line["samples_total"] for line, after in pairwise(lines) if after["epoch"] != line["epoch"]]
    assert ends and ends == [24 * (number + 1) for number in range(len(ends))]
    assert all(line["loss"] > 0 for line in lines)
    records = read_validation(run)
    assert [record["step"] for record in records] == [0, 4, 8, 12]
    assert set(records[0]["loss"]) == {"image 1x4x4", "image 1x8x8", "video 3x4x6", "video 5x8x8", "all"}
    assert records[-1]["loss"]["all"] < records[0]["loss"]["all"]
    assert latest(run / "checkpoints") == "step_12"
    folders = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    assert folders == ["step_10", "step_12"]  # --keep 2
    model = WanTransformer3DModel.from_pretrained(run / "model")
    assert model.config.in_channels == 4 and model.dtype == torch.float32
    used = json.loads((run / "ds_config.json").read_text())
    assert used["gradient_accumulation_steps"] == 2 and "torch_autocast" not in used


def test_pretrained_weights_under_zero_3_autocast_checkpointing_and_fused_adaln(base, tmp_path):
    # At a learning rate of 0 what is exported must be what was read, parameter for parameter.
    arguments = trainer_arguments(
        tmp_path / "run",
        base,
        **{
            "optimizer.params.lr": 0,
            "optimizer.params.weight_decay": 0,
            "scheduler.params.warmup_min_lr": 0,
            "scheduler.params.warmup_max_lr": 0,
            "fused_adaln.enabled": "true",
        },
    )
    arguments += ["--precision", "config", "--gradient-checkpointing", "--max-steps", "1"]
    arguments += ["--pretrained", str(unbroken_run(base) / "model")]
    with launch(TRAINER, *arguments, folder=tmp_path, time_limit_s=270) as launched:
        launched.wait()
        log = launched.rank_log(0)
        assert "fused AdaLN at 5 sites" in log  # 4 of WanTransformerBlock, 1 of the model itself
        assert "fused AdaLN equals the original code at 5 sites" in log
    assert largest_difference(unbroken_run(base), tmp_path / "run") == 0
    assert "torch_autocast" in json.loads((tmp_path / "run" / "ds_config.json").read_text())


def test_two_nodes_stopped_and_resumed_train_what_one_node_trains(base, tmp_path):
    run = tmp_path / "run"
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    arguments = trainer_arguments(run, base)
    port = free_port()

    # One launcher a node, without ssh; one node's script is told to stop after some steps.
    with (
        start(tmp_path / "node0", port, hostfile, arguments, NODE_RANK="0") as first,
        start(tmp_path / "node1", port, hostfile, arguments, NODE_RANK="1") as second,
    ):
        while not (run / FILE_NAME).exists() or len(read_telemetry(run)) < 2:
            assert first.process.poll() is None and second.process.poll() is None, (
                first.logs() + second.logs()
            )
            assert time.monotonic() < first.deadline, first.logs() + second.logs()
            time.sleep(0.1)
        second.process.send_signal(signal.SIGTERM)
        first.wait(expect=0)  # its rank left the loop as agreed
        second.wait(expect=None)  # the launcher that was signalled exits with 1
    stopped_at = len(read_telemetry(run))
    assert 2 <= stopped_at < 12
    assert latest(run / "checkpoints") == f"step_{stopped_at}"
    assert not (run / "model").exists()

    # Resumed over pdsh: one script starts both nodes.
    stand_in_for_pdsh(tmp_path / "bin")
    with start(tmp_path / "pdsh", free_port(), hostfile, [*arguments, "--resume"]) as both:
        both.wait()
    assert what_was_trained(run) == what_was_trained(unbroken_run(base))
    assert largest_difference(run, unbroken_run(base)) < 1e-7


REFUSED = """
import json, sys
from launch.train_wan import main

for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as stop:
        print("exit", stop.code, file=sys.stderr)
"""


def test_what_cannot_be_trained_is_refused_before_training(base):
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment["TORCH_EXTENSIONS_DIR"] = str(EXTENSIONS)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    a_run_again = trainer_arguments(unbroken_run(base), base)
    no_tokens = [*a_run_again, "--set", f"{BATCHING}.max_tokens=0"]
    result = subprocess.run(
        [sys.executable, "-c", REFUSED, json.dumps([a_run_again, no_tokens])],
        cwd=REPOSITORY,
        env={**os.environ, **environment, "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )
    first, second, _ = result.stderr.split("exit 2\n")
    assert "holds a run. Give --resume" in first and "max_tokens is 0" in second
    assert "Traceback" not in result.stderr


def test_changes_of_the_config_reach_the_key_that_they_name():
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    changed = changed_config(config, ["zero_optimization.stage=2", "a.b=[1, 2]", "name=left"], "config")
    assert changed == {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "a": {"b": [1, 2]},
        "name": "left",
    }
    assert "bf16" not in changed_config(config, [], "fp32")
    assert config["zero_optimization"]["stage"] == 3
    for wrong in ("zero_optimization", "bf16.enabled.deep=1"):
        with pytest.raises(ConfigError, match="--set"):
            changed_config(config, [wrong], "config")


def test_latest_is_replaced_whole(tmp_path):
    write_whole(tmp_path / "latest", "step_1")
    write_whole(tmp_path / "latest", "step_2")
    assert latest(tmp_path) == "step_2"
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    assert latest(tmp_path / "nowhere") is None
