"""Manifests: what is read, what is refused, buckets, fingerprints."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from al_deepspeed.data.manifest import complete_table, read_manifest, table_fingerprint, write_manifest
from al_deepspeed.errors import CorpusError

SHAPES = [(1, 32, 32), (5, 16, 16), (1, 32, 32), (1, 16, 16), (21, 90, 160)]


def table(shapes=SHAPES, **further):
    frames, height, width = zip(*shapes, strict=True)
    return pa.table({"latent_frames": frames, "latent_height": height, "latent_width": width, **further})


def test_csv_with_sizes_alone(tmp_path):
    (tmp_path / "m.csv").write_text("latent_frames,latent_height,latent_width\n1,32,32\n21,90,160\n1,8,8\n")
    manifest = read_manifest(tmp_path / "m.csv")
    rows = manifest.table.to_pylist()
    assert [row["kind"] for row in rows] == ["image", "video", "image"]
    assert [row["key"] for row in rows] == ["0", "1", "2"]
    assert [row["tokens"] for row in rows] == [256, 21 * 45 * 80, 16]
    corpus = manifest.corpus()
    assert corpus.tokens.tolist() == [16, 256, 75600] and corpus.bucket.tolist() == [1, 2, 0]


def test_csv_keeps_names_kinds_tokens_and_metrics(tmp_path):
    (tmp_path / "m.csv").write_text(
        "key,kind,latent_frames,latent_height,latent_width,tokens,motion,note\n007,image,1,8,8,99,0.5,x\n"
        "b,clip,1,8,8,99,1.5,y\n"
    )
    manifest = read_manifest(tmp_path / "m.csv")
    corpus = manifest.corpus()
    assert manifest.table["key"].to_pylist() == ["007", "b"]
    assert corpus.kinds == ("clip", "image") and corpus.tokens.tolist() == [99, 99]
    assert list(corpus.metrics) == ["motion"] and corpus.metrics["motion"].tolist() == [0.5, 1.5]
    assert corpus.sample_name(0) == "row 0 (key 007)"


def test_a_blank_kind_is_none_given(tmp_path):
    (tmp_path / "m.csv").write_text(
        "kind,latent_frames,latent_height,latent_width\n,1,8,8\nclip,1,8,8\n ,5,8,8\n"
    )
    assert read_manifest(tmp_path / "m.csv").table["kind"].to_pylist() == ["image", "clip", "video"]
    for kinds in (pa.array([None, "clip", ""]), pa.array([None, "clip", ""]).dictionary_encode()):
        given = complete_table(table([(1, 8, 8), (1, 8, 8), (5, 8, 8)], kind=kinds), "m")
        assert given["kind"].to_pylist() == ["image", "clip", "video"]


def test_blanks_around_a_kind_are_none_of_it(tmp_path):
    (tmp_path / "m.csv").write_text(
        "kind,latent_frames,latent_height,latent_width\n image ,1,8,8\nimage,1,8,8\n"
    )
    manifest = read_manifest(tmp_path / "m.csv")
    assert manifest.table["kind"].to_pylist() == ["image", "image"]
    assert manifest.corpus().kinds == ("image",)
    kinds = pa.array([" a", "a", "a\t"])
    for column in (kinds, kinds.dictionary_encode(), kinds.cast(pa.large_string())):
        given = complete_table(table([(1, 8, 8)] * 3, kind=column), "m")
        assert given["kind"].to_pylist() == ["a", "a", "a"]


def test_corpus_agrees_with_a_plain_loop(tmp_path):
    random = np.random.default_rng(0)
    shapes = [tuple(int(side) for side in random.choice([2, 4, 6, 8], 3)) for _ in range(500)]
    kinds = random.choice(["video", "image", "other"], 500).tolist()
    corpus = write_manifest(tmp_path / "m.parquet", table(shapes, kind=kinds), {}).corpus()
    tokens = [frames * (height // 2) * (width // 2) for frames, height, width in shapes]
    buckets = sorted({(s, shape, kind) for s, shape, kind in zip(tokens, shapes, kinds, strict=True)})
    assert corpus.tokens.tolist() == [bucket[0] for bucket in buckets]
    assert [tuple(shape) for shape in corpus.shapes.tolist()] == [bucket[1] for bucket in buckets]
    assert list(corpus.kinds) == [bucket[2] for bucket in buckets]
    expected = [buckets.index(row) for row in zip(tokens, shapes, kinds, strict=True)]
    assert corpus.bucket.tolist() == expected


def test_fingerprint_is_of_the_rows(tmp_path):
    written = write_manifest(
        tmp_path / "a.parquet", table(motion=[0.0, 1.0, 2.0, 3.0, 4.0]), {"codec": "dct"}
    )
    (tmp_path / "else").mkdir()
    (tmp_path / "a.parquet").rename(tmp_path / "else" / "b.parquet")
    moved = read_manifest(tmp_path / "else" / "b.parquet")
    assert moved.fingerprint == written.fingerprint and moved.info == {"codec": "dct"}
    stored = pq.read_schema(moved.path).metadata[b"al_deepspeed"]
    assert written.fingerprint.encode() in stored
    others = [
        moved.table.slice(0, 4),
        moved.table.take([1, 0, 2, 3, 4]),
        moved.table.set_column(
            moved.table.column_names.index("motion"), "motion", [[0.0, 1.0, 2.0, 3.0, 5.0]]
        ),
        moved.table.set_column(0, "key", [["0", "1", "2", "3", "five"]]),
    ]
    prints = {written.fingerprint, *map(table_fingerprint, others)}
    assert len(prints) == 5


def test_fingerprint_does_not_see_chunks_or_integer_widths(tmp_path):
    whole = write_manifest(tmp_path / "a.parquet", table(), {}).table
    pieces = pa.concat_tables([whole.slice(0, 2), whole.slice(2)])
    wide = pieces.set_column(
        pieces.column_names.index("tokens"), "tokens", pieces["tokens"].cast(pa.uint32())
    )
    assert table_fingerprint(wide) == table_fingerprint(whole)


def test_a_filtered_table_gets_its_own_fingerprint(tmp_path):
    written = write_manifest(tmp_path / "a.parquet", table(), {})
    pq.write_table(pq.read_table(tmp_path / "a.parquet").slice(0, 3), tmp_path / "b.parquet")
    assert read_manifest(tmp_path / "b.parquet").fingerprint != written.fingerprint


def test_key_that_spans_a_slice_hashes_alike():
    keys = ["aa", "b", "ccc", "d"]
    sizes = {name: [1] * 4 for name in ("latent_frames", "latent_height", "latent_width", "tokens")}
    longer = pa.table(
        {"key": ["zzzz", *keys], "kind": ["image"] * 5, **{n: [9, *v] for n, v in sizes.items()}}
    )
    assert table_fingerprint(longer.slice(1)) == table_fingerprint(
        pa.table({"key": keys, "kind": ["image"] * 4, **sizes})
    )


CSV = {
    "zero": ("latent_frames,latent_height,latent_width\n1,2,2\n0,2,2\n", "latent_frames is 0 in row 1"),
    "negative": ("latent_frames,latent_height,latent_width\n1,2,-2\n", "latent_width is -2 in row 0"),
    "fraction": ("latent_frames,latent_height,latent_width\n1,2.5,2\n", r"latent_height is 2\.5 in row 0"),
    "blank": (
        "latent_frames,latent_height,latent_width\n1,2,2\n1,,2\n",
        "latent_height is absent or no number in row 1",
    ),
    "nan": (
        "latent_frames,latent_height,latent_width\nnan,2,2\n",
        "latent_frames is absent or no number in row 0",
    ),
    "words": ("latent_frames,latent_height,latent_width\n1,two,2\n", "latent_height is 'two' in row 0"),
    "huge": ("latent_frames,latent_height,latent_width\n1,2,2000000\n", "latent_width is 2000000"),
    "column": ("frames,height,width\n1,2,2\n", "latent_frames, latent_height, latent_width missing"),
    "twice": (
        "latent_frames,latent_height,latent_width,latent_frames\n1,2,2,1\n",
        r"latent_frames stand there more than once",
    ),
    "no rows": ("latent_frames,latent_height,latent_width\n", "no rows"),
    "no file": (None, "no such manifest"),
    "nothing": ("", "cannot be read as a table"),
    "two lengths": (
        "latent_frames,latent_height,latent_width,tokens\n1,2,2,1\n1,2,2,3\n",
        "3 in another|3 tokens",
    ),
}


@pytest.mark.parametrize("kind", CSV)
def test_refusals(tmp_path, kind):
    text, reason = CSV[kind]
    if text is not None:
        (tmp_path / "m.csv").write_text(text)
    with pytest.raises(CorpusError, match=f"m.csv.*({reason})"):
        read_manifest(tmp_path / "m.csv").corpus()


def test_not_a_parquet_file(tmp_path):
    (tmp_path / "m.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(CorpusError, match="cannot be read as a table"):
        read_manifest(tmp_path / "m.parquet")
    with pytest.raises(CorpusError, match=r"ends in \.parquet or \.csv"):
        (tmp_path / "m.txt").touch()
        read_manifest(tmp_path / "m.txt")
