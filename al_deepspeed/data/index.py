"""Making a manifest from latent shards.

Of a shard only tar headers, the JSON and the first bytes of each array are read, so indexing costs a few
small reads a sample however large the latents are. What cannot be used is named with file and reason: all of
it in one error, or, with `skip_bad`, in a side file beside the manifest while the rest goes on.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from al_deepspeed.data.files import FilePool, write_whole
from al_deepspeed.data.manifest import Manifest, write_manifest
from al_deepspeed.data.npy import npy_header
from al_deepspeed.data.tars import META, Entry, entries
from al_deepspeed.errors import CorpusError
from al_deepspeed.scheduling.shapes import PATCH, latent_tokens

HEADER_BYTES = 512
SHOWN = 10
SAME = ("codec", "stride", "latent_mean", "latent_std", "text_encoder", "empty_text")
SCHEMA = pa.schema(
    {
        "key": pa.large_string(),
        "kind": pa.string(),
        "offset": pa.int64(),
        "size": pa.int64(),
        "latent_frames": pa.int32(),
        "latent_height": pa.int32(),
        "latent_width": pa.int32(),
        "tokens": pa.int64(),
        "pixel_frames": pa.int32(),
        "pixel_height": pa.int32(),
        "pixel_width": pa.int32(),
        "fps": pa.float64(),
        "text_length": pa.int32(),
    }
)

Bad = dict[str, Any]


def _ignore(size: int) -> None:
    """No progress bar."""


def index_shards(
    sources: Iterable[str | Path],
    out: str | Path,
    *,
    patch: tuple[int, int, int] = PATCH,
    skip_bad: bool = False,
    workers: int = 1,
    progress: Callable[[int], None] = _ignore,
) -> tuple[Manifest, list[Bad]]:
    """Index latent shards into a manifest, one row a sample.

    Args:
        sources: folders (every .tar below, by name) and tars.
        out: the manifest, .parquet; shard paths are stored relative to its folder.
        patch: the model's patch (frames, height, width), which gives the tokens of a latent.
        skip_bad: leave unusable samples out, listing them in OUT's `.bad.jsonl`, instead of raising.
        workers: processes that read tars side by side.
        progress: called with bytes as they are passed.
    Returns:
        the manifest and the unusable samples, each {"file", "key", "reason"}.
    Raises:
        CorpusError: no shards, shards of different codecs or text encoders, bad samples (unless skip_bad).
    """
    out = parquet_name(out)
    indexed = list(_index_tars(find_tars(sources), patch, workers, progress))
    bad = [problem for one in indexed for problem in one.bad]
    used = [one for one in indexed if one.table.num_rows]
    table, repeated = _join(used, out.resolve().parent)
    bad += repeated
    settle_bad(out, bad, skip_bad)
    if not table.num_rows:
        listed = f"; {side_file(out)} says why" if bad else ""
        raise CorpusError(
            f"{out}: no usable sample in {len(indexed)} tar(s). Check what was encoded{listed}."
        )
    return write_manifest(out, table, _common_info(used, out.resolve().parent, patch)), bad


def find_tars(sources: Iterable[str | Path]) -> list[Path]:
    """The tars that the sources name, each once, in the order given and by name inside a folder."""
    tars: dict[Path, None] = {}
    for source in map(Path, sources):
        if source.is_dir():
            found = sorted(path for path in source.rglob("*.tar") if not path.name.startswith("."))
        elif source.is_file():
            found = [source]
        else:
            raise CorpusError(
                f"{source}: no such file or folder. Give folders that hold .tar shards, or tars."
            )
        if not found:
            raise CorpusError(
                f"{source}: holds no .tar shard. Make some with: al-deepspeed encode SRC --out {source}"
            )
        tars.update(dict.fromkeys(found))
    return list(tars)


def parquet_name(out: str | Path) -> Path:
    """OUT as a path, which has to end in .parquet."""
    out = Path(out)
    if out.suffix != ".parquet":
        raise CorpusError(
            f"--out is {out}; a manifest is written as .parquet, e.g. {out.with_suffix('.parquet')}"
        )
    return out


def side_file(out: Path) -> Path:
    """Where the rows that were left out are listed."""
    return out.with_suffix(".bad.jsonl")


def settle_bad(out: Path, bad: list[Bad], skip_bad: bool) -> None:
    """Raise with the first bad rows, or write all to OUT's side file; an earlier run's side file goes."""
    side = side_file(out)
    if bad and not skip_bad:
        lines = [
            "  " + ", ".join(f"{name} {value}" for name, value in one.items() if value is not None)
            for one in bad
        ]
        more = [f"  and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []
        raise CorpusError(
            "\n".join([f"{len(bad)} row(s) cannot be used:", *lines[:SHOWN], *more])
            + f"\nRepair or remove them, or leave them out with --skip-bad, which lists them in {side}."
        )
    if not bad:
        side.unlink(missing_ok=True)
        return
    write_whole(side, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in bad))


@dataclass
class _Tar:
    """What one tar gave: its samples, its own description of the corpus, and what cannot be used."""

    path: Path
    table: pa.Table = field(default_factory=SCHEMA.empty_table)
    info: dict[str, Any] = field(default_factory=dict)
    meta: Entry | None = None
    bad: list[Bad] = field(default_factory=list)


def _index_tars(
    tars: list[Path], patch: tuple[int, int, int], workers: int, progress: Callable[[int], None]
) -> Iterator[_Tar]:
    """Each tar's result, in order."""
    if min(workers, len(tars)) == 1:
        yield from (_index_tar(tar, patch, progress) for tar in tars)
        return
    # Spawned: Arrow's threads do not survive a fork.
    with ProcessPoolExecutor(min(workers, len(tars)), multiprocessing.get_context("spawn")) as pool:
        for tar in pool.map(partial(_index_tar, patch=patch), tars):
            progress(tar.path.stat().st_size)
            yield tar


