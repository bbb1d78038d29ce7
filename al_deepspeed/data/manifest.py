"""The manifest: one row a sample, a Parquet or CSV file, read into columns and never into Python rows.

A row number is the sample's id everywhere else. The fingerprint is a SHA-256 over what the rows say about the
samples (names, kinds, sizes, further numbers), not over where the shards lie: a corpus that was moved or
packed into other shards keeps its fingerprint, one that gained, lost or reordered a row does not.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from al_deepspeed.data.files import atomic_path
from al_deepspeed.errors import CorpusError

if TYPE_CHECKING:
    from al_deepspeed.scheduling.shapes import Corpus

METADATA_KEY = b"al_deepspeed"
SIZES = ("latent_frames", "latent_height", "latent_width")
PLACES = ("shard", "offset", "size")
NOT_METRICS = {"key", "kind", "tokens", *SIZES, *PLACES}
LARGEST_SIDE = 1 << 20


@dataclass(frozen=True)
class Manifest:
    """A corpus as rows.

    path: the file it was read from; shard paths in the table are relative to its folder.
    table: the rows; integer columns as they were stored, `kind` and `shard` dictionary-encoded.
    fingerprint: hex SHA-256 over the rows' content, wherever the file and its shards lie.
    info: what `index` recorded about the corpus (codec, latent mean and std, text encoder); empty for a CSV.
    """

    path: Path
    table: pa.Table
    fingerprint: str
    info: dict[str, Any] = field(default_factory=dict)

    def corpus(self) -> "Corpus":
        """The rows as the scheduler sees them: buckets of distinct (kind, shape) by (S, shape, kind)."""
        from al_deepspeed.scheduling.shapes import Corpus

        kind = self.table["kind"].combine_chunks()
        kinds, code = kind.dictionary.to_pylist(), kind.indices.to_numpy().astype(np.int64)
        sides = [self.table[name].to_numpy() for name in SIZES]
        for side in sides:
            code = code * LARGEST_SIDE + side
        grouped = pa.array(code).dictionary_encode()
        bucket, distinct = grouped.indices.to_numpy(), grouped.dictionary.to_numpy()
        tokens = self.table["tokens"].to_numpy()
        bucket_tokens = np.zeros(len(distinct), dtype=np.int64)
        bucket_tokens[bucket] = tokens
        shapes = np.stack([distinct // LARGEST_SIDE**power % LARGEST_SIDE for power in (2, 1, 0)], axis=1)
        bucket_kinds = [kinds[index] for index in distinct // LARGEST_SIDE**3]
        if (bucket_tokens[bucket] != tokens).any():
            row = int(np.flatnonzero(bucket_tokens[bucket] != tokens)[0])
            shape = "x".join(map(str, shapes[bucket[row]]))
            raise CorpusError(
                f"{self.path}: shape {shape} has {tokens[row]} tokens in row {row} and "
                f"{bucket_tokens[bucket[row]]} in another. One shape has one sequence length."
            )
        order = np.lexsort((np.array(bucket_kinds, dtype=str), *shapes.T[::-1], bucket_tokens))
        rank = np.empty(len(order), dtype=np.int32)
        rank[order] = np.arange(len(order))
        return Corpus(
            shapes=shapes[order],
            tokens=bucket_tokens[order],
            kinds=tuple(bucket_kinds[index] for index in order),
            bucket=rank[bucket],
            fingerprint=self.fingerprint,
            metrics={name: self.table[name].to_numpy() for name in metric_columns(self.table)},
            keys=self.table["key"],
        )


def read_manifest(path: str | Path) -> Manifest:
    """Read a manifest that `al-deepspeed index` wrote, or a table of shapes as .csv or .parquet.

    Needed columns: latent_frames, latent_height, latent_width. Made up where absent: tokens (patch 1x2x2),
    kind (one latent frame is an image; also where blank), key (the row number). Further numeric columns
    become metrics.

    Raises:
        CorpusError: no such file, not a table, no rows, a needed column absent or not whole numbers >= 1.
    """
    path = Path(path)
    if not path.is_file():
        raise CorpusError(f"{path}: no such manifest. Make one with: al-deepspeed index DIR --out {path}")
    readers = {".parquet": _read_parquet, ".csv": _read_csv}
    if path.suffix not in readers:
        raise CorpusError(f"{path}: a manifest ends in .parquet or .csv, not {path.suffix or 'nothing'!r}.")
    try:
        table, info = readers[path.suffix](path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorpusError(f"{path}: cannot be read as a table: {error}") from error
    table = complete_table(table, str(path))
    return Manifest(path, table, table_fingerprint(table), info)


def write_manifest(path: str | Path, table: pa.Table, info: dict[str, Any]) -> Manifest:
    """Write the rows and, in the file's metadata, their fingerprint and `info`; whole or not at all."""
    path = Path(path)
    table = complete_table(table, str(path))
    fingerprint = table_fingerprint(table)
    metadata = {METADATA_KEY: json.dumps({"fingerprint": fingerprint, **info}, sort_keys=True).encode()}
    with atomic_path(path) as temporary:
        repeating = [name for name in table.column_names if name not in ("key", "offset")]
        pq.write_table(
            table.replace_schema_metadata(metadata), temporary, compression="zstd", use_dictionary=repeating
        )
    return Manifest(path, table, fingerprint, info)


