"""Wan models: presets, pretrained weights and the diffusers export."""

import pytest
import torch
from diffusers import WanTransformer3DModel

from al_deepspeed.errors import ConfigError
from al_deepspeed.training import wan


def tiny(channels=2, text_dim=8):
    torch.manual_seed(0)
    return wan.build(wan.preset("tiny", channels=channels, text_dim=text_dim), {})


def test_the_large_preset_is_wan_1_3b():
    with torch.device("meta"):
        model = wan.build(wan.preset("1.3b", channels=16, text_dim=4096), {})
    # A block: two attentions, the norm of the second, the MLP, a modulation table of 6 rows. Around them:
    # patches, the timestep's MLP and its projection to 6 rows, the captions' MLP, the head and its table.
    attention = 4 * (1536 * 1536 + 1536) + 2 * 1536
    block = 2 * attention + 2 * 1536 + 2 * 1536 * 8960 + 8960 + 1536 + 6 * 1536
    square = 1536 * 1536 + 1536
    around = 65 * 1536 + 257 * 1536 + square + 6 * square + 4097 * 1536 + square + 1536 * 64 + 64 + 2 * 1536
    assert sum(p.numel() for p in model.parameters()) == 30 * block + around == 1_418_996_800


def test_the_first_layers_alone(tmp_path):
    """Wan 14B: 40 heads of 128 make 5120; a preset or a folder of weights cut to its first blocks."""
    with torch.device("meta"):
        model = wan.build(wan.preset("14b", channels=16, text_dim=4096, layers=2), {})
    assert len(model.blocks) == 2 and model.blocks[0].ffn.net[2].weight.shape == (5120, 13824)
    wan.export(tiny(), tmp_path / "model")
    folder = {"name_or_dir": str(tmp_path / "model"), "channels": 2, "text_dim": 8}
    assert len(wan.build(wan.pretrained(**folder, layers=1), {}).blocks) == 1
    with pytest.raises(ConfigError, match=r"the first is blocks\.3\."):
        wan.pretrained(**folder, layers=4)


def test_an_exported_folder_loads_with_diffusers_and_computes_the_same(tmp_path):
    model = tiny()
    wan.export(model, tmp_path / "model")
    again = WanTransformer3DModel.from_pretrained(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert sorted(path.suffix for path in (tmp_path / "model").iterdir()) == [".json", ".safetensors"]
    inputs = {
        "hidden_states": torch.randn(1, 2, 3, 4, 6),
        "timestep": torch.tensor([300.0]),
        "encoder_hidden_states": torch.randn(1, 3, 8),
    }
    with torch.no_grad():
        assert torch.equal(model(**inputs).sample, again(**inputs).sample)


def test_pretrained_weights_are_read_from_a_folder_and_from_a_pipelines_folder(tmp_path):
    model = tiny()
    wan.export(model, tmp_path / "pipeline" / "transformer")
    for folder in (tmp_path / "pipeline", tmp_path / "pipeline" / "transformer"):
        again = wan.build(wan.pretrained(str(folder), channels=2, text_dim=8), {})
        for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
            assert torch.equal(one, other), name


def test_pretrained_weights_for_another_corpus_are_refused(tmp_path):
    wan.export(tiny(), tmp_path / "model")
    with pytest.raises(ConfigError, match="text_dim 8, but the corpus has 32"):
        wan.pretrained(str(tmp_path / "model"), channels=2, text_dim=32)
    with pytest.raises(ConfigError, match="in_channels 2, but the corpus has 16"):
        wan.pretrained(str(tmp_path / "model"), channels=16, text_dim=8)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        wan.pretrained(str(tmp_path), channels=2, text_dim=8)


def test_an_unknown_preset_is_refused():
    with pytest.raises(ConfigError, match=r"allowed: tiny, 1\.3b, 14b"):
        wan.preset("5b", channels=16, text_dim=8)