def _index_tar(path: Path, patch: tuple[int, int, int], progress: Callable[[int], None] = _ignore) -> _Tar:
    tar, pool, rows = _Tar(path), FilePool(), []
    try:
        for entry in entries(path):
            progress(entry.size)
            try:
                if entry.key == META:
                    tar.meta, tar.info = entry, _read_info(pool, path, entry)
                elif tar.meta is None:
                    raise CorpusError(
                        f"does not begin with {META}.json, so `al-deepspeed encode` did not write it"
                    )
                else:
                    rows.append(_read_row(pool, path, entry, tar.info, patch))
            except ValueError as error:
                if entry.key == META:
                    raise CorpusError(f"its {META} is broken: {error}") from error
                tar.bad.append({"file": str(path), "key": entry.key, "reason": str(error)})
    except CorpusError as error:
        tar.bad.append({"file": str(path), "key": None, "reason": str(error).removeprefix(f"{path}: ")})
    tar.table = pa.Table.from_pylist(rows, schema=SCHEMA)
    return tar


def _member(pool: FilePool, path: Path, entry: Entry, name: str, limit: int | None = None) -> bytes:
    if name not in entry.members:
        raise ValueError(f"member {name} is missing (there: {', '.join(sorted(entry.members)) or 'none'})")
    offset, size = entry.members[name]
    return pool.read(path, offset, size if limit is None else min(size, limit))


def _array_shape(pool: FilePool, path: Path, entry: Entry, name: str, dimensions: int) -> tuple[int, ...]:
    """Shape of a fp16 array whose header, size and dimensions agree."""
    dtype, shape, start = npy_header(_member(pool, path, entry, name, HEADER_BYTES))
    stored, wanted = entry.members[name][1] - start, dtype.itemsize
    for side in shape:
        wanted *= side
    said = f"{name} is {dtype} {'x'.join(map(str, shape))} by its header"
    if dtype.str != "<f2" or len(shape) != dimensions:
        raise ValueError(f"{said}; fp16 of {dimensions} dimensions is expected")
    if min(shape) < 1:
        raise ValueError(f"{said}: a dimension is zero")
    if stored != wanted:
        raise ValueError(f"{said}, {wanted} bytes, but holds {stored} bytes")
    return shape


def _read_info(pool: FilePool, path: Path, entry: Entry) -> dict[str, Any]:
    if entry.problem:
        raise ValueError(entry.problem)
    info = _json_object(pool, path, entry)
    missing = [name for name in (*SAME[:-1], "empty_text_length") if name not in info]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    _array_shape(pool, path, entry, "empty_text.npy", 2)
    return {**info, "empty_text": _member(pool, path, entry, "empty_text.npy")}


