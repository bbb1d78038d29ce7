"""Encoding: the same bytes whoever encodes and however often it was killed; names, captions, sizes."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import numpy as np
import pytest
import torch
from pictures import picture, shipped, write_video
from PIL import Image

from al_deepspeed.data.buckets import Buckets, parse_areas, parse_aspects, parse_lengths
from al_deepspeed.data.codec import DctCodec
from al_deepspeed.data.encode import Cut, encode
from al_deepspeed.data.index import index_shards
from al_deepspeed.data.shards import LatentDataset, read_members
from al_deepspeed.data.sources import list_sources
from al_deepspeed.data.tars import META, entries
from al_deepspeed.data.text import HashText
from al_deepspeed.errors import CorpusError

ASPECTS = "1:1,4:3,3:4,16:9,9:16"


def buckets(areas="64x64", *, lengths=None, max_frames=81, aspects=ASPECTS):
    return Buckets(parse_areas(areas), parse_aspects(aspects), max_frames, lengths, (16, 16), 4)


def encoded(source, out, *, cut=None, **options):
    cut = cut or Cut(buckets())
    return encode(source, out, codec=DctCodec(), text=HashText(8, 4), cut=cut, **options)


def records(out):
    """Key -> KEY.json of every sample in a folder of shards."""
    found = {}
    for shard in sorted(out.glob("*.tar")):
        for entry in entries(shard):
            if entry.key != META:
                run = shard.read_bytes()[entry.offset : entry.offset + entry.size]
                found[entry.key] = json.loads(read_members(run)["json"])
    return found


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def save(path, height=64, width=64, name="coffee.png"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(name, max(height, width))[:height, :width]).save(path)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    for number in range(5):
        save(folder / f"picture_{number}.png")
    write_video(folder / "clip.mkv", 11, height=64, width=64)
    return folder


def test_shared_work_gives_the_same_bytes(source, tmp_path):
    done = encoded(source, tmp_path / "one", sources_per_shard=2)
    assert (done.written, done.samples) == (3, 6)
    for number in (2, 0, 1):
        encoded(source, tmp_path / "three", sources_per_shard=2, shard=(number, 3))
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    assert set(contents(tmp_path / "one")) == {"encode.json", *(f"shard-00000{n}.tar" for n in range(3))}


def test_killed_and_resumed_gives_the_same_bytes(source, tmp_path):
    for number in range(30):
        shutil.copy(shipped("skimage", "data/astronaut.png"), source / f"large_{number:02d}.png")
    options = ["--areas", "256x256", "--sources-per-shard", "2", "--text-width", "4"]
    script = "from al_deepspeed.cli import main; main()"
    command = [sys.executable, "-c", script, "encode", str(source), *options, "--out"]
    out = tmp_path / "killed"
    process = subprocess.Popen([*command, str(out)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (out / "shard-000002.tar").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    there = {path.name for path in out.glob("*.tar")}
    assert "shard-000002.tar" in there and "shard-000017.tar" not in there  # it was in the middle
    subprocess.run([*command, str(out)], check=True, capture_output=True)
    cut = Cut(buckets("256x256", aspects="1:1,4:3,3:4,3:2,2:3,16:9,9:16"))
    encode(
        source,
        tmp_path / "unbroken",
        codec=DctCodec(),
        text=HashText(64, 4),
        cut=cut,
        sources_per_shard=2,
    )
    assert contents(out) == contents(tmp_path / "unbroken")


def test_resume_touches_nothing_that_is_there(source, tmp_path):
    out = tmp_path / "out"
    encoded(source, out, sources_per_shard=2)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    (out / "shard-000001.tar").unlink()
    done = encoded(source, out, sources_per_shard=2)
    assert (done.written, done.reused) == (1, 2)
    after = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"shard-000001.tar"}


def test_other_settings_or_sources_are_refused(source, tmp_path):
    encoded(source, tmp_path / "out")
    with pytest.raises(CorpusError, match=r"cut\.clips: 1 there, 2 now"):
        encoded(source, tmp_path / "out", cut=Cut(buckets(), clips=2))
    save(source / "one_more.png")
    with pytest.raises(CorpusError, match=r"sources\.count: 6 there, 7 now"):
        encoded(source, tmp_path / "out")


def test_latents_decode_to_the_picture(tmp_path):
    frame = picture("astronaut.png", 128)
    (tmp_path / "source").mkdir()
    Image.fromarray(frame).save(tmp_path / "source" / "a.png")
    encoded(tmp_path / "source", tmp_path / "out", cut=Cut(buckets("128x128")))
    manifest, _ = index_shards([tmp_path / "out"], tmp_path / "m.parquet")
    dataset = LatentDataset(manifest)
    back = DctCodec().decode(dataset[0]["latent"].numpy())[0]
    assert 10 * np.log10(255**2 / np.mean((frame.astype(float) - back) ** 2)) > 22
    assert dataset.latent_std.tolist() == pytest.approx(DctCodec().std)
    torch.testing.assert_close(dataset.empty_text, torch.from_numpy(HashText(8, 4).encode("")[0]))


def test_frames_are_4k_plus_1_up_to_the_limit(tmp_path):
    for frames in (1, 2, 4, 5, 8, 9, 14):
        (tmp_path / "source").mkdir(exist_ok=True)
        write_video(tmp_path / "source" / f"v{frames:02d}.mkv", frames)
    encoded(tmp_path / "source", tmp_path / "out", cut=Cut(buckets(max_frames=10)))
    assert [record["frames"] for record in records(tmp_path / "out").values()] == [1, 1, 1, 5, 5, 9, 9]


def test_listed_lengths_and_clips(tmp_path):
    (tmp_path / "source").mkdir()
    save(tmp_path / "source" / "p.png")
    write_video(tmp_path / "source" / "v.mkv", 23)
    cut = Cut(buckets(lengths=(5, 9)), all_sizes=True, clips=3)
    encoded(tmp_path / "source", tmp_path / "out", cut=cut)
    found = [(record["frames"], record["start"]) for record in records(tmp_path / "out").values()]
    assert found[0] == (1, 0)  # a picture is a picture whatever lengths videos may have
    assert found[1:] == [(5, 0), (5, 7), (5, 15), (9, 0), (9, 11)]  # 23 // 9 = 2 clips of 9 do not overlap
    with pytest.raises(CorpusError, match=r"v.mkv: has 23 frames; the shortest length in --frames is 25"):
        encoded(tmp_path / "source", tmp_path / "longer", cut=Cut(buckets(lengths=(25,))))


def test_sizes_follow_the_area_and_the_nearest_aspect():
    # 65536 pixels at 4:3: 295.6 wide, 221.7 high; in 16s 288 by 224. At 16:9: 341.3 by 192, so 336 by 192.
    # 4096 pixels at 4:3: 73.9 by 55.4, so 80 by 48, whose ratio 1.67 is nearer to 1.33 than that of 64 by 64.
    both = buckets("64x64,256x256")
    assert both.sizes(480, 640) == [(48, 80), (224, 288)]
    assert both.sizes(1080, 1920)[-1] == (192, 336)
    assert both.sizes(1920, 1080)[-1] == (336, 192)
    assert both.sizes(255, 255) == [(64, 64)]  # 256 would enlarge it
    assert both.sizes(10, 10) == [(64, 64)]  # every size would: the smallest
    for height, width in both.sizes(333, 500):
        assert height % 16 == 0 and width % 16 == 0


def test_one_source_at_every_size(source, tmp_path):
    cut = Cut(buckets("32x32,64x64"), all_sizes=True)
    encoded(source, tmp_path / "out", cut=cut)
    found = records(tmp_path / "out")
    assert [key for key in found if key.startswith("picture_0")] == [
        "picture_0-1x32x32-0",
        "picture_0-1x64x64-0",
    ]
    assert len([key for key in found if key.startswith("clip")]) == 2 * 3  # 1, 5 and 9 of 11 frames


def test_captions(tmp_path):
    folder = tmp_path / "source"
    for name in ("with_text.png", "with_json.png", "both.png", "A-red_fox2.png", "0001.png"):
        save(folder / name)
    (folder / "with_text.txt").write_text("\ufeff a caption é \n", encoding="utf-8")
    (folder / "with_json.json").write_text('{"caption": "from json", "other": 1}')
    (folder / "both.txt").write_text("text wins")
    (folder / "both.json").write_text('{"caption": "json loses"}')
    encoded(folder, tmp_path / "out")
    captions = {key: record["caption"] for key, record in records(tmp_path / "out").items()}
    assert captions == {
        "with_text": "a caption é",
        "with_json": "from json",
        "both": "text wins",
        "A-red_fox2": "A red fox",
        "0001": "",
    }
    lengths = {key: record["text_length"] for key, record in records(tmp_path / "out").items()}
    assert lengths["A-red_fox2"] == 4 and lengths["0001"] == 1  # words and the end mark


def test_keys(tmp_path):
    folder = tmp_path / "source"
    for name in ("a.b.png", "sub.d/c.png", "same.png", "same.jpg", "ünï ☃.png", ".hidden.png", "notes.md"):
        save(folder / "x.png")
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(folder / "x.png", folder / name)
    (folder / "x.png").unlink()
    assert [source.key for source in list_sources(folder)] == [
        "a_b",
        "same_jpg",
        "same_png",
        "sub.d/c",
        "ünï ☃",
    ]
    shutil.copy(folder / "a.b.png", folder / "a_b.png")
    with pytest.raises(CorpusError, match=r"a\.b\.png and a_b\.png both give the key 'a_b_png'"):
        list_sources(folder)


def test_raw_webdataset_tars(tmp_path):
    save(tmp_path / "p.png")
    png = (tmp_path / "p.png").read_bytes()
    write_video(tmp_path / "v.mkv", 5)
    members = [
        ("0001.jpg.png", png),
        ("0001.txt", b"a fox"),
        ("0002.png", png),
        ("0002.json", b'{"caption": "a bear"}'),
        ("0003.mkv", (tmp_path / "v.mkv").read_bytes()),
        ("0004.txt", b"no picture"),
        ("__meta__/notes.png", png),
    ]
    (tmp_path / "raw").mkdir()
    for name in ("x.tar", "y.tar"):
        with tarfile.open(tmp_path / "raw" / name, "w") as archive:
            for member, data in members:
                info = tarfile.TarInfo(member)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    encoded(tmp_path / "raw" / "x.tar", tmp_path / "one")
    assert {key: record["caption"] for key, record in records(tmp_path / "one").items()} == {
        "0001": "a fox",
        "0002": "a bear",
        "0003": "",
    }
    encoded(tmp_path / "raw", tmp_path / "both")
    assert list(records(tmp_path / "both")) == [f"{tar}/000{n}" for tar in "xy" for n in (1, 2, 3)]
    assert records(tmp_path / "both")["y/0003"]["source"] == "y.tar:0003.mkv"


def test_unusable_sources_are_named_or_left_out(source, tmp_path):
    (source / "broken.png").write_bytes((source / "picture_0.png").read_bytes()[:300])
    (source / "capt.json").write_text("{")
    save(source / "capt.png")
    whole = tmp_path / "whole.tar"
    with tarfile.open(whole, "w") as archive:
        archive.add(source / "picture_1.png", "in.png")
        archive.add(source / "picture_1.png", "../out.png")
        archive.add(source / "picture_1.png", "two.a.png")
        archive.add(source / "picture_1.png", "two.b.png")
    (source / "raw.tar").write_bytes(whole.read_bytes()[:-10240])
    with pytest.raises(CorpusError, match=r"broken\.png: cannot be decoded.*--skip-bad"):
        encoded(source, tmp_path / "strict")
    assert list((tmp_path / "strict").iterdir()) == [tmp_path / "strict" / "encode.json"]
    done = encoded(source, tmp_path / "out", skip_bad=True)
    bad = [json.loads(line) for line in (tmp_path / "out" / "shard-000000.bad.jsonl").open()]
    reasons = {one["source"]: one["reason"] for one in bad}
    assert done.bad == len(bad) == len(reasons) and "raw/in" in records(tmp_path / "out")
    for name, reason in {
        "broken.png": "cannot be decoded",
        "capt.png": "caption (.json) cannot be read",
        "raw.tar:../out": "absolute or parent path",
        "raw.tar": "corrupt tar",
    }.items():
        assert reason in reasons[name]


def test_two_media_of_one_raw_sample_are_refused(tmp_path):
    save(tmp_path / "p.png")
    with tarfile.open(tmp_path / "raw.tar", "w") as archive:
        archive.add(tmp_path / "p.png", "clip.v1.png")
        archive.add(tmp_path / "p.png", "clip.v2.png")  # WebDataset ends both keys at "clip"
    with pytest.raises(CorpusError, match="several pictures or videos"):
        encoded(tmp_path / "raw.tar", tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--areas", "64"], "--areas is '64'"),
        (["--aspects", "1"], "--aspects is '1'"),
        (["--frames", "17,18"], "--frames holds 18"),
        (["--frames", "a"], "--frames is 'a'"),
        (["--shard", "2/2"], "--shard is '2/2'"),
        (["--codec", "wan-vae"], "--codec wan-vae and --vae"),
        (["--patch", "1,2"], "--patch is '1,2'"),
        (["--fps", "0"], "--fps is 0.0"),
        (["--fps", "nan"], "--fps is nan"),
    ],
)
def test_bad_options(source, tmp_path, arguments, reason):
    from typer.testing import CliRunner

    from al_deepspeed.cli import app

    result = CliRunner().invoke(app, ["encode", str(source), "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code != 0
    assert reason in f"{result.exception} {result.output}"


def test_command_prints_one_json_object(source, tmp_path):
    from typer.testing import CliRunner

    from al_deepspeed.cli import app

    out = str(tmp_path / "out")
    result = CliRunner().invoke(app, ["encode", str(source), "--out", out, "--areas", "64x64", "--json"])
    assert json.loads(result.stdout)["samples"] == 6
    manifest = str(tmp_path / "m.parquet")
    result = CliRunner().invoke(app, ["index", out, "--out", manifest, "--json"])
    found = json.loads(result.stdout)
    assert (found["samples"], found["shapes"], found["bad"]) == (6, 2, 0) and len(found["fingerprint"]) == 64


def test_lengths_are_read():
    assert parse_lengths("17,33") == (17, 33)
