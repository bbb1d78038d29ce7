"""From points to a calibration: every fit, the chosen form, M_mem, and M_comp once a corpus is known."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from al_deepspeed.calibration.file import Calibration, Setting
from al_deepspeed.calibration.fit import PAPER, choose, fit_all
from al_deepspeed.calibration.memory import MemoryFit, fit_memory
from al_deepspeed.calibration.points import Point, columns, measured
from al_deepspeed.errors import CalibrationError
from al_deepspeed.scheduling.budget import Deal, best_max_cost
from al_deepspeed.scheduling.shapes import Corpus

MEMORY_FRACTION = 0.92
ROOM = 2  # with less than this many longest samples in memory, their B is 1 whatever the budget
FAR = 2  # times the longest scanned S: from here on a prediction is a guess
WORTH = 1.01  # a budget helps if it raises predicted tokens/s at least this much over none


def calibrate(
    points: Sequence[Point],
    setting: Setting,
    *,
    form: str = "auto",
    memory_fraction: float = MEMORY_FRACTION,
    max_tokens: int | None = None,
) -> Calibration:
    """Fit a scan.

    Args:
        points: the scan; failed points are kept in the result and left out of the fits.
        setting: where it ran; its capacity gives M_mem.
        form: "auto", or one form to be used whatever its error.
        memory_fraction: the share of the capacity that a predicted peak may reach.
        max_tokens: M_mem, in place of what memory and capacity give.
    """
    if not 0 < memory_fraction <= 1:
        raise CalibrationError(f"memory_fraction is {memory_fraction}; allowed: above 0, at most 1.")
    data = columns(points)
    fits = fit_all(data.batch_size, data.tokens, data.ms)
    chosen = choose(fits, form)
    paper = next(fit for fit in fits if fit.variant == PAPER)
    memory = fit_memory(data.batch_size, data.tokens, data.peak_gb, data.pass_gb)
    reserved = fit_memory(data.batch_size, data.tokens, data.reserved_gb)
    shortest = int(data.tokens.min())
    spreads = [point.spread for point in points if len(point.rank_ms) > 1]
    steps = [point.step_ms for point in points if point.step_ms is not None]
    return Calibration(
        cost=chosen.cost,
        max_tokens=max_tokens
        or largest_tokens(reserved or memory, setting.capacity_gb, memory_fraction, shortest),
        max_cost=None,
        exponent=paper.cost.exponent,
        paper=paper.cost,
        memory=memory,
        reserved=reserved,
        memory_fraction=memory_fraction,
        spread=float(np.median(spreads)) if spreads else None,
        step_ms=float(np.median(steps)) if steps else None,
        setting=setting,
        fits=tuple(fit.to_dict() for fit in fits),
        points=tuple(points),
    )


def largest_tokens(
    memory: MemoryFit | None, capacity_gb: float | None, fraction: float, shortest: int
) -> int | None:
    """M_mem for samples of `shortest` tokens or more; None when memory or capacity are unknown."""
    if memory is None or capacity_gb is None:
        return None
    tokens = memory.largest_tokens(fraction * capacity_gb, shortest)
    if tokens < 1:
        raise CalibrationError(
            f"the predicted peak without any sample is {float(memory.peak_gb(0, 0)):.2f} GB, above "
            f"{fraction:.0%} of the device's {capacity_gb:.2f} GB. Use a higher ZeRO stage or offload, "
            "or raise --memory-fraction."
        )
    return tokens


def with_capacity(calibration: Calibration, capacity_gb: float | None, fraction: float) -> Calibration:
    """The calibration with M_mem for such a device (None: its own) and share of it."""
    capacity_gb = capacity_gb or calibration.setting.capacity_gb
    memory = calibration.reserved or calibration.memory
    shortest = min(point.tokens for point in measured(calibration.points))
    tokens = largest_tokens(memory, capacity_gb, fraction, shortest)
    if tokens is None:
        unknown = "what its points filled" if memory is None else "a capacity; give --capacity-gb too"
        raise CalibrationError(
            f"M_mem cannot be had: the calibration does not know {unknown}, or --max-tokens."
        )
    setting = replace(calibration.setting, capacity_gb=capacity_gb)
    return replace(calibration, max_tokens=tokens, memory_fraction=fraction, setting=setting)


def with_budget(
    calibration: Calibration, corpus: Corpus, world_size: int, accumulation: int = 1
) -> Calibration:
    """The calibration with M_comp chosen for a corpus: most predicted tokens/s under `dual_constraint`."""
    if calibration.max_tokens is None:
        raise CalibrationError(
            "M_comp is chosen beside M_mem, and the calibration has none: its scan knew no capacity. "
            "Give --capacity-gb, or --max-tokens, the B*S that a rank's memory holds."
        )
    if world_size < 1:
        raise CalibrationError(f"world_size is {world_size}; allowed: at least 1, the data-parallel ranks R.")
    if accumulation < 1:
        raise CalibrationError(f"accumulation is {accumulation}; allowed: at least 1, micro-steps a step, G.")
    deal = Deal(world_size=world_size, accumulation=accumulation, step_cost=calibration.step_ms or 0.0)
    max_cost, curve = best_max_cost(corpus, calibration.cost, calibration.max_tokens, deal)
    return replace(
        calibration,
        max_cost=float(max_cost),
        world_size=world_size,
        accumulation=accumulation,
        curve=tuple(curve),
    )


def budget_warnings(calibration: Calibration, corpus: Corpus) -> list[str]:
    """What a person should know about the two limits and this corpus."""
    longest = int(corpus.tokens[corpus.counts() > 0].max())
    alone = float(calibration.cost.cost(1, longest))
    scanned = max(point.tokens for point in measured(calibration.points))
    warnings = []
    if longest > FAR * scanned:
        warnings.append(
            f"the longest sample has {longest} tokens, the longest scanned {scanned}: what lies beyond is "
            "extrapolated. Scan with a larger --budget."
        )
    if alone > calibration.max_cost * (1 + 1e-9):
        warnings.append(
            f"the longest sample alone ({longest} tokens, {alone:.4g} ms) exceeds M_comp = "
            f"{calibration.max_cost:.4g} ms: it runs as B = 1 and the other ranks wait for it."
        )
    if calibration.max_tokens < longest:
        warnings.append(
            f"the longest sample alone ({longest} tokens) exceeds M_mem = {calibration.max_tokens} tokens: "
            "it may run out of memory. Use a higher ZeRO stage, activation checkpointing or offload."
        )
    best, without = max(rate for _, rate in calibration.curve), calibration.curve[-1][1]
    if best < WORTH * without and calibration.max_tokens < ROOM * longest:
        warnings.append(
            f"no M_comp helps: the best raises predicted tokens/s by {best / without - 1:.1%}. M_mem = "
            f"{calibration.max_tokens} tokens is {calibration.max_tokens / longest:.2f} times the longest "
            "sample; more memory a rank (ZeRO-3, checkpointing, offload) gives the budget room."
        )
    return warnings
