"""`al-deepspeed plan`: figures, tables, dump and plot of a user's own table of sizes."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from corpora import MIX, WAN
from typer.testing import CliRunner

from al_deepspeed.calibration import file as calibration_file
from al_deepspeed.cli import app
from al_deepspeed.errors import CorpusError, PlanError
from al_deepspeed.scheduling.cost import RooflineCost

KEYS = [
    "strategy", "mixing", "world_size", "accumulation", "efficiency", "imbalance", "tokens_per_s",
    "memory_share", "peak_memory_share", "micro_batches", "splits", "fillers", "dropped", "step_token_cv",
    "step_sample_cv", "steps_without_image", "kind_weight",
]  # fmt: skip


@pytest.fixture
def manifest(tmp_path):
    drawn = np.random.default_rng(0).choice(len(MIX), 600)
    rows = "\n".join(",".join(map(str, MIX[row][:3])) for row in drawn)
    path = tmp_path / "sizes.csv"
    path.write_text(f"latent_frames,latent_height,latent_width\n{rows}\n")
    return path


def plan(*arguments):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_json_has_exactly_the_documented_keys(manifest):
    result = plan("--manifest", manifest, "--max-tokens", 166_320, "--world-size", 4, "--json")
    figures = json.loads(result.stdout)
    assert list(figures) == KEYS
    assert (figures["strategy"], figures["mixing"], figures["world_size"]) == ("balanced", "corpus", 4)
    assert sum(figures["kind_weight"].values()) == pytest.approx(1)


def test_compare_lists_every_strategy(manifest):
    result = plan("--manifest", manifest, "--max-tokens", 166_320, "--world-size", 4, "--compare", "--json")
    rows = json.loads(result.stdout)["strategies"]
    assert [row["strategy"] for row in rows] == ["equal_token", "dual_constraint", "balanced"]
    assert all(list(row) == KEYS for row in rows)
    assert rows[2]["efficiency"] > rows[0]["efficiency"]


def test_the_bucket_table_names_batch_size_and_binding_limit(tmp_path):
    path = tmp_path / "three.csv"
    path.write_text("latent_frames,latent_height,latent_width\n1,32,32\n1,32,32\n21,60,104\n")
    lines = plan("--manifest", path, "--max-tokens", 40_000, "--max-cost", 1.1e9).stdout.splitlines()
    row = next(line for line in lines if "21x60x104" in line)
    cells = [part.strip() for part in row.strip("│ ").split("│")]
    assert cells[:5] == ["video", "21x60x104", "32760", "1", "1"]
    assert "both" in row
    assert any("efficiency" in line for line in lines)


def test_the_dump_says_it_all_again(manifest, tmp_path):
    dump = tmp_path / "plan.parquet"
    arguments = ["--manifest", manifest, "--max-tokens", 166_320, "--world-size", 3, "--accumulation", 2]
    figures = json.loads(plan(*arguments, "--json", "--dump", dump).stdout)
    table = pq.read_table(dump)
    assert table.column_names == [
        "step", "micro_step", "rank", "batch_size", "tokens", "cost_ms", "loss_weight", "sample_ids",
    ]  # fmt: skip
    columns = {name: table[name].to_numpy() for name in table.column_names[:-1]}
    ids = table["sample_ids"].to_pylist()
    assert [len(batch) for batch in ids] == columns["batch_size"].tolist()
    real = columns["loss_weight"] > 0
    assert sorted(sum((ids[row] for row in np.flatnonzero(real)), [])) == list(range(600))  # noqa: RUF017
    assert (columns["step"] == columns["micro_step"] // 2).all()
    cost = columns["cost_ms"].reshape(-1, 3)
    assert figures["efficiency"] == pytest.approx(cost.mean(axis=1).sum() / cost.max(axis=1).sum())
    for step in range(columns["step"].max() + 1):
        assert columns["loss_weight"][columns["step"] == step].sum() == pytest.approx(6)


def test_the_plot_is_a_picture(manifest, tmp_path):
    picture = tmp_path / "costs.png"
    plan("--manifest", manifest, "--max-tokens", 166_320, "--world-size", 4, "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("option", "name"), [("--dump", "plan.parquet"), ("--plot", "costs.png")])
def test_outputs_make_their_folder(manifest, tmp_path, option, name):
    output = tmp_path / "runs" / "first" / name
    plan("--manifest", manifest, "--max-tokens", 166_320, "--json", option, output)
    assert output.is_file()


@pytest.mark.parametrize("mixing", ["corpus", "free"])
def test_a_rounded_floor_above_all_costs_is_no_hindrance(tmp_path, monkeypatch, mixing):
    class Found:
        cost = RooflineCost(
            intercept=3.2, text=0.2, linear=0.005, quadratic=3e-7, floor=170.0, sharpness=23.1
        )
        max_tokens = max_cost = exponent = step_ms = None

    monkeypatch.setattr(calibration_file, "read_calibration", lambda path: Found)
    path = tmp_path / "one.csv"
    path.write_text("latent_frames,latent_height,latent_width\n" + "1,32,32\n" * 100)  # S = 256: 4.7 ms alone
    arguments = ["--manifest", path, "--calibration", "c.json", "--max-tokens", 512, "--world-size", 2]
    figures = json.loads(plan(*arguments, "--mixing", mixing, "--json").stdout)
    assert (figures["micro_batches"], figures["efficiency"]) == (50, 1.0)  # of two samples, 170 ms each


def test_the_same_seed_is_the_same_plan_and_another_is_not(manifest, tmp_path):
    dumps = []
    for seed in (1, 1, 2):
        dump = tmp_path / f"{len(dumps)}.parquet"
        plan("--manifest", manifest, "--max-tokens", 166_320, "--seed", seed, "--dump", dump, "--json")
        dumps.append(pq.read_table(dump)["sample_ids"].to_pylist())
    assert dumps[0] == dumps[1] != dumps[2]


def test_a_calibration_gives_cost_and_limits_and_the_command_line_overrules_them(
    manifest, tmp_path, monkeypatch
):
    class Found:
        cost, max_tokens, max_cost, exponent, step_ms = WAN, None, 2100.0, 1.9, 30.0

    monkeypatch.setattr(calibration_file, "read_calibration", lambda path: Found)
    arguments = ["--manifest", manifest, "--calibration", "calibration.json", "--world-size", 4, "--json"]
    with pytest.raises(PlanError, match=r"calibration\.json knows no memory capacity"):
        plan(*arguments)
    by_file = json.loads(plan(*arguments, "--max-tokens", 166_320, "--strategy", "dual_constraint").stdout)
    paper = json.loads(
        plan(
            *arguments,
            *("--max-tokens", 166_320, "--strategy", "dual_constraint"),
            *("--max-cost", 75600.0**2, "--exponent", 2),
        ).stdout
    )
    assert by_file["tokens_per_s"] > 1000  # real milliseconds
    assert paper["micro_batches"] != by_file["micro_batches"]


def test_missing_limits_and_manifests_are_errors_to_act_on(manifest, tmp_path):
    with pytest.raises(PlanError, match=r"--max-tokens is missing\. No calibration is given"):
        plan("--manifest", manifest)
    with pytest.raises(PlanError, match="strategy is 'fast'; allowed are"):
        plan("--manifest", manifest, "--max-tokens", 1000, "--strategy", "fast")
    with pytest.raises(CorpusError):
        plan("--manifest", tmp_path / "none.csv", "--max-tokens", 1000)
    with pytest.raises(PlanError, match=r"the dump is to be plan\.csv; its name must end in \.parquet"):
        plan("--manifest", manifest, "--max-tokens", 166_320, "--dump", "plan.csv")


def test_a_budget_that_long_samples_overrun_is_a_warning_with_what_would_do(tmp_path):
    path = tmp_path / "two.csv"  # S = 256 and 1024: B * S^2 of one alone is 65,536 and 1,048,576
    path.write_text("latent_frames,latent_height,latent_width\n1,32,32\n1,64,64\n1,32,32\n")
    arguments = ["--manifest", path, "--max-tokens", 4096, "--json"]
    said = plan(*arguments, "--max-cost", 70_000).stderr
    assert "1 of 3 samples cost more alone" in said and "Give at least 1048576, or leave" in said
    for quiet in (["--max-cost", 1_048_576], [], ["--max-cost", 70_000, "--strategy", "equal_token"]):
        assert "cost more alone" not in plan(*arguments, *quiet).stderr
    with pytest.raises(PlanError, match="max_cost is inf; it must be a finite number"):
        plan(*arguments, "--max-cost", "inf")


def test_free_mixing_says_what_it_gives_up(manifest):
    result = plan("--manifest", manifest, "--max-tokens", 166_320, "--mixing", "free", "--json")
    assert 'mixing is "free"' in result.stderr
    assert json.loads(result.stdout)["mixing"] == "free"
