"""Latent shards: WebDataset tars that `encode` writes, `index` lists, and training reads by offset.

    __meta__/corpus.json             codec, stride, latent mean and std, text encoder, empty_text_length
    __meta__/corpus.empty_text.npy   fp16 [L, D], embedding of the empty caption
    KEY.json                         source, pixel size, frames, fps, caption, text_length
    KEY.latent.npy                   fp16 [C, F, H, W], normalised: (latent - mean) / std
    KEY.text.npy                     fp16 [L, D], zeros after text_length rows

Every shard describes itself, so shards can be moved, mixed and indexed in any order. Nothing in a tar depends
on when, where or by whom it was written. Arrays are never unpickled.
"""

import io
import json
import tarfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from al_deepspeed.data.files import FilePool, atomic_path
from al_deepspeed.data.manifest import SIZES, Manifest
from al_deepspeed.data.npy import npy_bytes, read_npy
from al_deepspeed.data.tars import META, split_name
from al_deepspeed.errors import CorpusError


@dataclass(frozen=True)
class CorpusInfo:
    """What holds for every sample of a shard.

    codec: name, with the VAE's own name where there is one.
    stride: pixels a latent cell in time, height and width.
    latent_mean, latent_std: one a channel; a stored latent times std plus mean is the codec's own.
    text_encoder: name.
    empty_text_length: rows of the empty caption's embedding that are not padding.
    """

    codec: str
    stride: tuple[int, int, int]
    latent_mean: tuple[float, ...]
    latent_std: tuple[float, ...]
    text_encoder: str
    empty_text_length: int


@dataclass(frozen=True)
class Sample:
    """A sample on its way into a shard: fp16 arrays and what KEY.json says."""

    key: str
    latent: np.ndarray
    text: np.ndarray
    record: dict[str, Any]


def write_shard(path: str | Path, info: CorpusInfo, empty_text: np.ndarray, samples: Iterable[Sample]) -> int:
    """Write a shard, whole or not at all; the same bytes for the same samples. Returns their number."""
    from webdataset import TarWriter

    path, written = Path(path), 0
    with atomic_path(path) as temporary, temporary.open("r+b") as stream:
        with TarWriter(stream, user="", group="", mtime=0, encoder=False, format="PAX_FORMAT") as writer:
            writer.write(
                {"__key__": META, "json": _json(asdict(info)), "empty_text.npy": npy_bytes(empty_text)}
            )
            for sample in samples:
                arrays = {"latent.npy": npy_bytes(sample.latent), "text.npy": npy_bytes(sample.text)}
                writer.write({"__key__": sample.key, "json": _json(sample.record), **arrays})
                written += 1
        stream.flush()
    return written


class LatentDataset(torch.utils.data.Dataset):
    """Map-style samples of a manifest's shards: one `pread` a sample.

    `dataset[i]` is {"latent": fp16 [C, F, H, W], "text": fp16 [L, D], "text_length": int, "key": str}.
    Files are opened by the process that reads them: a forked or spawned worker opens its own.

    fingerprint: of the manifest it was made from.
    latent_mean, latent_std: fp32 [C]; `latent * std + mean` is what the codec decodes.
    empty_text, empty_text_length: embedding of the empty caption, fp16 [L, D], for condition dropout.
    """

    def __init__(self, manifest: Manifest):
        table = manifest.table
        if "shard" not in table.column_names or "meta" not in manifest.info:
            raise CorpusError(
                f"{manifest.path}: lists shapes without shards, which can be planned but not trained on. "
                "Index encoded shards: al-deepspeed index DIR --out manifest.parquet"
            )
        self.fingerprint = manifest.fingerprint
        self._folder = manifest.path.resolve().parent
        shard = table["shard"].combine_chunks()
        self._shards = shard.dictionary.to_pylist()
        self._shard = shard.indices.to_numpy()
        self._offset = table["offset"].to_numpy()
        self._size = table["size"].to_numpy()
        self._shape = np.stack([table[name].to_numpy() for name in SIZES], axis=1)
        self._key = table["key"]
        self._files = FilePool()
        meta = manifest.info["meta"]
        members = self._read(meta["shard"], meta["offset"], meta["size"])
        self.info = json.loads(members["json"])
        self.latent_mean = torch.tensor(self.info["latent_mean"], dtype=torch.float32)
        self.latent_std = torch.tensor(self.info["latent_std"], dtype=torch.float32)
        self.empty_text = torch.from_numpy(read_npy(members["empty_text.npy"]))
        self.empty_text_length = int(self.info["empty_text_length"])

    def __len__(self) -> int:
        return len(self._offset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        name = self._shards[self._shard[index]]
        members = self._read(name, int(self._offset[index]), int(self._size[index]))
        try:
            latent, text = read_npy(members["latent.npy"]), read_npy(members["text.npy"])
            record = json.loads(members["json"])
            found = (members["key"].decode(), *latent.shape[1:])
            indexed = (self._key[index].as_py(), *self._shape[index].tolist())
            if found != indexed:
                raise ValueError(f"found {found}, indexed {indexed}")
            return {
                "latent": torch.from_numpy(latent),
                "text": torch.from_numpy(text),
                "text_length": int(record["text_length"]),
                "key": found[0],
            }
        except (KeyError, ValueError) as error:
            raise CorpusError(
                f"{self._folder / name}: sample {index} is not what was indexed ({error}). The shard changed "
                "since; index it again."
            ) from error

    def _read(self, shard: str, offset: int, size: int) -> dict[str, bytes]:
        path = self._folder / shard
        try:
            return read_members(self._files.read(path, offset, size))
        except (OSError, ValueError) as error:
            raise CorpusError(
                f"{path}: cannot read {size} bytes at {offset}: {error}. The shard moved or changed since it "
                "was indexed; index it again."
            ) from error


def read_members(run: bytes) -> dict[str, bytes]:
    """Suffix -> contents of one sample's run of tar members; its key stands under "key"."""
    members = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(run), mode="r:") as archive:
            for member in archive:
                key, suffix = split_name(member.name.removeprefix("./"))
                members[suffix] = run[member.offset_data : member.offset_data + member.size]
    except tarfile.TarError as error:
        raise ValueError(f"no tar members there: {error}") from error
    return {"key": key.encode(), **members}


def _json(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, sort_keys=True).encode()