def complete_table(table: pa.Table, where: str) -> pa.Table:
    """Check the rows, make up absent columns, and make every column one chunk of its usual type."""
    twice = {name for name in table.column_names if table.column_names.count(name) > 1}
    if twice:
        raise CorpusError(f"{where}: column(s) {', '.join(sorted(twice))} stand there more than once.")
    missing = [name for name in SIZES if name not in table.column_names]
    if missing:
        raise CorpusError(
            f"{where}: column(s) {', '.join(missing)} missing; it has {', '.join(table.column_names)}. "
            "A table of your own is turned into a manifest with: al-deepspeed index --from-csv FILE --map ..."
        )
    if table.num_rows == 0:
        raise CorpusError(f"{where}: no rows. A corpus needs at least one sample; check what was indexed.")
    columns = {name: _one_chunk(table[name]) for name in table.column_names}
    for name in SIZES:
        columns[name] = _whole_numbers(columns[name], name, where, LARGEST_SIDE, pa.int32())
    if "tokens" in columns:
        columns["tokens"] = _whole_numbers(columns["tokens"], "tokens", where, 1 << 62, pa.int64())
    else:
        columns["tokens"] = pa.array(_tokens(columns))
    columns["kind"] = _kinds(columns.get("kind"), columns["latent_frames"])
    if not pa.types.is_dictionary(columns["kind"].type):
        columns["kind"] = columns["kind"].dictionary_encode()
    if "key" not in columns:
        columns["key"] = pc.cast(pa.array(np.arange(table.num_rows)), pa.large_string())
    columns["key"] = pc.cast(_text(columns["key"], "key", where), pa.large_string())
    first = [name for name in ("key", "kind", *PLACES, *SIZES, "tokens") if name in columns]
    names = first + [name for name in columns if name not in first]
    return pa.table({name: columns[name] for name in names})


def metric_columns(table: pa.Table) -> list[str]:
    """Names of the numeric columns beyond those that every manifest has, in alphabetical order."""
    return sorted(
        column.name
        for column in table.schema
        if column.name not in NOT_METRICS
        and (pa.types.is_integer(column.type) or pa.types.is_floating(column.type))
    )


def table_fingerprint(table: pa.Table) -> str:
    """SHA-256 over names, kinds, sizes, tokens and metrics, whatever their integer widths."""
    digest = hashlib.sha256()
    for name in ("key", "kind", *SIZES, "tokens", *metric_columns(table)):
        column = table[name].combine_chunks()
        digest.update(name.encode() + b"\0")
        if name in ("key", "kind"):
            column = pc.cast(column, pa.large_string())
            offsets = np.frombuffer(column.buffers()[1], dtype=np.int64)
            offsets = offsets[column.offset : column.offset + len(column) + 1]
            digest.update(np.diff(offsets).astype(np.int32))
            if offsets[-1] > offsets[0]:
                digest.update(memoryview(column.buffers()[2])[offsets[0] : offsets[-1]])
        else:
            wide = pa.types.is_floating(column.type) or column.null_count
            digest.update(np.ascontiguousarray(column.to_numpy(zero_copy_only=False), "f8" if wide else "i8"))
    return digest.hexdigest()