def _read_row(
    pool: FilePool, path: Path, entry: Entry, info: dict[str, Any], patch: tuple[int, int, int]
) -> dict[str, Any]:
    if entry.problem:
        raise ValueError(entry.problem)
    record = _json_object(pool, path, entry)
    channels, *sides = _array_shape(pool, path, entry, "latent.npy", 4)
    text_rows, text_width = _array_shape(pool, path, entry, "text.npy", 2)
    shape = "x".join(map(str, sides))
    if channels != len(info["latent_mean"]):
        raise ValueError(f"latent has {channels} channels, the corpus {len(info['latent_mean'])}")
    if any(side % size for side, size in zip(sides, patch, strict=True)):
        raise ValueError(f"latent {shape} is no multiple of the patch {'x'.join(map(str, patch))}")
    expected = npy_header(info["empty_text"])[1]
    if (text_rows, text_width) != expected:
        raise ValueError(f"text is {text_rows}x{text_width}, the corpus's {'x'.join(map(str, expected))}")
    text_length = _number(record, "text_length", int)
    if text_length is None or not 1 <= text_length <= text_rows:
        raise ValueError(f"text_length in its JSON is {text_length}, not from 1 to {text_rows}")
    return {
        "key": entry.key,
        "kind": "image" if sides[0] == 1 else "video",
        "offset": entry.offset,
        "size": entry.size,
        **dict(zip(("latent_frames", "latent_height", "latent_width"), sides, strict=True)),
        "tokens": latent_tokens(*sides, patch=patch),
        **{f"pixel_{name}": _number(record, name, int) for name in ("frames", "height", "width")},
        "fps": _number(record, "fps", (int, float)),
        "text_length": text_length,
    }


def _json_object(pool: FilePool, path: Path, entry: Entry) -> dict[str, Any]:
    try:
        found = json.loads(_member(pool, path, entry, "json"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"its JSON cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"its JSON is a {type(found).__name__}, not an object")
    return found


def _number(record: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> float | None:
    value = record.get(name)
    if value is not None and not (isinstance(value, kind) and abs(value) < 1 << 31):
        raise ValueError(f"{name} in its JSON is {value!r}, not a number such as is expected there")
    return value


def _join(tars: list[_Tar], folder: Path) -> tuple[pa.Table, list[Bad]]:
    """All rows with their shard, less every later row whose key an earlier one has."""
    names = [os.path.relpath(tar.path.resolve(), folder) for tar in tars]
    code = np.repeat(np.arange(len(tars), dtype=np.int32), [tar.table.num_rows for tar in tars])
    shard = pa.DictionaryArray.from_arrays(pa.array(code), pa.array(names, pa.string()))
    table = pa.concat_tables([tar.table for tar in tars] or [SCHEMA.empty_table()]).append_column(
        "shard", shard
    )
    if pc.count_distinct(table["key"]).as_py() == table.num_rows:
        return table, []
    first: dict[str, int] = {}
    keep, bad = [], []
    for row, key in enumerate(table["key"].to_pylist()):
        if first.setdefault(key, row) == row:
            keep.append(row)
        else:
            other = tars[code[first[key]]].path
            bad.append(
                {"file": str(tars[code[row]].path), "key": key, "reason": f"duplicate key, also in {other}"}
            )
    return table.take(keep), bad


def _common_info(tars: list[_Tar], folder: Path, patch: tuple[int, int, int]) -> dict[str, Any]:
    """What the shards say of the corpus: one codec and one text encoder, or it is not one corpus."""
    first = tars[0]
    for tar in tars:
        for name in SAME:
            if tar.info[name] != first.info[name]:
                values = "" if name == "empty_text" else f" ({first.info[name]} and {tar.info[name]})"
                raise CorpusError(
                    f"{first.path} and {tar.path} differ in {name}{values}. One corpus has one codec and one "
                    "text encoder; encode them alike, or index them apart."
                )
    place = {
        "shard": os.path.relpath(first.path.resolve(), folder),
        "offset": first.meta.offset,
        "size": first.meta.size,
    }
    return {
        **{name: value for name, value in first.info.items() if name != "empty_text"},
        "patch": patch,
        "meta": place,
    }
