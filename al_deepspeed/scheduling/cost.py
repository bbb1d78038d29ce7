"""How long one micro-batch takes, from its batch size B and sequence length S.

Three forms, as a calibration fits them; `text` is a per-sample term for work that does not grow with S:
    power     intercept + scale * B * S^exponent + text * B          the paper's
    two_term  intercept + linear * B*S + quadratic * B*S^2 + text * B
    roofline  the two-term form, but never less than `floor`         launches and all-gathers take their time
A roofline's corner is hard, or rounded where `sharpness` is given.
Every form is straight in B, so the largest batch within a budget has a closed form. A model travels as a
plain dict {"form": name, parameter: number, ...}. Without a calibration, `PowerCost(exponent=p)` is B*S^p
in relative units.
"""

from dataclasses import asdict, dataclass, fields
from typing import ClassVar

import numpy as np

from al_deepspeed.errors import CalibrationError

_SLACK = 1e-9  # of a budget: a batch that meets it exactly must not fall to rounding


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Milliseconds of a micro-batch: max(floor, intercept + B * sample_cost(S))."""

    form: ClassVar[str]
    intercept: float = 0.0
    text: float = 0.0

    @property
    def least(self) -> float:
        """No micro-batch takes less."""
        return 0.0

    def sample_cost(self, tokens) -> np.ndarray:
        """What one more sample of length S adds."""
        raise NotImplementedError

    def cost(self, batch_size, tokens) -> np.ndarray:
        """Predicted cost for B and S, which broadcast against each other."""
        return np.maximum(self.least, self.intercept + np.asarray(batch_size) * self.sample_cost(tokens))

    def largest_batch(self, tokens, budget: float) -> np.ndarray:
        """The largest B >= 0 with cost(B, S) <= budget, int64; never less than a B whose cost the budget is.

        The slack comes before the floor is taken off, since there nearly all digits of the budget are lost.
        """
        room = (self.unfloored(budget * (1 + _SLACK)) - self.intercept) * (1 + _SLACK)
        most = np.floor(max(0.0, room) / self.sample_cost(tokens))
        return np.minimum(most, 2.0**62).astype(np.int64)

    def unfloored(self, budget: float) -> float:
        """What intercept + B * sample_cost(S) may be for a cost within the budget; -inf where nothing may."""
        return budget if budget >= self.least else -np.inf


@dataclass(frozen=True, kw_only=True)
class PowerCost(CostModel):
    """intercept + scale * B * S^exponent: the paper's form; by default B*S^2 in relative units."""

    form: ClassVar[str] = "power"
    scale: float = 1.0
    exponent: float = 2.0

    def sample_cost(self, tokens) -> np.ndarray:
        return self.scale * np.asarray(tokens, dtype=np.float64) ** self.exponent + self.text


@dataclass(frozen=True, kw_only=True)
class TwoTermCost(CostModel):
    """intercept + linear * B*S + quadratic * B*S^2: matrix products and attention apart."""

    form: ClassVar[str] = "two_term"
    linear: float
    quadratic: float

    def sample_cost(self, tokens) -> np.ndarray:
        tokens = np.asarray(tokens, dtype=np.float64)
        return self.linear * tokens + self.quadratic * tokens**2 + self.text


@dataclass(frozen=True, kw_only=True)
class RooflineCost(TwoTermCost):
    """The two-term form above a floor that small micro-batches cannot pass.

    sharpness: 0 for a hard floor, max(floor, two-term); k >= 1 rounds it, (floor^k + two-term^k)^(1/k).
    """

    form: ClassVar[str] = "roofline"
    floor: float
    sharpness: float = 0.0

    @property
    def least(self) -> float:
        return self.floor

    def cost(self, batch_size, tokens) -> np.ndarray:
        if not self.sharpness:
            return super().cost(batch_size, tokens)
        straight = self.intercept + np.asarray(batch_size) * self.sample_cost(tokens)
        higher = np.maximum(straight, self.floor)
        lower = np.minimum(straight, self.floor)
        return higher * (1 + (lower / higher) ** self.sharpness) ** (1 / self.sharpness)

    def unfloored(self, budget: float) -> float:
        if not self.sharpness:
            return super().unfloored(budget)
        if budget < self.floor:
            return -np.inf
        return budget * (1 - (self.floor / budget) ** self.sharpness) ** (1 / self.sharpness)


COST_FORMS = {model.form: model for model in (PowerCost, TwoTermCost, RooflineCost)}


def cost_to_dict(model: CostModel) -> dict:
    """Plain dict of a model, for a calibration file."""
    return {"form": model.form, **asdict(model)}


def cost_from_dict(data: dict) -> CostModel:
    """The model of such a dict; says which key is wrong."""
    parameters = dict(data)
    form = parameters.pop("form", None)
    if form not in COST_FORMS:
        raise CalibrationError(
            f"cost form {form!r} is unknown; allowed are {', '.join(COST_FORMS)}. Calibrate again."
        )
    names = {field.name for field in fields(COST_FORMS[form])}
    unknown, bad = set(parameters) - names, [k for k, v in parameters.items() if not _is_finite(v)]
    if unknown or bad:
        raise CalibrationError(
            f"cost of form {form!r} has wrong parameters {sorted(unknown) + bad}; allowed are finite "
            f"numbers for "
            f"{sorted(names)}. Calibrate again."
        )
    try:
        model = COST_FORMS[form](**parameters)
    except TypeError as error:
        raise CalibrationError(f"cost of form {form!r} is incomplete: {error}. Calibrate again.") from error
    if not (np.asarray(model.sample_cost([1, 1000])) > 0).all():
        raise CalibrationError(f"cost {data} does not grow with the batch size. Calibrate with more points.")
    sharpness = parameters.get("sharpness", 0)
    if sharpness and sharpness < 1:
        raise CalibrationError(
            f"cost has sharpness {sharpness}; allowed are 0 (a hard corner), and 1 or more. Calibrate again."
        )
    return model


def _is_finite(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))
