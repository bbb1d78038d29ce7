"""What the matcher reports: the sites it found, and what looked like one and was left."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    """One expression that becomes one call of the op.

    kind: "adaln", "residual_adaln" or "gated_residual".
    line: where the last operation of the expression begins in the original file. For residual_adaln that is
        the norm's expression, not the residual's.
    function: "Class.method", or the bare name of a function.
    text: the call it becomes.
    """

    kind: str
    file: str
    line: int
    function: str
    text: str


@dataclass(frozen=True)
class Left:
    """Something that looks like AdaLN and stays as it is, with the reason."""

    file: str
    line: int
    function: str
    reason: str


@dataclass(frozen=True)
class Rewritten:
    """A module after rewriting. `source` is the text given when no site was found."""

    source: str
    sites: tuple[Site, ...]
    left: tuple[Left, ...]
