"""Captions to embeddings: a deterministic hash of words, or a text encoder of the transformers library.

Both give fp16 [L, D] with zeros after the caption's own length, which is at least 1 even for the empty
caption (an end mark), so that cross-attention always has something to look at.
"""

import hashlib
import re
from typing import Protocol

import numpy as np
import torch

from al_deepspeed.errors import CorpusError

WORD = re.compile(r"\w+")


class TextEncoder(Protocol):
    """What `encode` needs of a text encoder."""

    name: str

    def encode(self, caption: str) -> tuple[np.ndarray, int]: ...


class HashText:
    """One vector a word, drawn from SHAKE-256 of the word: uniform, of unit variance."""

    def __init__(self, length: int, width: int):
        self.name = "hash"
        self._length, self._width = length, width

    def encode(self, caption: str) -> tuple[np.ndarray, int]:
        """The caption's words, cut to L - 1, and an end mark: fp16 [L, D] and the length."""
        words = [*WORD.findall(caption.casefold())[: self._length - 1], ""]
        embedding = np.zeros((self._length, self._width), dtype=np.float16)
        for row, word in enumerate(words):
            digest = hashlib.shake_256(word.encode()).digest(2 * self._width)
            uniform = np.frombuffer(digest, dtype="<i2").astype(np.float64) / (1 << 15)
            embedding[row] = uniform * np.sqrt(3)
        return embedding, len(words)


class TransformersText:
    """Last hidden state of a text encoder such as UMT5, taken as Wan's pipeline takes it."""

    def __init__(self, source: str, length: int, device: str = "auto"):
        from al_deepspeed.data.pretrained import library, load_part, pick_device

        self.name = source
        self._length, self._device = length, pick_device(device)
        transformers = library("transformers")
        self._tokenizer = load_part(transformers.AutoTokenizer, source, "tokenizer")
        self._tokenizer.padding_side = "right"
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        model = load_part(transformers.AutoModelForTextEncoding, source, "text_encoder", torch_dtype=dtype)
        self._model = model.to(self._device).eval().requires_grad_(False)

    @torch.no_grad()
    def encode(self, caption: str) -> tuple[np.ndarray, int]:
        """The caption with runs of white space made one space: fp16 [L, D] and the length in tokens."""
        tokens = self._tokenizer(
            " ".join(caption.split()),
            padding="max_length",
            max_length=self._length,
            truncation=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        length = int(tokens["attention_mask"].sum())
        if length < 1:
            raise CorpusError(
                f"{self.name}: its tokenizer makes no token of the caption {caption!r}. One that adds an end "
                "mark, as T5's and UMT5's do, is needed."
            )
        hidden = self._model(
            input_ids=tokens["input_ids"].to(self._device),
            attention_mask=tokens["attention_mask"].to(self._device),
        ).last_hidden_state[0]
        with np.errstate(over="ignore"):
            embedding = hidden.float().cpu().numpy().astype(np.float16)
        embedding[length:] = 0
        if not np.isfinite(embedding).all():
            raise CorpusError(f"{self.name}: its output for the caption {caption!r} does not fit fp16.")
        return embedding, length
