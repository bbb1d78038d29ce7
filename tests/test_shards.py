"""Shards: the bytes they are made of, WebDataset's own reader as a witness, and reading by offset."""

import io
import json
import multiprocessing
import os
import tarfile

import numpy as np
import pytest
import torch

from al_deepspeed.data.files import OPEN_FILES, FilePool, atomic_path
from al_deepspeed.data.index import index_shards
from al_deepspeed.data.manifest import read_manifest
from al_deepspeed.data.npy import npy_bytes, read_npy
from al_deepspeed.data.shards import CorpusInfo, LatentDataset, Sample, write_shard
from al_deepspeed.data.tars import split_name
from al_deepspeed.errors import CorpusError

INFO = CorpusInfo("dct", (4, 8, 8), (0.5, -0.5), (2.0, 4.0), "hash", 1)
EMPTY = np.eye(3, 5, dtype=np.float16)
KEYS = ("plain", "folder/sub.d/deep", "ünïcode ☃", "x" * 180)


def sample(number, key):
    random = np.random.default_rng(number)
    latent = random.standard_normal((2, 1 + number % 3, 4, 6)).astype(np.float16)
    text = random.standard_normal((3, 5)).astype(np.float16)
    return Sample(key, latent, text, {"caption": "é", "text_length": 1 + number % 3, "frames": 1})


@pytest.fixture
def corpus(tmp_path):
    samples = [sample(number, key) for number, key in enumerate(KEYS)]
    write_shard(tmp_path / "a.tar", INFO, EMPTY, samples[:3])
    write_shard(tmp_path / "b.tar", INFO, EMPTY, samples[3:])
    manifest, _ = index_shards([tmp_path], tmp_path / "manifest.parquet")
    return manifest, samples


def test_reads_back_what_was_written(corpus):
    manifest, samples = corpus
    dataset = LatentDataset(manifest)
    assert len(dataset) == len(samples)
    for index in (3, 0, 2, 1):
        read, written = dataset[index], samples[index]
        assert read["key"] == written.key and read["text_length"] == written.record["text_length"]
        np.testing.assert_array_equal(read["latent"].numpy(), written.latent)
        np.testing.assert_array_equal(read["text"].numpy(), written.text)
        assert read["latent"].dtype == torch.float16
    np.testing.assert_array_equal(dataset.empty_text.numpy(), EMPTY)
    assert dataset.empty_text_length == 1 and dataset.fingerprint == manifest.fingerprint
    assert dataset.latent_mean.tolist() == [0.5, -0.5] and dataset.latent_std.tolist() == [2.0, 4.0]
    with pytest.raises(IndexError):
        dataset[4]


def test_webdataset_reads_the_same(corpus, tmp_path):
    from webdataset.tariterators import tarfile_samples

    _, samples = corpus
    read = list(tarfile_samples([{"url": str(tmp_path / name)} for name in ("a.tar", "b.tar")]))
    assert [one["__key__"] for one in read] == [one.key for one in samples]
    for one, written in zip(read, samples, strict=True):
        np.testing.assert_array_equal(
            np.load(io.BytesIO(one["latent.npy"]), allow_pickle=False), written.latent
        )
        assert json.loads(one["json"]) == written.record


def test_same_samples_same_bytes(tmp_path):
    for name in ("first.tar", "second.tar"):
        write_shard(tmp_path / name, INFO, EMPTY, [sample(0, "a")])
    assert (tmp_path / "first.tar").read_bytes() == (tmp_path / "second.tar").read_bytes()
    with tarfile.open(tmp_path / "first.tar") as archive:
        assert {(member.mtime, member.uid, member.uname) for member in archive} == {(0, 0, "")}


@pytest.mark.parametrize(
    ("method", "workers"), [("fork", 2), ("spawn", 1)]
)  # a spawned one imports torch anew
def test_workers_open_their_own_files(corpus, method, workers):
    manifest, samples = corpus
    dataset = LatentDataset(manifest)
    dataset[0]  # the parent has a.tar open
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=method,
        sampler=[0, 1, 2, 3] * 3,
    )
    keys = [one["key"] for one in loader]
    assert keys == [one.key for one in samples] * 3


def _descriptor(pool, path, queue):
    pool.read(path, 0, 1)
    os.lseek(pool._open[path].descriptor, 5, os.SEEK_SET)
    queue.put(os.getpid())


def test_no_handle_is_shared_after_fork(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(16)))
    pool = FilePool()
    pool.read(path, 0, 1)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_descriptor, args=(pool, path, queue))
    child.start()
    assert queue.get(timeout=60) != os.getpid()
    child.join()
    # An open file shared with the child would now stand at 5.
    assert os.lseek(pool._open[path].descriptor, 0, os.SEEK_CUR) == 0


def test_pool_closes_the_file_used_longest_ago(tmp_path):
    pool = FilePool()
    for number in range(OPEN_FILES + 10):
        (tmp_path / str(number)).write_bytes(bytes([number]))
        assert pool.read(tmp_path / str(number), 0, 1) == bytes([number])
        pool.read(tmp_path / "0", 0, 1)
    assert len(pool._open) == OPEN_FILES and tmp_path / "0" in pool._open


def test_a_shard_that_changed_since_is_refused(corpus, tmp_path):
    manifest, _ = corpus
    contents = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(contents[:3000])
    with pytest.raises(CorpusError, match="index it again"):
        LatentDataset(manifest)[2]
    write_shard(
        tmp_path / "a.tar", INFO, EMPTY, [sample(number, key) for number, key in enumerate(["a", "b", "c"])]
    )
    shifted = LatentDataset(manifest)
    with pytest.raises(CorpusError, match="index it again"):
        for index in range(3):
            shifted[index]


def test_manifest_without_shards_cannot_be_trained_on(tmp_path):
    (tmp_path / "m.csv").write_text("latent_frames,latent_height,latent_width\n1,2,2\n")
    with pytest.raises(CorpusError, match="without shards"):
        LatentDataset(read_manifest(tmp_path / "m.csv"))


def test_pickled_arrays_are_never_loaded():
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    stream = io.BytesIO()
    np.save(stream, np.array([Bomb()], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="never loaded"):
        read_npy(stream.getvalue())


@pytest.mark.parametrize(
    "broken", [b"", b"\x93NUMPY", npy_bytes(np.ones(4))[:-1], npy_bytes(np.ones(4)) + b"x"]
)
def test_npy_that_does_not_add_up(broken):
    with pytest.raises(ValueError):
        read_npy(broken)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a.latent.npy", ("a", "latent.npy")),
        ("d.ir/a.b.npy", ("d.ir/a", "b.npy")),  # the first dot of the last part counts
        ("a", ("a", "")),
        (".hidden.png", ("", "hidden.png")),
    ],
)
def test_names_split_as_webdataset_splits_them(name, parts):
    from webdataset.tariterators import base_plus_ext

    assert split_name(name) == parts
    if parts[0] and parts[1]:
        assert base_plus_ext(name) == parts


def test_atomic_path_leaves_nothing_behind_a_failure(tmp_path):
    with pytest.raises(RuntimeError), atomic_path(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_one_process_at_a_time_writes_a_file(tmp_path):
    with (
        atomic_path(tmp_path / "file") as temporary,
        pytest.raises(CorpusError, match="another process"),
        atomic_path(tmp_path / "file"),
    ):
        pass
    assert not temporary.exists()
