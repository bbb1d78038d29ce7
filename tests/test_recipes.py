"""Recipes: the schema, the errors, and that what they expect is what was counted by hand."""

import re
from pathlib import Path

import pytest
from upstream_sites import COUNTS, count_name, counted, counted_kinds

from al_deepspeed.errors import PatchError
from al_deepspeed.patching.recipes import choose_recipes, load_recipes, read_recipe

ROOT = Path(__file__).parents[1]
RECIPES = load_recipes()
VALID = """
name = "mine.dit"
covers = "a fork"
repository = "https://example.org/dit"
licence = "Apache-2.0"
[sources]
"dit/model.py" = ["Block"]
[[releases]]
version = "1.0"
verified = 2026-11-29
sites = { adaln = 2 }
ran = "nothing"
"""


@pytest.fixture
def recipe_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return path

    return write


def test_every_target_has_a_recipe():
    assert {recipe.name for recipe in RECIPES} == {
        "diffusers.wan",
        "diffusers.flux",
        "diffusers.sd3",
        "diffusers.hunyuan-video",
        "megatron-bridge.wan",
        "megatron-bridge.flux",
        "nemo.diffusion",
        "wan2.1",
        "wan2.2",
        "diffusion-pipe",
        "videox-fun",
        "open-sora",
        "diffsynth-studio",
    }


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_expected_sites_are_those_counted_by_hand(recipe):
    for release in recipe.releases:
        assert release.sites == counted_kinds(recipe, release.version), release.version


def test_every_count_is_expected_by_a_recipe():
    named = {
        (count_name(recipe), release.version, file)
        for recipe in RECIPES
        for release in recipe.releases
        for file in recipe.files
    }
    assert named == {
        (path.stem, release, file)
        for path in COUNTS.glob("*.toml")
        for release, files in counted(path.stem).items()
        for file in files
    }


def test_targets_with_a_bucket_sampler_say_what_our_loader_replaces():
    replaced = {recipe.name: recipe.sampler.replaces for recipe in RECIPES if recipe.sampler}
    assert "VariableVideoBatchSampler" in replaced["open-sora"]
    assert "AspectRatioBatchImageVideoSampler" in replaced["videox-fun"]
    assert "ConcatenatedBatchedDataset" in replaced["diffusion-pipe"]
    assert "SequencePacking" in replaced["megatron-bridge.wan"]


def test_the_readme_names_every_target_and_release():
    text = (ROOT / "patches" / "README.md").read_text()
    for recipe in RECIPES:
        assert f"`{recipe.name}`" in text
        for release in recipe.releases:
            assert release.version in text, (recipe.name, release.version)
        if recipe.sampler:
            assert recipe.sampler.replaces.split()[0] in text


def test_classes_are_dotted_names():
    (wan,) = choose_recipes(["diffusers.wan"])
    assert wan.classes == (
        "diffusers.models.transformers.transformer_wan.WanTransformerBlock",
        "diffusers.models.transformers.transformer_wan.WanTransformer3DModel",
    )
    assert wan.files == ("diffusers/models/transformers/transformer_wan.py",)
    assert wan.release("0.42.1").sites["adaln"] == 2
    assert wan.release("0.1") is None


def test_an_unknown_target_is_refused_with_the_known_ones():
    with pytest.raises(
        PatchError, match=r"no patch target is called diffusers\.wam; known: .*diffusers\.wan"
    ):
        choose_recipes(["diffusers.wan", "diffusers.wam"])


def test_a_valid_recipe_is_read(recipe_file):
    assert read_recipe(recipe_file(VALID)).classes == ("dit.model.Block",)


@pytest.mark.parametrize(
    ("given", "instead", "message"),
    [
        ('covers = "a fork"', "", "covers: Field required"),
        ('covers = "a fork"', 'covers = "a fork"\ncolour = 1', "colour: Extra inputs"),
        ("https://", "ftp://", "repository: "),
        ('"mine.dit"', '"Mine DiT"', "name: "),
        ('"dit/model.py"', '"../model.py"', "relative path of a .py file"),
        ('["Block"]', "[]", "must list the names of its classes"),
        ("adaln = 2", "adaln = 0", "at least 1"),
        ("adaln = 2", "rmsnorm = 2", "releases.0.sites"),
        ("2026-11-29", '"soon"', "releases.0.verified"),
        ("[[releases]]", "[[releases]", "cannot be read"),
    ],
)
def test_a_faulty_recipe_says_where(recipe_file, given, instead, message):
    assert given in VALID
    path = recipe_file(VALID.replace(given, instead))
    with pytest.raises(PatchError, match=re.escape(message)) as raised:
        read_recipe(path)
    assert str(path) in str(raised.value)


def test_a_release_that_comes_twice_is_refused(recipe_file):
    path = recipe_file(VALID + VALID[VALID.index("[[releases]]") :])
    with pytest.raises(PatchError, match="a version comes twice"):
        read_recipe(path)


def test_an_empty_folder_and_a_shared_name_are_refused(tmp_path, recipe_file):
    with pytest.raises(PatchError, match="no recipe in"):
        load_recipes(tmp_path)
    recipe_file(VALID)
    (tmp_path / "other.toml").write_text(VALID)
    with pytest.raises(PatchError, match=r"share the name mine\.dit"):
        load_recipes(tmp_path)
