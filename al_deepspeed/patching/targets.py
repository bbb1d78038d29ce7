"""A recipe beside the user's tree: which files are its own, which release it is, how many sites it has."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from al_deepspeed.errors import PatchError
from al_deepspeed.patching.on_disk import Examined
from al_deepspeed.patching.recipes import Recipe, choose_recipes
from al_deepspeed.patching.tree import find


@dataclass(frozen=True)
class Compared:
    """Sites found in a recipe's classes against those verified; as_expected is None where none were."""

    name: str
    release: str | None
    found: dict[str, int]
    expected: dict[str, int] | None
    as_expected: bool | None
    said: str


@dataclass(frozen=True)
class Target:
    """Every file where there is no recipe. `folder` is where the tree that was given begins."""

    folder: Path
    recipe: Recipe | None = None

    @property
    def name(self) -> str | None:
        return self.recipe and self.recipe.name

    def select(self, name: str) -> bool:
        """Whether a file, named from the folder, belongs to the target."""
        return self.recipe is None or self._file(name) is not None

    def compare(self, examined: Examined) -> Compared | None:
        """The sites in the recipe's classes against the release at hand; None without a recipe."""
        if self.recipe is None:
            return None
        found: dict[str, int] = {}
        for file in examined.files:
            own = self.recipe.sources[self._file(file.name)]
            for site in file.sites:
                if site.function.partition(".")[0] in own:
                    found[site.kind] = found.get(site.kind, 0) + 1
        version = self._version()
        release = self.recipe.release(version) if version else None
        patched = any(file.patched for file in examined.files)
        expected = dict(release.sites) if release and not patched else None
        same = None if expected is None else found == expected
        return Compared(self.recipe.name, version, found, expected, same, self._say(version, expected, found))

    def _say(self, version: str | None, expected: dict | None, found: dict) -> str:
        known = ", ".join(release.version for release in self.recipe.releases)
        if expected is None:
            return f"{self.name}: release {version or 'unknown'}; nothing to compare with (verified: {known})"
        if found == expected:
            return f"{self.name}: release {version}, as verified"
        return f"{self.name}: release {version} was verified with {expected}, but here are {found}"

    def _file(self, name: str) -> str | None:
        path = f"/{(self.folder / name).as_posix()}"
        return next((file for file in self.recipe.files if path.endswith(f"/{file}")), None)

    def _version(self) -> str | None:
        """Of the installed package, by the metadata beside it; of a checkout, its commit."""
        for name in find(self.folder).names:
            file = self._file(name)
            if file is None:
                continue
            root = Path((self.folder / name).as_posix().removesuffix(file))
            if self.recipe.package:
                return _installed(root, self.recipe.package)
            commit = subprocess.run(
                ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
            )
            return commit.stdout.strip() or None
        return None


def find_target(name: str | None, path: Path) -> Target:
    """The files of a recipe under a path, or of none.

    Raises:
        PatchError: no recipe has the name, or the path holds none of its files.
    """
    tree = find(path)
    if name is None:
        return Target(tree.folder)
    target = Target(tree.folder, choose_recipes([name])[0])
    if not any(map(target.select, tree.names)):
        raise PatchError(
            f"{path} holds no file of {name} ({', '.join(target.recipe.files)}). Give the folder of the "
            "package or of the checkout."
        )
    return target


def _installed(root: Path, package: str) -> str | None:
    wanted = package.replace("-", "_").lower()
    for metadata in root.glob("*.dist-info"):
        distribution, _, version = metadata.name.removesuffix(".dist-info").rpartition("-")
        if distribution.replace("-", "_").lower() == wanted:
            return version
    return None
