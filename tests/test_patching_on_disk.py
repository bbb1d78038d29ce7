"""Files on disk: patched all or none, restored to the byte, and left alone where anything is amiss."""

import dataclasses
import os
import stat
import subprocess
from pathlib import Path

import pytest

from al_deepspeed.errors import PatchError
from al_deepspeed.patching import on_disk, record, rewriter

BLOCK = '''"""A block."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)

    def forward(self, x, shift, scale):
        return self.norm(x) * (1 + scale) + shift
'''
SITE_LINE = 13
PLAIN = "import torch\n\n\ndef double(x):\n    return 2 * x\n"


@pytest.fixture(autouse=True)
def state(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


@pytest.fixture
def tree(tmp_path):
    """Two files with a site, one without, in a package."""
    files = {"pkg/__init__.py": "", "pkg/a.py": BLOCK, "pkg/deep/b.py": BLOCK, "pkg/plain.py": PLAIN}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "pkg"


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file's bytes and mode."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def patched(path: Path) -> bool:
    return b"al_deepspeed" in path.read_bytes()


def test_apply_and_revert_restore_every_byte_and_mode(tree):
    (tree / "a.py").chmod(0o750)
    before = contents(tree)
    applied = on_disk.apply(tree)
    assert [file.name for file in applied.examined.to_patch] == ["a.py", "deep/b.py"]
    assert patched(tree / "a.py") and patched(tree / "deep/b.py")
    assert stat.S_IMODE((tree / "a.py").stat().st_mode) == 0o750
    after = contents(tree)
    assert after["plain.py"] == before["plain.py"]
    reverted = on_disk.revert(tree)
    assert sorted(reverted.restored) == [str(tree / "a.py"), str(tree / "deep/b.py")]
    assert contents(tree) == before  # the record is gone with them


def test_looking_changes_nothing(tree):
    before = contents(tree)
    found = on_disk.examine(tree)
    on_disk.diff(found)
    assert contents(tree) == before
    assert [(site.line, site.kind) for site in found.files[0].sites] == [(SITE_LINE, "adaln")]


def test_many_files_are_shared_between_processes(tree):
    for number in range(on_disk.MANY):
        (tree / f"plain{number}.py").write_text(PLAIN if number else "def f(:\n")
    found = on_disk.examine(tree)
    assert [file.name for file in found.to_patch] == ["a.py", "deep/b.py"]
    assert [note.file for note in found.unreadable] == ["plain0.py"]
    assert found.looked_at == on_disk.MANY + 4


def test_a_second_apply_changes_nothing(tree):
    on_disk.apply(tree)
    once = contents(tree)
    again = on_disk.apply(tree)
    assert again.examined.to_patch == [] and [file.patched for file in again.examined.files] == [True, True]
    assert contents(tree) == once
    assert on_disk.revert(tree).restored
    assert on_disk.revert(tree) == on_disk.Reverted()


def test_the_diff_is_a_patch_of_the_users_own_tree(tree):
    (tree / "a.py").write_bytes(BLOCK.replace("\n", "\r\n").rstrip().encode())  # no newline at the end
    (tree / "with a blank.py").write_text(BLOCK)
    text = on_disk.diff(on_disk.examine(tree))
    copy = tree.parent / "copy"
    for name, (data, _) in contents(tree).items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(data)
    subprocess.run(["patch", "-p1", "--binary", "-s"], cwd=copy, input=text, check=True)
    on_disk.apply(tree)
    for name in ("a.py", "deep/b.py", "with a blank.py"):
        assert (copy / name).read_bytes() == (tree / name).read_bytes()


ENCODINGS = {
    "crlf": BLOCK.replace("\n", "\r\n").encode(),
    "bom": b"\xef\xbb\xbf" + BLOCK.encode(),
    "tabs": BLOCK.replace("    ", "\t").encode(),
    "latin-1": ("# -*- coding: latin-1 -*-\n" + BLOCK.replace("A block", "Überblock")).encode("latin-1"),
    "no newline at the end": BLOCK.rstrip().encode(),
    "a docstring in two parts": BLOCK.replace(
        '"""A block."""\n', '"A" " block."\nfrom __future__ import annotations\n'
    ).encode(),
    "trailing blanks and a form feed": BLOCK.replace("import torch\n", "import torch  \n\f\n", 1).encode(),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_bytes_outside_the_sites_are_kept(tree, name):
    data = ENCODINGS[name]
    (tree / "a.py").write_bytes(data)
    on_disk.apply(tree / "a.py")
    new = (tree / "a.py").read_bytes()
    compile(new, "a.py", "exec")
    old_lines, new_lines = data.split(b"\n"), new.split(b"\n")
    kept = [line for line in old_lines if b"* (1 + scale)" not in line]
    rest = iter(new_lines)
    assert all(line in rest for line in kept)  # in their order, byte for byte
    assert len(new_lines) - len(kept) in (2, 3)  # an import, a blank line at most, and the site's line
    on_disk.revert(tree)
    assert (tree / "a.py").read_bytes() == data


HELPERS = {
    "a form feed": "\f\nX = '\x0b\x1c\u2028'\n\n\ndef modulate(x, shift, scale):\n"
    "    return x * (1 + scale) + shift\n",
    "a string that is indented less": "if True:\n    def modulate(x, shift, scale):\n"
    "        '''Of\nx.'''\n        return x * (1 + scale) + shift\n",
}


@pytest.mark.parametrize("case", HELPERS)
def test_helpers_are_found_in_files_of_any_form(tree, case):
    (tree / "helpers.py").write_text(HELPERS[case], encoding="utf-8")
    text = BLOCK.replace("self.norm(x) * (1 + scale) + shift", "modulate(self.norm(x), shift, scale)")
    (tree / "a.py").write_text(text.replace("import torch\n", "from .helpers import modulate\n", 1))
    on_disk.apply(tree)
    assert patched(tree / "a.py")


def test_code_that_would_not_compile_is_not_written(tree, monkeypatch):
    monkeypatch.setattr(
        on_disk,
        "rewrite",
        lambda source, **how: dataclasses.replace(rewriter.rewrite(source, **how), source="def f(:\n"),
    )
    before = contents(tree)
    found = on_disk.apply(tree).examined
    assert {note.file for note in found.unreadable} == {"a.py", "deep/b.py"}
    assert contents(tree) == before


def test_unreadable_files_are_named_and_the_rest_goes_on(tree):
    (tree / "broken.py").write_text(BLOCK + "def f(:\n")
    (tree / "binary.py").write_bytes(b"x = '\xff\xfe'\n")
    (tree / "nulls.py").write_bytes(b"x = 1\0\n")
    (tree / "rot.py").write_text("# coding: rot13\n")
    (tree / "deep.py").write_text(f"norm = {'-' * 20000}1\n")
    os.mkfifo(tree / "pipe.py")
    before = {name: (tree / name).read_bytes() for name in ("broken.py", "binary.py", "nulls.py")}
    found = on_disk.examine(tree)
    unreadable = {note.file for note in found.unreadable}
    assert unreadable == {"broken.py", "binary.py", "nulls.py", "deep.py", "pipe.py", "rot.py"}
    assert next(note.reason for note in found.unreadable if note.file == "broken.py").startswith("line 14:")
    on_disk.apply(tree)
    assert patched(tree / "a.py")
    assert {name: (tree / name).read_bytes() for name in before} == before


def test_links_are_neither_followed_nor_written(tree, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "c.py").write_text(BLOCK)
    (tree / "link.py").symlink_to(outside / "c.py")
    (tree / "folder").symlink_to(outside)
    (tree / "loop").symlink_to(tree)
    found = on_disk.apply(tree).examined
    assert {note.file for note in found.skipped} == {"folder", "link.py", "loop"}
    assert [file.name for file in found.files] == ["a.py", "deep/b.py"]
    assert (outside / "c.py").read_text() == BLOCK and (tree / "link.py").is_symlink()


def test_a_folder_that_became_a_link_out_of_the_tree_is_not_written_on_revert(tree, tmp_path_factory):
    on_disk.apply(tree)
    outside = tmp_path_factory.mktemp("outside")
    (tree / "deep/b.py").rename(outside / "b.py")
    (tree / "deep").rmdir()
    (tree / "deep").symlink_to(outside)
    there = (outside / "b.py").read_bytes()
    with pytest.raises(PatchError, match="symbolic link"):
        on_disk.revert(tree)
    assert (outside / "b.py").read_bytes() == there and patched(tree / "a.py")


def test_nor_is_it_when_an_interrupted_apply_is_undone(tree, tmp_path_factory):
    (tree / "a.py").rename(tree / "deep/c.py")
    killed_after(1, on_disk.apply, tree)
    outside = tmp_path_factory.mktemp("outside")
    for name in ("b.py", "c.py"):
        (tree / "deep" / name).rename(outside / name)
    (tree / "deep").rmdir()
    (tree / "deep").symlink_to(outside)
    there = contents(outside)
    with pytest.raises(PatchError, match="symbolic link"):
        on_disk.revert(tree)
    assert contents(outside) == there and patched(outside / "b.py")


@pytest.mark.parametrize(("place", "mode"), [("deep/b.py", 0o444), ("deep", 0o555)], ids=["file", "folder"])
def test_read_only_is_refused_and_nothing_is_half_written(tree, place, mode):
    before = contents(tree)
    kept = stat.S_IMODE((tree / place).stat().st_mode)
    (tree / place).chmod(mode)
    with pytest.raises(PatchError, match=rf"{place} is read-only; nothing was changed"):
        on_disk.apply(tree)
    (tree / place).chmod(kept)
    assert contents(tree) == before


def check(path):
    from al_deepspeed.patching import checked

    examined = on_disk.examine(path)
    checked.remember(path, None, examined.folder, examined.fingerprints())


@pytest.mark.parametrize(("looked_at", "applied"), [("", ""), ("", "a.py"), ("a.py", "")])
def test_an_edit_between_check_and_apply_is_refused(tree, looked_at, applied):
    check(tree / looked_at)
    (tree / "a.py").write_text(BLOCK + "\n\nEDITED = True\n")
    before = contents(tree)
    with pytest.raises(PatchError, match=r"a\.py: not as when it was checked; nothing was changed"):
        on_disk.apply(tree / applied)
    assert contents(tree) == before
    check(tree)
    assert len(on_disk.apply(tree).examined.to_patch) == 2


def test_what_the_commands_write_themselves_is_no_change(tree):
    check(tree)
    on_disk.apply(tree / "a.py")
    assert [file.name for file in on_disk.apply(tree).examined.to_patch] == ["deep/b.py"]
    on_disk.revert(tree)
    assert len(on_disk.apply(tree).examined.to_patch) == 2


def test_a_record_that_is_a_link_out_of_the_tree_is_refused(tree, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (tree / ".al_deepspeed_patch").symlink_to(outside)
    before = (tree / "a.py").read_bytes()
    for command in (on_disk.apply, on_disk.revert):
        with pytest.raises(PatchError, match="is a symbolic link"):
            command(tree)
    assert (tree / "a.py").read_bytes() == before and not list(outside.iterdir())


def test_revert_removes_what_a_death_before_the_first_write_left(tree):
    before = contents(tree)
    (tree / ".al_deepspeed_patch/new").mkdir(parents=True)
    (tree / ".al_deepspeed_patch/new/0").write_text("staged")
    assert on_disk.revert(tree).restored == []
    assert contents(tree) == before and not (tree / ".al_deepspeed_patch").exists()


def test_an_edit_in_the_very_moment_is_refused_and_undone(tree, monkeypatch):
    before = contents(tree)
    rename = record.Record._rename

    def and_edit(self, name, staged):
        rename(self, name, staged)
        (tree / "deep/b.py").write_text("edited = True\n")

    monkeypatch.setattr(record.Record, "_rename", and_edit)
    with pytest.raises(PatchError, match=r"b\.py changed in this moment"):
        on_disk.apply(tree)
    before["deep/b.py"] = (b"edited = True\n", before["deep/b.py"][1])
    assert contents(tree) == before


def killed_after(renames: int, command, tree: Path) -> None:
    """Runs a command in a process that ends at once, without any clean-up, in place of the next rename."""
    child = os.fork()
    if child == 0:
        rename, left = record.Record._rename, [renames]

        def count(self, name, staged):
            if left[0] == 0:
                os._exit(9)
            left[0] -= 1
            rename(self, name, staged)

        record.Record._rename = count
        command(tree)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("renames", [0, 1])
@pytest.mark.parametrize("then", ["apply", "revert"])
def test_an_interrupted_apply_is_undone_by_the_next_command(tree, renames, then):
    before = contents(tree)
    killed_after(renames, on_disk.apply, tree)
    assert [patched(tree / name) for name in ("a.py", "deep/b.py")] == [renames > 0, False]
    assert on_disk.interrupted(tree) == tree
    if then == "apply":
        assert len(on_disk.apply(tree).recovered) == renames
        assert patched(tree / "a.py") and patched(tree / "deep/b.py")
    assert len(on_disk.revert(tree).restored) == (2 if then == "apply" else renames)
    assert contents(tree) == before


def test_an_interrupted_revert_is_completed_by_the_next_command(tree):
    before = contents(tree)
    on_disk.apply(tree)
    killed_after(1, on_disk.revert, tree)
    assert [patched(tree / name) for name in ("a.py", "deep/b.py")] == [False, True]
    assert on_disk.revert(tree).restored == [str(tree / "deep/b.py")]
    assert contents(tree) == before


def test_revert_refuses_what_was_edited_since_and_restores_a_part_on_request(tree):
    before = contents(tree)
    on_disk.apply(tree)
    original = (tree / "a.py").read_bytes()
    (tree / "a.py").write_bytes(original + b"# mine\n")
    held = contents(tree)
    with pytest.raises(PatchError, match=r"a\.py: edited since it was patched.*nothing was changed"):
        on_disk.revert(tree)
    with pytest.raises(PatchError, match=r"a\.py"):
        on_disk.revert(tree / "a.py")
    assert contents(tree) == held
    assert on_disk.revert(tree / "deep").restored == [str(tree / "deep/b.py")]
    (tree / "a.py").write_bytes(original)
    assert on_disk.revert(tree).restored == [str(tree / "a.py")]
    assert contents(tree) == before


def test_revert_says_why_a_file_needs_no_restoring(tree):
    on_disk.apply(tree)
    (tree / "a.py").write_text(PLAIN)  # a newer release of the package
    (tree / "deep/b.py").unlink()
    reverted = on_disk.revert(tree)
    assert reverted.restored == []
    assert (
        "replaced" in reverted.idle[str(tree / "a.py")] and "gone" in reverted.idle[str(tree / "deep/b.py")]
    )
    assert (tree / "a.py").read_text() == PLAIN
    assert not (tree / record.RECORD_FOLDER).exists()


def test_a_file_patched_twice_goes_back_to_its_first_original(tree, monkeypatch):
    """A later release may find more sites in a file that is patched already."""
    before = contents(tree)
    on_disk.apply(tree)
    once = (tree / "a.py").read_bytes()
    with record.Record(tree).locked():
        record.Record(tree).apply([record.Change("a.py", once, once + b"# more\n")])
    on_disk.revert(tree)
    assert contents(tree) == before


def test_a_single_file_and_a_folder_inside_share_the_record_around_them(tree):
    before = contents(tree)
    on_disk.apply(tree / "a.py")
    assert patched(tree / "a.py") and not patched(tree / "deep/b.py")
    on_disk.apply(tree / "deep")
    assert sorted(record.Record(tree).entries()) == ["a.py", "deep/b.py"]
    on_disk.revert(tree)
    assert contents(tree) == before


def test_empty_folders_and_no_match_are_no_errors_and_leave_nothing(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    for folder in (tmp_path, tmp_path / "empty"):
        folder.mkdir(exist_ok=True)
        before = contents(folder)
        assert on_disk.apply(folder).examined.to_patch == []
        assert on_disk.revert(folder) == on_disk.Reverted()
        assert contents(folder) == before


@pytest.mark.parametrize("name", ["absent", "notes.txt"])
def test_a_path_that_cannot_be_patched_is_named(tmp_path, name):
    (tmp_path / "notes.txt").write_text("norm")
    with pytest.raises(PatchError, match=name):
        on_disk.examine(tmp_path / name)


def test_two_commands_at_once_are_refused(tree):
    on_disk.apply(tree)
    with record.Record(tree).locked(), pytest.raises(PatchError, match="another patch command"):
        on_disk.revert(tree)


def test_an_apply_that_comes_second_leaves_what_the_first_has_written(tree, monkeypatch):
    look = on_disk.examine

    def slow(*given):
        monkeypatch.setattr(on_disk, "examine", look)
        found = look(*given)
        on_disk.apply(tree)
        return found

    monkeypatch.setattr(on_disk, "examine", slow)
    before = contents(tree)
    with pytest.raises(PatchError, match="changed since it was looked at"):
        on_disk.apply(tree)
    assert all(patched(tree / name) for name in ("a.py", "deep/b.py"))
    on_disk.revert(tree)
    assert contents(tree) == before


def test_a_damaged_record_says_where_the_originals_are(tree):
    on_disk.apply(tree)
    (tree / record.RECORD_FOLDER / "record.json").write_text("{")
    with pytest.raises(PatchError, match="originals"):
        on_disk.revert(tree)
