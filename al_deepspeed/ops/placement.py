"""Which modulation row each row of x takes, read from the shapes alone.

A row of x has a place (sample, token). Its modulation row is `groups * sample + (token + token_offset) //
tokens_per_group`: one group a sample, one a frame, one a token, or, for packed sequences, the segment of
`cu_seqlens` that holds the token. Shapes that fit no rule, or two rules that disagree, are refused.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

LAYOUTS = ("bsd", "sbd")


@dataclass(frozen=True)
class Placement:
    """How rows find their group. The defaults say: x is [B, ..., D], one modulation row a sample.

    sequence_first: x is [S, B, D], not [B, ..., D].
    modulation_sample_axis: the axis of the modulation that counts samples: 1 for [1, B, D] and [F, B, D].
    tokens_per_group: 0 when a sample has one group; unused when packed.
    token_offset: place of this shard's first token in the whole sequence.
    packed: groups are the segments of cu_seqlens.
    """

    sequence_first: bool = False
    modulation_sample_axis: int = 0
    tokens_per_group: int = 0
    token_offset: int = 0
    packed: bool = False

    def for_ops(self) -> tuple[bool, int, int, int]:
        """As the ops take it, behind cu_seqlens."""
        return self.sequence_first, self.modulation_sample_axis, self.tokens_per_group, self.token_offset


class Rows(NamedTuple):
    """x without its features: B samples of S tokens, and the token axes that make S ([S], or [T, H, W])."""

    samples: int
    tokens: int
    axes: tuple[int, ...]
    sequence_first: bool


def place(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    shift: torch.Tensor | None,
    scale: torch.Tensor | None,
    layout: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    token_offset: int = 0,
    tokens_per_group: int | None = None,
) -> Placement:
    """The one placement that all given modulations agree on; a call whose shapes were seen before is cheap.

    Raises:
        ValueError: a shape that fits no rule, fits two, or disagrees with another; both shapes are printed.
    """
    read = _place if torch.compiler.is_compiling() else _place_cached
    return read(
        x.shape,
        None if gate is None else gate.shape,
        None if shift is None else shift.shape,
        None if scale is None else scale.shape,
        layout,
        None if cu_seqlens is None else cu_seqlens.numel() - 1,
        token_offset,
        tokens_per_group,
    )


def _place(x_shape, gate, shift, scale, layout, segments, token_offset, tokens_per_group) -> Placement:
    if layout is not None and layout not in LAYOUTS:
        raise ValueError(
            f"layout is {layout!r}; allowed: {', '.join(map(repr, LAYOUTS))}, or None to infer it"
        )
    if len(x_shape) < 2:
        raise ValueError(f"x has shape {tuple(x_shape)}; it needs at least [rows, features]")
    if token_offset < 0 or (tokens_per_group is not None and tokens_per_group < 1):
        raise ValueError(
            f"token_offset is {token_offset} and tokens_per_group {tokens_per_group}; allowed: an offset "
            "of 0 or more and at least one token a group"
        )
    layouts = LAYOUTS if layout is None else (layout,)
    candidates = [_rows(x_shape, name) for name in layouts if name == "bsd" or len(x_shape) == 3]
    if not candidates:
        raise ValueError(f'layout "sbd" needs x of shape [S, B, D]; x has shape {tuple(x_shape)}')
    chosen = None
    for name, shape in (("gate", gate), ("shift", shift), ("scale", scale)):
        if shape is None:
            continue
        found = []  # readings that differ: [(row map, placement)]
        for rows in candidates if shape[-1] == x_shape[-1] else ():
            for placement in _readings(rows, shape[:-1], segments, token_offset, tokens_per_group):
                row_map = _row_map(placement, rows)
                if all(row_map != other for other, _ in found):
                    found.append((row_map, placement))
        if len(found) != 1:
            raise ValueError(
                _refusal(name, shape, x_shape, len(found), segments, token_offset, tokens_per_group)
            )
        row_map, placement = found[0]
        if chosen is not None and chosen[2] != row_map:
            raise ValueError(
                f"{chosen[0]} {list(chosen[1])} and {name} {list(shape)} give the rows of x {list(x_shape)} "
                "different groups; pass all modulations per sample, all per frame or all per token"
            )
        chosen = chosen or (name, shape, row_map, placement)
    return Placement(sequence_first=candidates[0].sequence_first) if chosen is None else chosen[3]


_place_cached = lru_cache(maxsize=4096)(_place)


def _rows(x_shape, layout: str) -> Rows:
    if layout == "sbd":
        return Rows(x_shape[1], x_shape[0], (x_shape[0],), True)
    tokens = 1
    for size in x_shape[1:-1]:
        tokens = tokens * size
    return Rows(x_shape[0], tokens, tuple(x_shape[1:-1]), False)


def _readings(rows: Rows, shape, segments, token_offset, tokens_per_group):
    """Every rule that a modulation of this shape (features left out) fits."""
    first = rows.sequence_first
    if segments is not None:
        if rows.samples == 1 and [n for n in shape if n != 1] == ([segments] if segments != 1 else []):
            axis = 0 if shape[0] == segments else 1
            yield Placement(first, axis, packed=True)
        return
    if len(shape) > 2 and tuple(shape) == (rows.samples, *rows.axes):
        shape = (rows.samples, rows.tokens)
    axes = (0, 1) if len(shape) == 2 else (0,)  # [B, F, 1, D] says which axis is which
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) == 1 and shape[0] == rows.samples:
        yield Placement(first, 0)
    if len(shape) != 2:
        return
    for axis in axes:
        samples, groups = shape[axis], shape[1 - axis]
        if samples != rows.samples:
            continue
        if groups == 1:
            yield Placement(first, axis)
        elif axis == 0 or first:
            size = _group_size(rows.tokens, groups, token_offset, tokens_per_group)
            if size:
                yield Placement(first, axis, size, token_offset)


def _group_size(tokens: int, groups: int, token_offset: int, tokens_per_group: int | None) -> int:
    """Tokens a group, or 0 when this many groups cannot cover the tokens."""
    if tokens_per_group is not None:
        return tokens_per_group if token_offset + tokens <= groups * tokens_per_group else 0
    if token_offset or (tokens if groups == 0 else tokens % groups):
        return 0
    return 1 if tokens == 0 else tokens // groups


def _row_map(placement: Placement, rows: Rows):
    """The same value for two readings exactly when they give every row of x the same modulation row."""
    sample_axis, token_axis = (1, 0) if rows.sequence_first else (0, 1)
    if placement.packed:
        return ("segments", token_axis)
    steps = []
    if rows.samples != 1:
        steps.append((sample_axis, placement.modulation_sample_axis, 1, 0))
    if placement.tokens_per_group:
        token = (1 - placement.modulation_sample_axis, placement.tokens_per_group, placement.token_offset)
        steps.append((token_axis, *token))
    return tuple(reversed(steps) if rows.sequence_first else steps)  # by the axis of x


def _refusal(name, shape, x_shape, readings, segments, token_offset, tokens_per_group) -> str:
    given = f"{name} has shape {list(shape)} and x {list(x_shape)}"
    if readings > 1:
        way_out = f'pass layout="bsd" or "sbd", or {name} as [B, F, 1, D]'
        return f"{given}: this can be read in {readings} ways; {way_out}"
    if segments is not None:
        return (
            f"{given}, cu_seqlens names {segments} segments: packed needs B = 1 and {name} of [segments, D]"
        )
    rule = (
        "allowed: one row a sample [B, D], [B, 1, D] or [1, B, D], one a frame [B, F, D] or [B, F, 1, D] "
        "with S a multiple of F, one a token [B, S, D]"
    )
    if token_offset and tokens_per_group is None:
        rule += (
            f"; token_offset={token_offset} needs tokens_per_group beside it when there are several groups"
        )
    elif tokens_per_group is not None:
        rule += f"; tokens {token_offset} and on must lie in F groups of {tokens_per_group}"
    return f"{given}: no rule fits; {rule}"
