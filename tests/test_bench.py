"""al-deepspeed bench: what it says without a GPU, and the arithmetic of its tables and picture."""

import io

import pytest
import torch
from rich.console import Console

from al_deepspeed import cli
from al_deepspeed.ops.benchmark import Scenario
from al_deepspeed.ops.benchmark_report import plot_roofline, print_tables


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a CUDA device")
@pytest.mark.parametrize("target, said", [("adaln", "CUDA device"), ("matmul", "'matmul'; allowed: adaln")])
def test_refusals_exit_with_two(monkeypatch, capsys, target, said):
    monkeypatch.setattr("sys.argv", ["al-deepspeed", "bench", target, "--json"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and said in printed.err and printed.out == ""


def test_fewest_bytes():
    # 8 rows of 16 bf16 values are 256 bytes: read x, write y; backward reads x, dy and writes dx.
    assert [Scenario("adaln", 8, 16).fewest_bytes(backward) for backward in (False, True)] == [512, 768]
    assert [Scenario("residual_adaln", 8, 16).fewest_bytes(b) for b in (False, True)] == [1024, 1536]
    # A modulation row a token: two fp32 rows of 64 bytes are read; backward reads one and writes two.
    token = Scenario("adaln", 8, 16, groups=4, modulation="token")
    assert token.fewest_bytes(False) == 512 + 8 * 2 * 64
    assert token.fewest_bytes(True) == 768 + 8 * 3 * 64


def test_tables_and_picture(tmp_path):
    shape = {"op": "adaln", "rows": 65536, "features": 1536, "groups": 1, "modulation": "sample"}
    times = {"fused one_pass": 100.0, "torch.compile": 170.0, "eager wan": 1500.0}
    result = {
        "device": "a device",
        "torch": "2.11",
        "cuda": "13.0",
        "build_or_load_s": 40.0,
        "copy_tb_per_s": 4.2,
        "empty_launch_us": 2.5,
        "results": [
            {**shape, "implementation": name, "direction": direction, "us": us, "fewest_bytes": 4e8}
            | {"fraction_of_copy": 4e8 / us / 4.2e6}
            for name, us in times.items()
            for direction in ("forward", "backward")
        ],
        "memory": [
            {**shape, "implementation": "fused one_pass"} | {"saved_bytes_per_row": 8.0, "peak_bytes": 6e8}
        ],
        "host": {"fused": {"forward": 12.0, "backward": 30.0}},
        "skipped": [],
    }
    text = io.StringIO()
    print_tables(result, Console(file=text, width=200))
    assert "1.70x" in text.getvalue() and "15.00x" in text.getvalue() and "100 us 0.95" in text.getvalue()
    plot_roofline(result, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
