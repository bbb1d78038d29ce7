"""The engine through the real `deepspeed` launcher: exact gradients, restored positions, refusals, hangs."""

import json

import pytest
import torch
from launched import tiny
from launching import LAUNCHED, launch

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def exact_run(tmp_path_factory):
    """Five steps at each ZeRO stage on two ranks: the folder that exactness.py filled."""
    out = tmp_path_factory.mktemp("exactness")
    with launch(LAUNCHED / "exactness.py", str(out), folder=out / "launch", time_limit_s=240) as run:
        run.wait()
    return out


def ran(out, stage) -> list[list[dict]]:
    """What each rank ran, [rank][micro-step]."""
    return [json.loads((out / f"ran{stage}_rank{rank}.json").read_text()) for rank in (0, 1)]


def reference_parameters(steps: list[list[int]]) -> tuple[dict, list[float]]:
    """Plain SGD in one process: each step's gradient is the mean over the step's samples."""
    model, data = tiny.wan_model(), tiny.NumberDataset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for rows in steps:
        optimizer.zero_grad()
        total = 0.0
        for row in rows:
            batch = torch.utils.data.default_collate([data[row]])
            loss = tiny.sample_losses(model, batch).sum() / len(rows)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return dict(model.named_parameters()), losses


def test_five_steps_equal_one_process_at_every_stage(exact_run):
    ranks = ran(exact_run, 0)
    steps = [
        [row for rank in ranks for batch in rank[first : first + 2] for row in batch["sample_ids"]]
        for first in range(0, 10, 2)
    ]
    assert sorted(row for rows in steps for row in rows) == list(range(len(tiny.ROWS)))
    shapes_differ = [own["shape"] != other["shape"] for own, other in zip(*ranks, strict=True)]
    sizes_differ = [
        len(own["sample_ids"]) != len(other["sample_ids"]) for own, other in zip(*ranks, strict=True)
    ]
    assert any(shapes_differ) and any(sizes_differ)

    expected, losses = reference_parameters(steps)
    before = dict(tiny.wan_model().named_parameters())
    assert max((expected[name] - before[name]).abs().max() for name in expected) > 1e-3  # it did learn
    for stage in STAGES:
        assert ran(exact_run, stage) == ranks
        trained = torch.load(exact_run / f"parameters{stage}.pt")
        assert trained.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-6, msg=f"ZeRO-{stage}: {name}")
        lines = [json.loads(line) for line in (exact_run / f"stage{stage}/telemetry.jsonl").open()]
        assert [line["loss"] for line in lines] == pytest.approx(losses, abs=1e-5)
