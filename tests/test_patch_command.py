"""`al-deepspeed patch` on a user's tree: what it says, its exit codes, and JSON alone on standard output."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from al_deepspeed import cli
from al_deepspeed.patching import probing
from al_deepspeed.patching.recipes import load_recipes

MODEL = """import torch
from torch import nn


class WanNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.float()).type_as(x)


class Block(nn.Module):
    def __init__(self, dim, affine=True, eps=1e-6):
        super().__init__()
        inner = dim * 1
        self.norm1 = WanNorm(inner, eps, elementwise_affine=False)
        self.norm2 = WanNorm(inner, eps) if affine else nn.Identity()
        self.mlp = nn.Linear(inner, inner)

    def forward(self, x, e):
        shift, scale, gate = e.chunk(3, dim=1)
        x = x + gate * self.mlp(self.norm1(x) * (1 + scale) + shift)
        return x + self.mlp(self.norm2(x))
"""


@pytest.fixture(autouse=True)
def tree(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/model_of_mine.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine"


def ask(monkeypatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["al-deepspeed", "patch", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code or 0


def test_from_check_to_revert(tree, monkeypatch, capsys):
    before = (tree / "model_of_mine.py").read_bytes()
    assert ask(monkeypatch, "check", tree) == 0
    said = capsys.readouterr().out
    assert "20  Block.forward  adaln:" in said and "21  Block.forward  residual_adaln:" in said
    assert ask(monkeypatch, "diff", tree) == 0
    assert "-        return x + self.mlp(self.norm2(x))" in capsys.readouterr().out
    assert (tree / "model_of_mine.py").read_bytes() == before
    assert ask(monkeypatch, "apply", tree) == 0
    assert "2 sites patched" in capsys.readouterr().out
    assert ask(monkeypatch, "apply", tree) == 0
    assert "0 sites in 0 files to patch, 0 left, 1 patched already" in capsys.readouterr().out
    assert ask(monkeypatch, "revert", tree) == 0
    assert "1 file restored" in capsys.readouterr().out
    assert (tree / "model_of_mine.py").read_bytes() == before
    assert ask(monkeypatch, "revert", tree) == 0
    assert "nothing under" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["check", "diff", "apply", "revert", "verify", "list"])
def test_json_is_one_object_and_alone(tree, monkeypatch, capsys, action):
    assert ask(monkeypatch, action, *([] if action == "list" else [tree]), "--json") == 0
    result = json.loads(capsys.readouterr().out)
    if action == "check":
        (file,) = result["files"]
        assert [(site["line"], site["kind"]) for site in file["sites"]] == [
            (20, "adaln"),
            (21, "residual_adaln"),
        ]
        assert (result["sites"], result["left"], result["unreadable"]) == (2, 0, [])
    if action == "list":
        assert {one["name"] for one in result["targets"]} == {recipe.name for recipe in load_recipes()}


def test_an_edit_after_the_check_is_refused_by_name(tree, monkeypatch, capsys):
    ask(monkeypatch, "check", tree)
    (tree / "model_of_mine.py").write_text(MODEL + "\nEDITED = True\n")
    assert ask(monkeypatch, "apply", tree) == 2
    assert "model_of_mine.py: not as when it was checked; nothing was changed" in capsys.readouterr().err
    assert (tree / "model_of_mine.py").read_text().endswith("EDITED = True\n")


def test_a_broken_file_is_reported_and_the_rest_is_patched(tree, monkeypatch, capsys):
    (tree / "broken.py").write_text("def f(:\n")
    assert ask(monkeypatch, "check", tree) == 0
    assert "broken.py\n  not read: line 1" in capsys.readouterr().out
    assert ask(monkeypatch, "apply", tree) == 0
    assert "broken.py: left, line 1" in capsys.readouterr().out
    assert (tree / "broken.py").read_text() == "def f(:\n"


def test_verify_runs_the_norms_of_the_tree_and_says_what_it_could_not_import(tree, monkeypatch, capsys):
    (tree / "needs_more.py").write_text(
        MODEL.replace("import torch\n", "import torch\nimport not_installed\n")
    )
    assert ask(monkeypatch, "verify", tree) == 0
    said = capsys.readouterr().out
    assert "model_of_mine.py:20 adaln (self.norm1: WanNorm): equal" in said
    assert "model_of_mine.py:21 residual_adaln (self.norm2: WanNorm): equal" in said
    assert "needs_more.py: not imported: ModuleNotFoundError" in said
    assert b"al_deepspeed" not in (tree / "model_of_mine.py").read_bytes()


def test_verify_fails_where_the_op_differs(tree, monkeypatch, capsys):
    from al_deepspeed.patching import runtime

    monkeypatch.setattr(runtime, "_gated_residual", lambda residual, branch, gate, dtype: residual)
    (tree / "gate.py").write_text("def add(x, y, gate):\n    return x + gate * y\n")
    assert ask(monkeypatch, "verify", tree / "gate.py") == 1
    assert "gate.py:2 gated_residual: output 0 differs by" in capsys.readouterr().out


def test_a_target_takes_its_own_files_and_compares_its_sites(tree, monkeypatch, capsys):
    """Half of wan2.1's file, in a checkout that nobody verified."""
    model = tree / "wan/modules/model.py"
    model.parent.mkdir(parents=True)
    model.write_text(MODEL.replace("class Block", "class WanAttentionBlock"))
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    assert ask(monkeypatch, "check", tree, "--target", "wan2.1", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [file["file"] for file in result["files"]] == ["wan/modules/model.py"]
    assert result["target"]["found"] == {"adaln": 1, "residual_adaln": 1}
    assert result["target"]["as_expected"] is None
    assert ask(monkeypatch, "apply", tree, "--target", "wan2.1") == 0
    assert b"al_deepspeed" not in (tree / "model_of_mine.py").read_bytes()
    assert b"al_deepspeed" in model.read_bytes()


def test_a_known_release_with_other_sites_fails_the_check(tree, monkeypatch, capsys):
    site_packages = tree / "site-packages"
    model = site_packages / "diffusers/models/transformers/transformer_wan.py"
    model.parent.mkdir(parents=True)
    model.write_text(MODEL.replace("class Block", "class WanTransformerBlock"))
    (recipe,) = (one for one in load_recipes() if one.name == "diffusers.wan")
    newest = recipe.releases[0]
    (site_packages / f"diffusers-{newest.version}.dist-info").mkdir()
    assert ask(monkeypatch, "check", site_packages / "diffusers", "--target", "diffusers.wan") == 1
    assert f"release {newest.version} was verified with {newest.sites}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("check",), "patch check needs a PATH"),
        (("list", "mine"), "patch list takes no path"),
        (("check", "absent"), "absent does not exist"),
        (("check", "mine", "--target", "diffusers.wann"), "diffusers.wann"),
        (("check", "mine", "--target", "diffusers.wan"), "holds no file of diffusers.wan"),
        (("patch", "mine"), "'patch' is not one of"),
        (("revert", "absent"), "absent does not exist"),
    ],
)
def test_bad_usage_exits_with_2(monkeypatch, capsys, words, named):
    assert ask(monkeypatch, *words) == 2
    said = capsys.readouterr()
    assert named in said.err and "Traceback" not in said.err and said.out == ""


