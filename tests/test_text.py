"""Text embeddings: the hash by its definition, a transformers encoder against the model itself."""

import hashlib

import numpy as np
import pytest
import torch

from al_deepspeed.data.text import HashText, TransformersText


def test_hash_follows_its_definition():
    embedding, length = HashText(4, 8).encode("A  red, red\nfox")
    assert embedding.shape == (4, 8) and embedding.dtype == np.float16
    assert length == 4  # a, red, red and the end mark: the fourth word is cut
    digest = hashlib.shake_256(b"red").digest(16)
    numbers = [
        int.from_bytes(digest[i : i + 2], "little", signed=True) / 32768 * 3**0.5 for i in range(0, 16, 2)
    ]
    np.testing.assert_array_equal(embedding[1], np.array(numbers, np.float16))
    np.testing.assert_array_equal(embedding[1], embedding[2])


def test_empty_caption_is_one_end_mark():
    embedding, length = HashText(4, 8).encode("")
    assert length == 1 and np.any(embedding[0]) and not np.any(embedding[1:])
    np.testing.assert_array_equal(HashText(4, 8).encode("fox")[0][1], embedding[0])


def test_hash_has_unit_variance():
    embedding, length = HashText(400, 64).encode(" ".join(f"word{i}" for i in range(399)))
    assert length == 400
    # 25,600 uniform values: the variance is known to about sqrt(0.8 / 25600) = 0.6%.
    assert abs(embedding.astype(float).var() - 1) < 0.03


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, "red": 4, "fox": 5}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    folder = tmp_path_factory.mktemp("pipeline")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    config = UMT5Config(vocab_size=6, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    UMT5EncoderModel(config).save_pretrained(folder / "text_encoder")
    return folder


def test_transformers_encoder_is_the_model_masked(encoder_folder):
    from transformers import UMT5EncoderModel

    encoder = TransformersText(str(encoder_folder), 6, "cpu")
    embedding, length = encoder.encode("a  red\nfox")
    assert embedding.shape == (6, 16) and embedding.dtype == np.float16 and length == 4
    model = UMT5EncoderModel.from_pretrained(encoder_folder / "text_encoder").eval()
    with torch.no_grad():  # without padding: what is masked must not matter
        expected = model(input_ids=torch.tensor([[3, 4, 5, 1]])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(embedding[:4], expected, rtol=2e-3, atol=2e-3)
    assert not embedding[4:].any()


def test_transformers_encoder_keeps_an_end_mark_for_the_empty_caption(encoder_folder):
    embedding, length = TransformersText(str(encoder_folder), 6, "cpu").encode("")
    assert length == 1 and embedding[0].any() and not embedding[1:].any()
