"""Recipes: what is known of a code base that patches were checked against, one TOML file each.

A recipe holds no rule and no line of the code base. The matcher finds sites in any source; a recipe says
where a code base keeps them, how many a release has, which sampler our loader takes the place of, and when
that was last verified. So a wrong or old recipe costs a report, never a wrong patch.
"""

import sys
from datetime import date
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from al_deepspeed.errors import PatchError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SiteKind = Literal["adaln", "residual_adaln", "gated_residual"]
SiteCounts = dict[SiteKind, int]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Release(_Table):
    """What was verified against one release (of a package) or one commit (of a repository).

    Attributes:
        version: release number, or the commit's first twelve digits.
        verified: day on which the found sites were compared with a count by hand.
        sites: number of sites by kind, in the recipe's classes.
        ran: what was executed patched and unpatched and compared, and what was not.
    """

    version: str = Field(min_length=1)
    verified: date
    sites: SiteCounts
    ran: str = Field(min_length=1)

    @field_validator("sites")
    @classmethod
    def _positive(cls, sites: SiteCounts) -> SiteCounts:
        if not sites or any(count < 1 for count in sites.values()):
            raise ValueError("names each kind of site that was found, with a number of at least 1")
        return sites


class SamplerHook(_Table):
    """Where batches come from in that code base, and how our loader takes their place.

    Attributes:
        replaces: the class that forms batches today.
        loader: file, and function or class, in which the loader is built or handed on.
        loss_weight: the expression that `loss_weight` multiplies.
    """

    replaces: str = Field(min_length=1)
    loader: str = Field(min_length=1)
    loss_weight: str = Field(min_length=1)


class Recipe(_Table):
    """One code base.

    Attributes:
        name: the target's name in `fused_adaln.patch` and in `--target`.
        covers: one line on what it is.
        repository, licence: where the code lives and under which SPDX licence.
        package: name on PyPI; None for a repository that is used as a checkout.
        sources: file, relative to the root that is imported from -> its classes that hold sites.
        sampler: None where the code base has no training loop of its own.
        releases: newest first.
        notes: what a user of this target should know.
    """

    name: str = Field(pattern=r"^[a-z0-9]+([.-][a-z0-9]+)*$")
    covers: str = Field(min_length=1)
    repository: str = Field(pattern=r"^https://")
    licence: str = Field(min_length=1)
    package: str | None = None
    sources: dict[str, tuple[str, ...]] = Field(min_length=1)
    sampler: SamplerHook | None = None
    releases: tuple[Release, ...] = Field(min_length=1)
    notes: str = ""

    @field_validator("sources")
    @classmethod
    def _relative_files(cls, sources: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for file, classes in sources.items():
            path = PurePosixPath(file)
            if path.suffix != ".py" or path.is_absolute() or ".." in path.parts:
                raise ValueError(f"{file!r} must be the relative path of a .py file")
            if not classes or not all(name.isidentifier() for name in classes):
                raise ValueError(f"{file!r} must list the names of its classes")
        return sources

    @model_validator(mode="after")
    def _releases_differ(self) -> "Recipe":
        versions = [release.version for release in self.releases]
        if len(set(versions)) < len(versions):
            raise ValueError("releases: a version comes twice")
        return self

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the sources, relative to the root that is imported from."""
        return tuple(self.sources)

    @property
    def classes(self) -> tuple[str, ...]:
        """Dotted names, module and class."""
        return tuple(
            f"{file.removesuffix('.py').replace('/', '.')}.{name}"
            for file, names in self.sources.items()
            for name in names
        )

    def release(self, version: str) -> Release | None:
        """What was verified against this version; None when nothing was."""
        return next((release for release in self.releases if release.version == version), None)


def recipe_folder() -> Path:
    """patches, inside the installed package or beside it in a checkout."""
    packaged = Path(__file__).parents[1] / "patches"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "patches"


def load_recipes(folder: Path | None = None) -> tuple[Recipe, ...]:
    """Every recipe, in the order of their names.

    Raises:
        PatchError: no recipe is there, or one is not as the schema wants it.
    """
    folder = recipe_folder() if folder is None else folder
    recipes = [read_recipe(path) for path in sorted(folder.glob("*.toml"))]
    if not recipes:
        raise PatchError(f"no recipe in {folder}; expected *.toml files. Reinstall al-deepspeed.")
    names = [recipe.name for recipe in recipes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PatchError(f"recipes in {folder} share the name {', '.join(twice)}; give each its own.")
    return tuple(sorted(recipes, key=lambda recipe: recipe.name))


def read_recipe(path: Path) -> Recipe:
    try:
        return Recipe.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PatchError(f"recipe {path} cannot be read: {error}") from error
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {fault['msg']}" for fault in error.errors()
        )
        raise PatchError(f"recipe {path} is not valid: {faults}") from error


def choose_recipes(names: list[str] | tuple[str, ...]) -> tuple[Recipe, ...]:
    """The recipes of these targets, in the order given.

    Raises:
        PatchError: a name that no recipe has.
    """
    known = {recipe.name: recipe for recipe in load_recipes()}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PatchError(f"no patch target is called {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return tuple(known[name] for name in names)
