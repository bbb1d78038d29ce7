"""`al-deepspeed report` on hand-written telemetry, against figures worked out by hand."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from al_deepspeed import run_figures
from al_deepspeed.cli import app
from al_deepspeed.errors import AdaptiveLoadError

# Two ranks, two micro-steps a step; the last micro-batch of step 3 is a filler.
#   S and B, [micro_step][rank]       predicted cost
#   step 1   100x2, 100x1 | 400x1, 100x4     2, 1 | 6, 4
#   step 2   100x2, 400x1 | 400x1, 400x1     2, 6 | 6, 6
#   step 3   100x1, 100x1 | 400x1, 100x1     1, 1 | 6, 1
STEPS = [
    {
        "kind": [["image", "image"], ["video", "image"]],
        "shape": [["1x20x20", "1x20x20"], ["4x20x20", "1x20x20"]],
        "sequence_length": [[100, 100], [400, 100]],
        "batch_size": [[2, 1], [1, 4]],
        "predicted_cost": [[2, 1], [6, 4]],
        "loss_weight": [[1, 0.5], [0.5, 2]],
        "samples": 8,
        "tokens": 1100,
        "fillers": 0,
        "step_ms": [9000, 9500],
        "measured_ms": [[3000, 3000], [5000, 5000]],
        "wait_ms": [[0, 0], [0, 0]],
        "peak_memory_bytes": [1_000_000_000, 1_200_000_000],
        "loss": 2.0,
    },
    {
        "kind": [["image", "video"], ["video", "video"]],
        "shape": [["1x20x20", "4x20x20"], ["4x20x20", "4x20x20"]],
        "sequence_length": [[100, 400], [400, 400]],
        "batch_size": [[2, 1], [1, 1]],
        "predicted_cost": [[2, 6], [6, 6]],
        "loss_weight": [[1.6, 0.8], [0.8, 0.8]],
        "samples": 5,
        "tokens": 1400,
        "fillers": 0,
        "step_ms": [400, 390],
        "measured_ms": [[190, 190], [190, 190]],
        "wait_ms": [[10, 20], [0, 4]],
        "peak_memory_bytes": [2_000_000_000, 1_500_000_000],
        "loss": 1.5,
    },
    {
        "kind": [["image", "image"], ["video", "image"]],
        "shape": [["1x20x20", "1x20x20"], ["4x20x20", "1x20x20"]],
        "sequence_length": [[100, 100], [400, 100]],
        "batch_size": [[1, 1], [1, 1]],
        "predicted_cost": [[1, 1], [6, 1]],
        "loss_weight": [[1.33, 1.33], [1.33, 0]],
        "samples": 3,
        "tokens": 600,
        "fillers": 1,
        "step_ms": [590, 600],
        "measured_ms": [[40, 40], [190, 190]],
        "wait_ms": [[0, 0], [1, 0]],
        "peak_memory_bytes": [1_000_000_000, 1_000_000_000],
        "loss": 1.0,
    },
]


def write_run(folder, steps=STEPS):
    folder.mkdir(parents=True)
    lines = []
    for number, step in enumerate(steps, 1):
        reserved = [2 * value for value in step["peak_memory_bytes"]]
        lines.append({"step": number, "epoch": 0, "peak_reserved_bytes": reserved, **step})
    (folder / "telemetry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    validation = [
        {"step": 2 * i, "loss": {"image": 9.0, "all": loss}} for i, loss in enumerate([2.0, 1.6, 1.2, 1.0])
    ]
    (folder / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in validation))
    return folder


def test_figures_of_a_hand_written_run(tmp_path):
    result = run_figures.figures(write_run(tmp_path / "run"))
    measured = result["measured"]
    counts = {key: measured[key] for key in ("steps", "micro_steps", "ranks", "samples", "tokens", "fillers")}
    assert counts == {"steps": 3, "micro_steps": 6, "ranks": 2, "samples": 16, "tokens": 3100, "fillers": 1}
    # Without the first step: 400 ms and 600 ms, 2000 tokens, 8 samples, 20 + 4 + 1 ms of waiting.
    assert measured["seconds"] == pytest.approx(1.0)
    assert measured["step_seconds"] == pytest.approx(0.5)
    assert measured["tokens_per_second"] == pytest.approx(2000)
    assert measured["samples_per_second"] == pytest.approx(8)
    assert measured["waiting_for_data"] == pytest.approx(0.025)
    assert measured["peak_memory_bytes"] == 2_000_000_000
    assert measured["peak_reserved_bytes"] == 4_000_000_000
    assert measured["training_loss"] == [2.0, 1.0]
    assert measured["validation_loss"] == [2.0, 1.0]
    # Means 1.5, 5, 4, 6, 1, 3.5 over maxima 2, 6, 6, 6, 1, 6: 21 / 27.
    assert result["predicted"]["efficiency"] == pytest.approx(21 / 27)
    # |a - b| / (a + b): 1/3, 2/10, 4/8, 0, 0, 5/7.
    assert result["predicted"]["imbalance"] == pytest.approx((1 / 3 + 1 / 5 + 1 / 2 + 5 / 7) / 6)


def test_batches_a_shape(tmp_path):
    image, video = run_figures.figures(write_run(tmp_path / "run"))["shapes"]
    # Images: B = 2, 1, 4, 2, 1, 1 and a filler of 1, which repeats a sample and so counts none.
    assert image == {
        "kind": "image",
        "shape": "1x20x20",
        "tokens": 100,
        "micro_batches": 7,
        "samples": 11,
        "fillers": 1,
        "batch_size": [1, 4],
    }
    assert (video["micro_batches"], video["samples"], video["batch_size"]) == (5, 5, [1, 1])


def test_work_is_recovered_from_times_that_show_the_slowest_rank_only():
    # True work: 30 + 0.1 B S + 0.0005 B S^2 ms. The clock shows the larger of two ranks.
    batch_size = [np.array(pair, float) for pair in [(8, 1), (1, 2), (4, 1), (2, 6), (1, 1), (3, 1), (16, 1)]]
    tokens = [
        np.array(pair, float)
        for pair in [(64, 512), (900, 64), (256, 64), (64, 128), (64, 900), (512, 64), (64, 64)]
    ]
    true = [30 + 0.1 * b * s + 0.0005 * b * s**2 for b, s in zip(batch_size, tokens, strict=True)]
    work, error = run_figures.fit_work(batch_size, tokens, np.array([row.max() for row in true]))
    assert error < 1e-9
    for fitted, expected in zip(work, true, strict=True):
        assert fitted == pytest.approx(expected)
    assert run_figures.efficiency(work) == pytest.approx(run_figures.efficiency(true))


def test_too_few_shapes_give_no_measured_balance(tmp_path):
    measured = run_figures.figures(write_run(tmp_path / "run", STEPS[:1]))["measured"]
    assert measured["efficiency"] is None and measured["imbalance"] is None


def test_one_json_object_with_every_figure_under_measured_or_predicted(tmp_path):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", STEPS[:2])
    result = CliRunner().invoke(app, ["report", str(first), str(second), "--json"])
    assert result.exit_code == 0
    runs = json.loads(result.stdout)["runs"]
    assert [run["measured"]["steps"] for run in runs] == [3, 2]
    assert set(runs[0]) == {"run", "measured", "predicted", "shapes"}


def test_runs_stand_side_by_side_with_the_source_of_each_figure(tmp_path):
    first, second = write_run(tmp_path / "equal_token"), write_run(tmp_path / "dual_constraint", STEPS[:2])
    picture = tmp_path / "pictures" / "runs.png"
    result = CliRunner().invoke(app, ["report", str(first), str(second), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    table = {}
    for line in result.stdout.splitlines():
        cells = [cell.strip() for cell in line.strip("│┃ ").replace("┃", "│").split("│")]
        table[tuple(cells[:2])] = cells[2:]
    assert table["tokens/s", "measured"] == ["2,000", "3,500"]
    assert table["efficiency", "predicted"] == ["77.8%", "82.5%"]  # 21 / 27, and 16.5 / 20
    assert table["samples", "measured"] == ["16", "13"]
    assert table["fixed-noise validation loss, likewise", "measured"][0] == "2.0000 to 1.0000 (-50.0%)"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(AdaptiveLoadError, match=r"holds no telemetry\.jsonl"):
        run_figures.figures(tmp_path)
    (tmp_path / "telemetry.jsonl").write_text('{"step": 1, "ba')
    with pytest.raises(AdaptiveLoadError, match="no complete step"):
        run_figures.figures(tmp_path)
