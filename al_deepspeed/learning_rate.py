"""Learning rate by the size of a step: times n / mean(n), or its root, where n is the step's sample count.

DeepSpeed scales from a batch size that the user names. Here ds_config's rate is that of the mean step of the
epoch (of a stream: of the window), so it means the same for every strategy; whoever trains on with more
ranks, and so with larger steps, chooses a new rate as usual.

The scale holds for one update. The configured scheduler must not see it: many compute the next rate from the
group's present one, so a scale left in place would pile up. It is therefore taken back before the scheduler
steps, and the scheduler's state in checkpoints is that of an unscaled run.
"""

from typing import Any

from al_deepspeed.scheduling.plan import Plan
from al_deepspeed.scheduling.weights import lr_factors


class ScaledLearningRate:
    """Scales the optimizer's groups around an update.

    Args:
        engine: whose optimizer and scheduler ds_config defined.
        scaling: "none", "linear" or "sqrt".
    """

    def __init__(self, engine: Any, scaling: str) -> None:
        self._engine = engine
        self._scaling = scaling
        self._unscaled: list[Any] | None = None
        self._factors: tuple[Plan | None, Any] = (None, None)
        if scaling != "none" and engine.lr_scheduler is not None:
            scheduler_step = engine.lr_scheduler.step

            def step(*args: Any, **kwargs: Any) -> Any:
                self.restore()
                return scheduler_step(*args, **kwargs)

            engine.lr_scheduler.step = step

    def factor(self, plan: Plan, step: int) -> float:
        """Of one step of a plan; the mean step of the plan has factor 1."""
        if self._scaling == "none":
            return 1.0
        if self._factors[0] is not plan:
            self._factors = (plan, lr_factors(plan.step_samples, self._scaling))
        return float(self._factors[1][step])

    def scale(self, factor: float) -> None:
        """Until `restore`, the groups' rates are this many times as high."""
        if factor == 1.0:
            return
        groups = self._engine.optimizer.param_groups
        self._unscaled = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor

    def restore(self) -> None:
        """Takes the scale back, if one is in place."""
        if self._unscaled is None:
            return
        for group, rate in zip(self._engine.optimizer.param_groups, self._unscaled, strict=True):
            group["lr"] = rate
        self._unscaled = None
