"""Manifests from a user's own table: mapping, pixels to latent cells, refused rows."""

import json

import pytest

from al_deepspeed.data.table import index_csv
from al_deepspeed.errors import CorpusError


def index(tmp_path, text, column_map="", **options):
    (tmp_path / "own.csv").write_text(text)
    return index_csv(tmp_path / "own.csv", tmp_path / "m.parquet", column_map=column_map, **options)


def shapes(manifest):
    return manifest.corpus().shapes[manifest.corpus().bucket].tolist()


def test_pixels_become_latent_cells(tmp_path):
    # Stride 4x8x8, patch 1x2x2. 81 frames: 1 + 80/4 = 21. 720/8 = 90. 1280/8 = 160. 640/8 = 80.
    # 427/8 = 53.4, so 53 cells, so 52 in whole patches; 84 frames give 21 latent frames and 3 frames over.
    text = "id,f,h,w\na,81,720,1280\nb,1,640,427\nc,84,16,16\n"
    manifest, bad = index(tmp_path, text, "key=id,pixel_frames=f,pixel_height=h,pixel_width=w")
    assert shapes(manifest) == [[21, 90, 160], [1, 80, 52], [21, 2, 2]] and not bad
    assert manifest.table["kind"].to_pylist() == ["video", "image", "video"]
    assert manifest.table["key"].to_pylist() == ["a", "b", "c"]


def test_another_stride_and_constants(tmp_path):
    # Wan 2.2 TI2V-5B: stride 4x16x16. 704/16 = 44, 1280/16 = 80.
    manifest, _ = index(
        tmp_path, "n\n121\n", "pixel_frames=n,pixel_height=704,pixel_width=1280", stride=(4, 16, 16)
    )
    assert shapes(manifest) == [[31, 44, 80]] and manifest.corpus().tokens.tolist() == [31 * 22 * 40]


def test_latent_sizes_and_metrics_pass_through(tmp_path):
    text = "t,latent_height,latent_width,clip,note\n3,4,6,0.5,x\n1,2,2,0.25,y\n"
    manifest, _ = index(tmp_path, text, "latent_frames=t")
    assert shapes(manifest) == [[3, 4, 6], [1, 2, 2]]
    assert sorted(manifest.corpus().metrics) == ["clip", "t"]


ROWS = {
    "0": "pixel_frames is '0'",
    "-3": "pixel_frames is '-3'",
    "": "pixel_frames is ''",
    "2.5": r"pixel_frames is '2\.5'",
    "nan": "pixel_frames is ''",
    "many": "pixel_frames is 'many'",
    "9999999": "too large",
}


@pytest.mark.parametrize("value", ROWS)
def test_bad_rows_are_named_or_left_out(tmp_path, value):
    text = f"k,f\na,5\nb,{value}\nc,9.0\n"
    options = "key=k,pixel_frames=f,pixel_height=32,pixel_width=32"
    with pytest.raises(CorpusError, match=f"own.csv, row 2, reason.*{ROWS[value]}"):
        index(tmp_path, text, options)
    manifest, bad = index(tmp_path, text, options, skip_bad=True)
    assert manifest.table["key"].to_pylist() == ["a", "c"]
    assert [json.loads(line)["row"] for line in (tmp_path / "m.bad.jsonl").open()] == [2] and len(bad) == 1


def test_less_than_a_patch_odd_latents_and_repeated_keys(tmp_path):
    with pytest.raises(CorpusError, match=r"row 1.*pixel_height is 15: less than one latent patch"):
        index(tmp_path, "h\n15\n", "pixel_frames=1,pixel_height=h,pixel_width=64")
    with pytest.raises(CorpusError, match=r"row 2.*latent_width is 3: no multiple"):
        index(tmp_path, "w\n4\n3\n", "latent_frames=1,latent_height=4,latent_width=w")
    with pytest.raises(CorpusError, match=r"row 3.*duplicate key a"):
        index(tmp_path, "k\na\nb\na\n", "key=k,pixel_frames=1,pixel_height=64,pixel_width=64")


@pytest.mark.parametrize(
    ("column_map", "reason"),
    [
        ("pixel_frames=f", "neither latent_height nor pixel_height"),
        ("pixel_frames=g", "no column 'g'"),
        ("frames=f", "OURS one of"),
        ("pixel_frames", "OURS=COLUMN"),
    ],
)
def test_bad_maps(tmp_path, column_map, reason):
    with pytest.raises(CorpusError, match=reason):
        index(tmp_path, "f\n1\n", column_map)


def test_no_usable_row(tmp_path):
    with pytest.raises(CorpusError, match="no usable row out of 1"):
        index(tmp_path, "f\n0\n", "pixel_frames=f,pixel_height=64,pixel_width=64", skip_bad=True)
    with pytest.raises(CorpusError, match="no such table"):
        index_csv(tmp_path / "absent.csv", tmp_path / "m.parquet")
