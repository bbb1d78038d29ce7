"""Saving a picture: the format by the name's ending, and the file whole or not at all."""

from pathlib import Path
from typing import TYPE_CHECKING

from al_deepspeed.data.files import atomic_path
from al_deepspeed.errors import AdaptiveLoadError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """Refuse a name that `save_picture` could not write, before the work that leads to it."""
    if path.suffix.lower() not in FORMATS:
        raise AdaptiveLoadError(f"the picture is to be {path}; its name must end in {', '.join(FORMATS)}.")


def save_picture(figure: "Figure", path: Path, *, dpi: int = 130) -> None:
    """Write the figure and close it."""
    from matplotlib import pyplot

    check_picture(path)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=dpi)
    pyplot.close(figure)
