"""The dct codec against SciPy's DCT and real pictures; the wan-vae codec against the VAE itself."""

import numpy as np
import pytest
import torch
from pictures import NATURAL, clip, picture
from scipy.fft import dctn

from al_deepspeed.data.codec import BLUE, COEFFICIENTS, LUMA, DctCodec, WanVaeCodec
from al_deepspeed.errors import CorpusError

CLIPS = ("bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4")


@pytest.fixture(scope="module")
def codec():
    return DctCodec()


def raw(codec, latent):
    """Coefficients as they were before normalising."""
    column = (-1, 1, 1, 1)
    return latent * np.reshape(codec.std, column) + np.reshape(codec.mean, column)


def psnr(original, decoded):
    return 10 * np.log10(255**2 / np.mean((original.astype(float) - decoded) ** 2))


def test_white_is_luma_alone(codec):
    # White is +1 everywhere; an orthonormal transform of 4 x 8 x 8 ones has a mean term of sqrt(256) = 16.
    latent = raw(codec, codec.encode(np.full((1, 8, 16, 3), 255, np.uint8)))
    assert latent.shape == (16, 1, 1, 2)
    np.testing.assert_allclose(latent[0], 16, rtol=1e-6)
    np.testing.assert_allclose(latent[1:], 0, atol=1e-5)


def test_coefficients_equal_scipys_dct(codec):
    frames = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    found = raw(codec, codec.encode(frames))
    rgb = frames / 127.5 - 1
    luma = rgb @ [0.299, 0.587, 0.114]
    planes = {LUMA: luma, BLUE: (rgb[..., 2] - luma) / 1.772}  # BT.601 as JPEG has it
    for channel, (plane, *frequency, _, _) in enumerate(COEFFICIENTS):
        if plane in planes:
            later = dctn(planes[plane][1:], norm="ortho")[tuple(frequency)]
            still = dctn(np.repeat(planes[plane][:1], 4, axis=0), norm="ortho")[tuple(frequency)]
            np.testing.assert_allclose(found[channel, :, 0, 0], [still, later], atol=2e-5)


def test_still_video_repeats_the_picture(codec):
    still = np.repeat(picture("chelsea.png", 64)[None], 9, axis=0)
    latent = codec.encode(still)
    assert latent.shape == (16, 3, 8, 8)
    np.testing.assert_allclose(latent[:, 1:], np.repeat(latent[:, :1], 2, axis=1), atol=1e-5)
    np.testing.assert_array_equal(latent[:, :1], codec.encode(still[:1]))


def test_causal(codec):
    frames = np.random.default_rng(1).integers(0, 256, (9, 16, 16, 3), dtype=np.uint8)
    changed = frames.copy()
    changed[5:] = 0
    np.testing.assert_array_equal(codec.encode(frames)[:, :2], codec.encode(changed)[:, :2])


@pytest.mark.parametrize("name", NATURAL)
def test_psnr_of_real_pictures(codec, name):
    frame = picture(name, 256)[None]
    assert psnr(frame, codec.decode(codec.encode(frame).astype(np.float16))) > 24


@pytest.mark.parametrize("name", CLIPS)
def test_psnr_of_real_clips(codec, name):
    frames = clip(name, 128, 17)
    decoded = codec.decode(codec.encode(frames).astype(np.float16))
    assert decoded.shape == frames.shape and psnr(frames, decoded) > 24


def test_unit_variance_on_real_pictures_and_clips(codec):
    stills = [codec.encode(picture(name, 128)[None]).reshape(16, -1) for name in NATURAL]
    clips = [codec.encode(clip(name, 128, 33))[:, 1:].reshape(16, -1) for name in CLIPS]
    moving = np.array([row[1] > 0 for row in COEFFICIENTS])  # only clips have these
    squares = np.stack([(latent**2).mean(axis=1) for latent in (*stills, *clips)])
    variance = np.where(moving, squares[len(stills) :].mean(axis=0), squares.mean(axis=0))
    assert (variance > 0.3).all() and (variance < 3).all(), variance


@pytest.mark.parametrize("shape", [(2, 8, 8, 3), (4, 8, 8, 3), (1, 12, 8, 3), (5, 8, 9, 3)])
def test_refuses_partial_cells(codec, shape):
    with pytest.raises(CorpusError, match="latent cells of 4x8x8"):
        codec.encode(np.zeros(shape, np.uint8))


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory):
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.5, -0.5, 0.0, 1.0],
        latents_std=[1.0, 2.0, 0.5, 4.0],
    )
    folder = tmp_path_factory.mktemp("model")
    vae.save_pretrained(folder / "vae")  # as in a whole pipeline's folder
    return folder


def test_wan_vae_is_the_vae_normalised(vae_folder):
    from diffusers import AutoencoderKLWan

    frames = clip("bikes.mp4", 32, 5)
    codec = WanVaeCodec(str(vae_folder), "cpu")
    assert codec.stride == (4, 8, 8)
    latent = codec.encode(frames)
    assert latent.shape == (4, 2, 4, 4)
    vae = AutoencoderKLWan.from_pretrained(vae_folder / "vae")
    with torch.no_grad():
        pixels = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
        mode = vae.encode(pixels).latent_dist.mode()[0].numpy()
    for channel, (mean, std) in enumerate([(0.5, 1.0), (-0.5, 2.0), (0.0, 0.5), (1.0, 4.0)]):
        np.testing.assert_allclose(latent[channel], (mode[channel] - mean) / std, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(latent, WanVaeCodec(str(vae_folder / "vae"), "cpu").encode(frames))
    assert codec.decode(latent).shape == frames.shape


def test_folder_without_a_vae_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="holds no AutoencoderKLWan"):
        WanVaeCodec(str(tmp_path))
