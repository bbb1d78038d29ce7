"""Every choice about a plan that is neither the corpus, nor the machine, nor chance."""

from collections.abc import Mapping
from dataclasses import dataclass

from al_deepspeed.errors import PlanError
from al_deepspeed.scheduling.weights import LOSS_WEIGHTINGS, NORMALISATIONS

CHOICES = {
    "strategy": ("equal_token", "dual_constraint", "balanced"),
    "mixing": ("corpus", "free"),
    "loss_weighting": LOSS_WEIGHTINGS,
    "normalise_by": NORMALISATIONS,
    "tail": ("split", "drop"),
    "on_oversize": ("keep", "skip", "error"),
}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Names and defaults are those of the ds_config section.

    strategy: equal_token (memory alone), dual_constraint (the paper's rule, dealt at random), balanced
        (ours).
    mixing: balanced only. "corpus" keeps every step near the corpus's mix; "free" gives that up.
    lookahead: balanced only. Micro-steps of a window, in which every class of costs occurs and steps are made
        even: a longer one balances better.
    group_by_shape: all ranks of a micro-step run one shape, for models that need it; replaces `mixing`.
    loss_weighting, normalise_by: see weights.py.
    tail: "split" micro-batches to fill the last step, or "drop" what does not fill one. Under a
        curriculum only the epoch's end is dropped.
    on_oversize: a sample that memory cannot hold by max_tokens: "keep" it alone and warn, "skip" it, or
        "error".
    mixture: share of an epoch's draws a kind, or a shape as "kind FxHxW"; see population.py. None: as it is.
    max_variants: most distinct (B, shape) pairs in a plan, for compiled or graph-captured models. None: no
        cap.
    """

    strategy: str = "balanced"
    mixing: str = "corpus"
    lookahead: int = 64
    group_by_shape: bool = False
    loss_weighting: str = "sample"
    normalise_by: str = "step"
    tail: str = "split"
    on_oversize: str = "keep"
    mixture: Mapping[str, float] | None = None
    max_variants: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise PlanError(f"{name} is {getattr(self, name)!r}; allowed are {', '.join(allowed)}.")
        if self.lookahead < 1:
            raise PlanError(f"lookahead is {self.lookahead}; it must be at least 1. 64 is the default.")
