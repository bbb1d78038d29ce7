"""The hand counts of tests/data/patch_sites, as the tests read them."""

from collections import Counter
from pathlib import Path

from al_deepspeed.patching.recipes import Recipe, tomllib

COUNTS = Path(__file__).parent / "data" / "patch_sites"
FOR_REPOSITORIES = "repositories"

Places = dict[str, list[tuple[int, str]]]  # class -> (line, kind of site)


def count_name(recipe: Recipe) -> str:
    return recipe.package or FOR_REPOSITORIES


def counted(distribution: str) -> dict[str, dict[str, Places]]:
    """Release -> file -> class -> sites."""
    table = tomllib.loads((COUNTS / f"{distribution}.toml").read_text())["sites"]
    return {
        release: {
            file: {name: [_place(entry) for entry in entries] for name, entries in classes.items()}
            for file, classes in files.items()
        }
        for release, files in table.items()
    }


def counted_kinds(recipe: Recipe, release: str) -> dict[str, int]:
    """Number of sites by kind in the recipe's classes."""
    files = counted(count_name(recipe))[release]
    return dict(
        Counter(
            kind for file, names in recipe.sources.items() for name in names for _, kind in files[file][name]
        )
    )


def _place(entry: str) -> tuple[int, str]:
    line, kind = entry.split()
    return int(line), kind
