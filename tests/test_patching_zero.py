"""Rewritten code at ZeRO-3, which gathers the parameters of a norm around its forward. One launch for all."""

import json

import pytest
from launching import LAUNCHED, launch

MODES = ("eager", "checkpointed", "compiled")


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> tuple[list[dict], str]:
    """What each rank wrote, and the log of the first."""
    folder = tmp_path_factory.mktemp("patched")
    with launch(LAUNCHED / "patched.py", str(folder), folder=folder, time_limit_s=320) as run:
        run.wait()
        log = run.rank_log(0)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)], log


def test_all_sites_of_the_block_are_rewritten(launched):
    sites = launched[0][0]["norms"]["sites"]
    assert sites == ["adaln", "residual_adaln", "residual_adaln", "gated_residual"]


@pytest.mark.parametrize("mode", MODES)
def test_two_steps_leave_the_same_parameters(launched, mode):
    blocks = 1 if mode == "compiled" else 2
    for rank in launched[0]:
        result = rank["norms"][mode]
        assert result["parameters"] == 9 * blocks  # of two affine norms, two layers, and a table
        assert result["prepared"] == 2 * blocks  # the affine norms, and no other module
        assert max(result["errors"].values()) < 1e-5, result["errors"]


def test_the_engine_patches_and_a_wrong_rank_stops_all(launched):
    ranks, log = launched
    assert "fused AdaLN at 5 sites" in log and "equals the original code at 5 sites" in log
    for seen in ranks:
        assert "comes too late: a DeepSpeed engine has its hooks on the model already" in seen["too late"]
        assert seen["functions"] == 2  # forward of the block and of the model
        assert seen["patched"] == pytest.approx(seen["off"], rel=1e-5)
        assert seen["off"][0] - seen["off"][2] > 1e-3  # it learns, so gradients are in the losses
        assert "rank 1: the fused op differs" in seen["refused"]
        assert "transformer_wan.py:" in seen["refused"] and "gradient of gate differs by" in seen["refused"]
