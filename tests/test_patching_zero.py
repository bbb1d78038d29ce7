"""Affine norms in rewritten code at ZeRO-3, whose hooks gather weight and bias around each norm's forward."""

import json

import pytest
from launching import LAUNCHED, launch

MODES = ("eager", "checkpointed", "compiled")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("patched_norms")
    with launch(LAUNCHED / "patched_norms.py", str(folder), folder=folder, time_limit_s=280) as run:
        run.wait()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_all_sites_of_the_block_are_rewritten(ranks):
    assert ranks[0]["sites"] == ["adaln", "residual_adaln", "residual_adaln", "gated_residual"]


@pytest.mark.parametrize("mode", MODES)
def test_two_steps_leave_the_same_parameters(ranks, mode):
    blocks = 1 if mode == "compiled" else 2
    for rank in ranks:
        result = rank[mode]
        assert result["parameters"] == 9 * blocks  # of two affine norms, two layers, and a table
        assert result["prepared"] == 2 * blocks  # the affine norms, and no other module
        assert max(result["errors"].values()) < 1e-5, result["errors"]
