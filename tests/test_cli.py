"""What `al-deepspeed` answers with when it was asked wrongly: a sentence and exit code 2, no traceback."""

import pytest

from al_deepspeed import cli

PLAN = ("plan", "--manifest", "sizes.csv", "--max-tokens", "2000")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "sizes.csv").write_text("latent_frames,latent_height,latent_width\n" + "1,32,32\n" * 9)
    (tmp_path / "taken").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["al-deepspeed", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code or 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--dump", "taken"), "taken"),
        (("--dump", "sizes.csv/plan.parquet"), "sizes.csv"),
        (("--plot", "plan.docx"), ".png"),
        (("--manifest", "absent.csv"), "absent.csv"),
        (("--max-tokens", "0"), "max_tokens is 0"),
        (("--exponent", "0"), "--exponent is 0"),
        (("--seed", "-1"), "--seed"),
        (("--stratgey", "balanced"), "--stratgey"),
    ],
)
def test_bad_usage_is_named_and_exits_with_2(monkeypatch, capsys, words, named):
    assert ask(monkeypatch, *PLAN, *words) == 2
    said = capsys.readouterr()
    assert named in said.err and "Traceback" not in said.err
    assert said.out == ""


def test_what_works_exits_with_0_and_leaves_whole_files_alone(monkeypatch, folder):
    assert ask(monkeypatch, *PLAN, "--dump", "new/plan.parquet", "--plot", "new/plan.png") == 0
    assert sorted(path.name for path in (folder / "new").iterdir()) == ["plan.parquet", "plan.png"]
