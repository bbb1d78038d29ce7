"""Indexing shards: right rows, and every kind of broken shard refused with file and reason."""

import io
import json
import random
import tarfile

import numpy as np
import pytest

from al_deepspeed.data.index import index_shards
from al_deepspeed.data.npy import npy_bytes
from al_deepspeed.data.shards import CorpusInfo, LatentDataset, Sample, write_shard
from al_deepspeed.errors import CorpusError

INFO = CorpusInfo("dct", (4, 8, 8), (0.0,) * 4, (1.0,) * 4, "hash", 1)
EMPTY = np.ones((2, 3))


def sample(key, shape=(4, 1, 4, 6)):
    frames = 4 * shape[1] - 3
    return Sample(key, np.ones(shape), EMPTY, {"text_length": 2, "frames": frames, "height": 32, "width": 48})


def write(path, keys="abc", info=INFO):
    write_shard(path, info, EMPTY, [sample(key) for key in keys])
    return path


def members(path):
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


def rewrite(path, contents):
    """A tar of (name or TarInfo, bytes)."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for member, data in contents:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def numpy_file(array):
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def test_rows(tmp_path):
    (tmp_path / "sub").mkdir()
    write_shard(tmp_path / "sub" / "a.tar", INFO, EMPTY, [sample("p"), sample("q", (4, 3, 4, 6))])
    write_shard(tmp_path / "b.tar", INFO, EMPTY, [sample("r")])
    manifest, bad = index_shards([tmp_path], tmp_path / "manifest.parquet")
    assert not bad
    rows = manifest.table.to_pylist()
    assert [row["key"] for row in rows] == ["r", "p", "q"]
    assert [row["shard"] for row in rows] == ["b.tar", "sub/a.tar", "sub/a.tar"]
    video = rows[2]
    assert video["kind"] == "video" and rows[0]["kind"] == "image"
    assert (video["latent_frames"], video["latent_height"], video["latent_width"]) == (3, 4, 6)
    assert video["tokens"] == 3 * 2 * 3
    assert (video["pixel_frames"], video["pixel_height"], video["pixel_width"]) == (9, 32, 48)
    assert manifest.info["codec"] == "dct" and manifest.info["latent_std"] == [1.0] * 4


def test_workers_change_nothing(tmp_path):
    for number in range(3):
        write(tmp_path / f"{number}.tar", [f"{number}{key}" for key in "abc"])
    (tmp_path / "1.tar").write_bytes((tmp_path / "1.tar").read_bytes()[:-10240])
    results = [
        index_shards([tmp_path], tmp_path / "m.parquet", skip_bad=True, workers=workers) for workers in (1, 2)
    ]
    assert results[0][0].table.equals(results[1][0].table) and results[0][1] == results[1][1]


def test_fingerprint_follows_the_samples_not_the_place(tmp_path):
    prints = []
    for folder, keys in (("one", "abc"), ("two", "abc"), ("three", "abd")):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / f"{folder}.tar", keys)
        prints.append(index_shards([tmp_path / folder], tmp_path / f"{folder}.parquet")[0].fingerprint)
    assert prints[0] == prints[1] != prints[2]


BREAKS = {
    "missing member": (lambda m: m.pop("b.text.npy"), "text.npy is missing"),
    "array too short": (lambda m: m.update({"b.latent.npy": m["b.latent.npy"][:-2]}), "holds 190 bytes"),
    "array too long": (lambda m: m.update({"b.latent.npy": m["b.latent.npy"] + b"12"}), "holds 194 bytes"),
    "zero dimension": (
        lambda m: m.update({"b.latent.npy": npy_bytes(np.ones((4, 0, 4, 6)))}),
        "dimension is zero",
    ),
    "other dimensions": (lambda m: m.update({"b.latent.npy": npy_bytes(np.ones((4, 4, 6)))}), "4 dimensions"),
    "other dtype": (lambda m: m.update({"b.latent.npy": numpy_file(np.ones((4, 1, 4, 6)))}), "float64"),
    "pickle": (
        lambda m: m.update({"b.latent.npy": numpy_file(np.array([{}], dtype=object))}),
        "never loaded",
    ),
    "column order": (
        lambda m: m.update(
            {"b.latent.npy": numpy_file(np.asfortranarray(np.ones((4, 1, 4, 6), np.float16)))}
        ),
        "Fortran",
    ),
    "no array": (lambda m: m.update({"b.latent.npy": b"hello"}), "header is broken"),
    "odd side": (
        lambda m: m.update({"b.latent.npy": npy_bytes(np.ones((4, 1, 5, 6)))}),
        "multiple of the patch",
    ),
    "channels": (lambda m: m.update({"b.latent.npy": npy_bytes(np.ones((3, 1, 4, 6)))}), "3 channels"),
    "text shape": (lambda m: m.update({"b.text.npy": npy_bytes(np.ones((2, 4)))}), "text is 2x4"),
    "no json": (lambda m: m.update({"b.json": b"{"}), "cannot be read"),
    "json list": (lambda m: m.update({"b.json": b"[]"}), "not an object"),
    "text length": (lambda m: m.update({"b.json": b'{"text_length": 3}'}), "not from 1 to 2"),
    "absurd number": (lambda m: m.update({"b.json": b'{"text_length": 1, "width": 1e99}'}), "1e\\+99"),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_bad_sample_is_named_or_left_out(tmp_path, kind):
    change, reason = BREAKS[kind]
    path = write(tmp_path / "a.tar")
    contents = members(path)
    change(contents)
    rewrite(path, contents.items())
    with pytest.raises(CorpusError, match=f"(?s)a.tar, key b.*{reason}.*--skip-bad"):
        index_shards([path], tmp_path / "m.parquet")
    manifest, bad = index_shards([path], tmp_path / "m.parquet", skip_bad=True)
    assert manifest.table["key"].to_pylist() == ["a", "c"]
    assert [one["key"] for one in bad] == ["b"]
    assert [json.loads(line) for line in (tmp_path / "m.bad.jsonl").open()] == bad
    LatentDataset(manifest)[1]


def test_side_file_of_an_earlier_run_goes(tmp_path):
    path = write(tmp_path / "a.tar")
    (tmp_path / "m.bad.jsonl").write_text("old")
    index_shards([path], tmp_path / "m.parquet", skip_bad=True)
    assert not (tmp_path / "m.bad.jsonl").exists()


@pytest.mark.parametrize("name", ["/b.json", "../b.json", "x/../b.json"])
def test_paths_out_of_the_tar_are_refused(tmp_path, name):
    path = write(tmp_path / "a.tar", "a")
    rewrite(path, [*members(path).items(), (name, b"{}")])
    with pytest.raises(CorpusError, match="absolute or parent path"):
        index_shards([path], tmp_path / "m.parquet")


def test_links_are_refused(tmp_path):
    path = write(tmp_path / "a.tar", "a")
    link = tarfile.TarInfo("a.link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
    rewrite(path, [*members(path).items(), (link, b"")])
    with pytest.raises(CorpusError, match="link"):
        index_shards([path], tmp_path / "m.parquet")


def test_duplicate_key_in_one_tar_and_across_two(tmp_path):
    write(tmp_path / "a.tar")
    first = members(tmp_path / "a.tar")
    again = [(name, data) for name, data in first.items() if name.startswith("a.")]
    rewrite(tmp_path / "a.tar", [*first.items(), *again])
    write(tmp_path / "b.tar", "cd")
    with pytest.raises(CorpusError, match=r"(?s)key a, reason duplicate key.*key c, reason duplicate key"):
        index_shards([tmp_path], tmp_path / "m.parquet")
    manifest, bad = index_shards([tmp_path], tmp_path / "m.parquet", skip_bad=True)
    assert manifest.table["key"].to_pylist() == ["a", "b", "c", "d"] and len(bad) == 2


def broken_tars(whole):
    header = whole.index(b"b.json")
    return {
        "cut in a header": (whole[: header + 100], "end marker is missing"),
        "cut in contents": (whole[: header + 520], "cut|unexpected end"),
        "no end marker": (whole[: len(whole.rstrip(b"\0")) // 512 * 512 + 512], "end marker is missing"),
        "broken header": (whole[:header] + b"#" + whole[header + 1 :], "broken member header"),
        "two joined": (whole + whole, "after the end marker"),
        "empty": (b"", "empty"),
        "no tar": (b"hello" * 1000, "corrupt tar"),
        "gzip": (b"\x1f\x8b" + whole[2:], "compressed with gzip"),
    }


@pytest.mark.parametrize("kind", broken_tars(b"b.json"))
def test_corrupt_tar_is_named(tmp_path, kind):
    whole = write(tmp_path / "whole.tar").read_bytes()
    contents, reason = broken_tars(whole)[kind]
    (tmp_path / "a.tar").write_bytes(contents)
    with pytest.raises(CorpusError, match=f"a.tar.*({reason})"):
        index_shards([tmp_path / "a.tar"], tmp_path / "m.parquet")


def test_samples_before_the_corruption_are_kept(tmp_path):
    whole = write(tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(whole[: whole.index(b"c.latent.npy")])
    manifest, bad = index_shards([tmp_path / "a.tar"], tmp_path / "m.parquet", skip_bad=True)
    assert manifest.table["key"].to_pylist() == ["a", "b"] and len(bad) == 1


def test_random_damage_never_escapes(tmp_path):
    whole = write(tmp_path / "whole.tar").read_bytes()[:9000]
    dice = random.Random(7)
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(dice.choice([1, 3, 20])):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        (tmp_path / "a.tar").write_bytes(damaged)
        try:
            manifest, _ = index_shards([tmp_path / "a.tar"], tmp_path / "m.parquet", skip_bad=True)
            dataset = LatentDataset(manifest)
            for index in range(len(dataset)):
                dataset[index]
        except CorpusError:
            pass


def test_shards_of_two_codecs_are_no_corpus(tmp_path):
    write(tmp_path / "a.tar", "a")
    write(tmp_path / "b.tar", "b", CorpusInfo("other", (4, 8, 8), (0.0,) * 4, (1.0,) * 4, "hash", 1))
    with pytest.raises(CorpusError, match=r"differ in codec \(dct and other\)"):
        index_shards([tmp_path], tmp_path / "m.parquet")


def test_a_tar_of_something_else_is_refused(tmp_path):
    rewrite(tmp_path / "a.tar", [("x.png", b"1"), ("x.txt", b"2")])
    with pytest.raises(CorpusError, match="did not write it"):
        index_shards([tmp_path], tmp_path / "m.parquet")


@pytest.mark.parametrize("source", ["absent", "."])
def test_nothing_to_index(tmp_path, source):
    with pytest.raises(CorpusError, match=r"no such file|holds no \.tar"):
        index_shards([tmp_path / source], tmp_path / "m.parquet")