FORWARDS = {
    "a name that the original binds too": "return (self.norm(x.float()) * (1 + scale) + shift).type_as(x)",
    "found through a method": "return self.modulate(self.norm(x), shift, scale)",
}


@pytest.mark.parametrize("case", FORWARDS)
def test_verify_runs_a_site_of_any_names(tmp_path, case):
    (tmp_path / "one").mkdir()
    (tmp_path / "one/model.py").write_text(
        "from torch import nn\n\n\nclass Block(nn.Module):\n"
        "    def __init__(self, dim):\n        super().__init__()\n        self.norm = nn.LayerNorm(dim)\n\n"
        "    def modulate(self, x, shift, scale):\n        return x * (1 + scale) + shift\n\n"
        f"    def forward(self, x, shift, scale):\n        {FORWARDS[case]}\n"
    )
    probed = probing.verify(tmp_path / "one")
    assert [probe.differences for probe in probed.probes] == [()] and probed.failed == ()


def test_a_file_whose_name_is_no_text_is_shown_and_patched(tree, monkeypatch, capfdbinary):
    file = Path(os.fsdecode(os.fsencode(tree) + b"/\xff.py"))
    file.write_text(MODEL)
    for action in ("check", "diff", "apply", "revert"):
        assert ask(monkeypatch, action, tree) == 0
    said = capfdbinary.readouterr().out
    assert rb"\udcff.py" in said and b"+++ b/\xff.py" in said
    assert file.read_text() == MODEL
