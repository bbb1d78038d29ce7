"""24 random latents in 4 shapes, as real shards with a manifest: seconds of training on two ranks."""

from pathlib import Path

from al_deepspeed.data.noise import write_noise

CHANNELS, TEXT_LENGTH, TEXT_DIM = 4, 3, 8
# Latent shape -> samples. S is 4, 16, 18 and 80.
SHAPES = {(1, 4, 4): 9, (1, 8, 8): 6, (3, 4, 6): 5, (5, 8, 8): 4}


def make_corpus(folder: Path) -> Path:
    """Writes the shard and returns the manifest's path."""
    return write_noise(folder, SHAPES, channels=CHANNELS, text_shape=(TEXT_LENGTH, TEXT_DIM)).path