def _read_parquet(path: Path) -> tuple[pa.Table, dict[str, Any]]:
    table = pq.read_table(path, read_dictionary=["kind", "shard"])
    recorded = (table.schema.metadata or {}).get(METADATA_KEY, b"{}")
    info = json.loads(recorded)
    info.pop("fingerprint", None)  # a table that a user filtered still carries the old one
    return table.replace_schema_metadata(None), info


def _read_csv(path: Path) -> tuple[pa.Table, dict[str, Any]]:
    named = {"key": pa.large_string(), "kind": pa.dictionary(pa.int32(), pa.string())}
    options = pyarrow.csv.ConvertOptions(column_types=named, strings_can_be_null=False)
    return pyarrow.csv.read_csv(path, convert_options=options), {}


def _tokens(columns: dict[str, pa.Array]) -> np.ndarray:
    from al_deepspeed.scheduling.shapes import latent_tokens

    return latent_tokens(*(columns[name].to_numpy().astype(np.int64) for name in SIZES))


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    if pa.types.is_string(column.type):
        column = column.cast(pa.large_string())
    whole = column.combine_chunks()
    return whole.combine_chunks() if isinstance(whole, pa.ChunkedArray) else whole


def _kinds(given: pa.Array | None, frames: pa.Array) -> pa.Array:
    """A kind a row, without blanks around it; where none is given, one latent frame is an image."""
    made_up = pc.if_else(pc.equal(frames, 1), "image", "video")
    if given is None:
        return made_up
    is_dictionary = pa.types.is_dictionary(given.type)
    words = given.dictionary if is_dictionary else given
    trimmed = _trimmed(words)
    as_given = pc.and_(pc.equal(trimmed, pc.cast(words, pa.string())), pc.not_equal(trimmed, ""))
    if not given.null_count and pc.all(as_given).as_py():
        return _text(given, "kind", "")
    trimmed = _trimmed(given.dictionary_decode()) if is_dictionary else trimmed
    return pc.if_else(pc.fill_null(pc.equal(trimmed, ""), True), made_up, trimmed)


def _trimmed(words: pa.Array) -> pa.Array:
    return pc.utf8_trim_whitespace(pc.cast(words, pa.string()))


def _text(column: pa.Array, name: str, where: str) -> pa.Array:
    values = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_string(values) or pa.types.is_large_string(values)):
        column = pc.cast(column, pa.string())
    if column.null_count:
        row = pc.index(pc.is_null(column), True).as_py()
        raise CorpusError(f"{where}: row {row} has no {name}; give every row one, or leave the column out.")
    return column


def _whole_numbers(column: pa.Array, name: str, where: str, below: int, dtype: pa.DataType) -> pa.Array:
    """The column as integers; the first row that is absent, not whole, < 1 or too large is named."""
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        values = column.to_numpy(zero_copy_only=False)
    else:  # words among the numbers make a column of words
        values = np.array([_float(value) for value in column.to_pylist()])
    with np.errstate(invalid="ignore"):
        good = (values >= 1) & (values < below)
        if values.dtype.kind == "f":
            good &= values == np.floor(values)
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        given = column[row].as_py()
        found = "absent or no number" if given in (None, "") else repr(given)
        raise CorpusError(
            f"{where}: {name} is {found} in row {row} ({int((~good).sum())} such row(s)); it must be a whole "
            f"number from 1 to {below - 1}. Correct or remove the rows, as `index --skip-bad` does."
        )
    return pa.array(values.astype(dtype.to_pandas_dtype()))


def _float(value: object) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
