"""A manifest from a user's own table: planning needs sizes, not shards.

The table's columns are mapped to ours; a mapped value that is a number and no column is a constant. Pixels
become latent cells as the VAE and the model's patch make them: 4k+1 frames (for a stride of 4) and whole
patches, the rest cut off, as encoding would.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from al_deepspeed.data.index import Bad, parquet_name, settle_bad
from al_deepspeed.data.manifest import LARGEST_SIDE, SIZES, Manifest, metric_columns, write_manifest
from al_deepspeed.errors import CorpusError
from al_deepspeed.scheduling.shapes import PATCH, latent_tokens

PIXELS = ("pixel_frames", "pixel_height", "pixel_width")
MAPPABLE = (*SIZES, *PIXELS, "tokens", "key", "kind")
WHOLE = r"^\s*\+?[0-9]{1,12}(\.0*)?\s*$"


def index_csv(
    source: str | Path,
    out: str | Path,
    *,
    column_map: str = "",
    stride: tuple[int, int, int] = (4, 8, 8),
    patch: tuple[int, int, int] = PATCH,
    skip_bad: bool = False,
) -> tuple[Manifest, list[Bad]]:
    """Turn a .csv of sizes into a manifest without shards.

    Args:
        source: the table, with a header line.
        out: the manifest, .parquet.
        column_map: `ours=theirs,...`; columns that already bear our names need no mapping.
        stride: pixels a latent cell of the VAE, for rows given in pixels.
        patch: the model's patch, of which a latent's sides must be multiples.
        skip_bad: leave unusable rows out, listing them in OUT's `.bad.jsonl`, instead of raising.
    Returns:
        the manifest and the unusable rows, each {"file", "row", "reason"}; row 1 follows the header.
    Raises:
        CorpusError: no such table or column, sizes not mapped, or (unless skip_bad) unusable rows.
    """
    source, out = Path(source), parquet_name(out)
    table = _read(source)
    theirs = _mapped(column_map, table, source)
    rows = _Rows(table.num_rows)
    sides = []
    for axis, (latent, pixel) in enumerate(zip(SIZES, PIXELS, strict=True)):
        name = latent if latent in theirs else pixel
        if name not in theirs:
            raise CorpusError(
                f"{source}: neither {latent} nor {pixel} is given. It has {', '.join(table.column_names)}; "
                f"map a column or a constant: --map {pixel}=COLUMN or --map {pixel}=480"
            )
        given = rows.whole_numbers(name, theirs[name])
        cells = given if name == latent else _latent(given, stride[axis], patch[axis], temporal=axis == 0)
        rows.refuse(
            cells < 1,
            lambda row, name=name, given=given: f"{name} is {given[row]}: less than one latent patch",
        )
        rows.refuse(
            cells >= LARGEST_SIDE, lambda row, name=name, given=given: f"{name} is {given[row]}: too large"
        )
        rows.refuse(
            cells % patch[axis] != 0,
            lambda row, name=name, given=given: f"{name} is {given[row]}: no multiple of the patch {patch}",
        )
        sides.append(cells)
    columns = {name: pa.array(cells) for name, cells in zip(SIZES, sides, strict=True)}
    if "tokens" in theirs:
        columns["tokens"] = pa.array(rows.whole_numbers("tokens", theirs["tokens"]))
    else:
        columns["tokens"] = pa.array(latent_tokens(*sides, patch=patch))
    for name in ("key", "kind"):
        if name in theirs:
            columns[name] = rows.words(name, theirs[name])
    if "key" in theirs:
        rows.refuse(_repeats(columns["key"]), lambda row: f"duplicate key {columns['key'][row]}")
    for name in metric_columns(table):
        columns.setdefault(name, table[name])
    bad = [
        {"file": str(source), "row": row + 1, "reason": reason} for row, reason in sorted(rows.bad.items())
    ]
    settle_bad(out, bad, skip_bad)
    kept = pa.table(columns).filter(pa.array(rows.good))
    if not kept.num_rows:
        raise CorpusError(f"{source}: no usable row out of {table.num_rows}.")
    return write_manifest(out, kept, {"patch": patch, "stride": stride}), bad


class _Rows:
    """Which rows are good, and why the others are not: the first reason counts."""

    def __init__(self, count: int):
        self.good = np.ones(count, dtype=bool)
        self.bad: dict[int, str] = {}

    def refuse(self, mask: np.ndarray, explain: Callable[[int], str]) -> None:
        for row in np.flatnonzero(mask & self.good).tolist():
            self.bad[row] = explain(row)
        self.good &= ~mask

    def whole_numbers(self, name: str, column: pa.ChunkedArray | str) -> np.ndarray:
        """The column as int64; anything but a whole number of at least 1 is refused and becomes 0."""
        if isinstance(column, str):
            return np.full(len(self.good), int(column), dtype=np.int64)
        text = pc.fill_null(pc.cast(column, pa.large_string()), "")
        fine = pc.match_substring_regex(text, WHOLE)
        digits = (
            pc.extract_regex(pc.if_else(fine, text, "0"), r"(?P<whole>[0-9]+)")
            .combine_chunks()
            .field("whole")
        )
        values = pc.cast(digits, pa.int64()).to_numpy(zero_copy_only=False)
        self.refuse(
            values < 1, lambda row: f"{name} is {text[row].as_py()!r}, not a whole number of at least 1"
        )
        return values

    def words(self, name: str, column: pa.ChunkedArray | str) -> pa.Array:
        if isinstance(column, str):
            return pa.repeat(pa.scalar(column, pa.large_string()), len(self.good))
        text = pc.fill_null(pc.cast(column, pa.large_string()), "").combine_chunks()
        self.refuse(pc.equal(text, "").to_numpy(zero_copy_only=False), lambda row: f"{name} is empty")
        return text


def _read(source: Path) -> pa.Table:
    """The table with numbers as numbers, and words and columns of both as words."""
    if not source.is_file():
        raise CorpusError(f"{source}: no such table.")
    try:
        return pyarrow.csv.read_csv(source)
    except (pa.ArrowException, OSError) as error:
        raise CorpusError(f"{source}: cannot be read as a .csv with a header line: {error}") from error


def _mapped(column_map: str, table: pa.Table, source: Path) -> dict[str, pa.ChunkedArray | str]:
    """Our name -> their column, or a constant as its digits (for kind, as its word)."""
    theirs: dict[str, Any] = {name: table[name] for name in MAPPABLE if name in table.column_names}
    for pair in filter(None, (part.strip() for part in column_map.split(","))):
        ours, equals, given = pair.partition("=")
        if not equals or ours not in MAPPABLE:
            raise CorpusError(
                f"--map holds {pair!r}; OURS=COLUMN is needed, OURS one of {', '.join(MAPPABLE)}."
            )
        if given in table.column_names:
            theirs[ours] = table[given]
        elif (given.isdecimal() and ours != "key") or ours == "kind":
            theirs[ours] = given
        else:
            raise CorpusError(
                f"--map {pair}: {source} has no column {given!r}. It has {', '.join(table.column_names)}; a "
                "constant is given as a whole number."
            )
    return theirs


def _latent(pixels: np.ndarray, stride: int, patch: int, *, temporal: bool) -> np.ndarray:
    """Latent cells of so many pixels. In time the first frame is a cell of its own (a causal VAE)."""
    cells = np.where(pixels > 0, 1 + (pixels - 1) // stride, 0) if temporal else pixels // stride
    return cells // patch * patch


def _repeats(keys: pa.Array) -> np.ndarray:
    """True where an earlier row has the same key."""
    codes = keys.dictionary_encode().indices.to_numpy()
    first = np.zeros(len(codes), dtype=bool)
    first[np.unique(codes, return_index=True)[1]] = True
    return ~first
