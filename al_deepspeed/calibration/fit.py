"""Which cost form fits a scan, chosen by the error of held-out points.

    power     a + b*B*S^p                              the paper's
    two_term  a + b*B*S + c*B*S^2                      attention's quadratic beside the rest
    roofline  floor under the two-term form            small batches wait for launches and collectives

Each may add d*B, a cost a sample whatever its length: its text tokens. A floor is hard (the maximum) or
smooth (a p-norm that rounds the corner). Every variant is fitted; a term is kept only where held-out points
show it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from al_deepspeed.calibration import robust
from al_deepspeed.calibration.robust import FloatArray, Problem
from al_deepspeed.errors import CalibrationError
from al_deepspeed.scheduling.cost import COST_FORMS, CostModel, cost_to_dict

FORMS = ("power", "two_term", "roofline")
GAIN = 0.9  # a further term must bring the mean held-out error below this share of the simpler fit's
ERROR_CAP = 1.0  # one wild point counts at most this much in that mean
VISIBLE = 0.01
LONG_MS = 60.0  # points above this are also reported by themselves: below it a launch-bound floor is noise
EXPONENTS = (1.2, 1.6, 2.0)
SHARPNESS_START = 8.0
BOUNDS = {"exponent": (0.5, 4.0), "sharpness": (1.0, 50.0)}  # all others: 0 and above


@dataclass(frozen=True)
class Variant:
    """One set of terms of a form."""

    form: str
    floor: str | None = None  # "hard" | "smooth"
    text: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the cost model's parameters that are fitted."""
        shape = ("scale", "exponent") if self.form == "power" else ("linear", "quadratic")
        floor = {None: (), "hard": ("floor",), "smooth": ("floor", "sharpness")}[self.floor]
        return ("intercept", *shape, *floor, *(("text",) if self.text else ()))

    @property
    def name(self) -> str:
        extra = [self.floor] if self.floor else []
        return " ".join([self.form, *extra, *(["text"] if self.text else [])])


VARIANTS = tuple(
    Variant(form, floor, text)
    for form, floor in (("power", None), ("two_term", None), ("roofline", "hard"), ("roofline", "smooth"))
    for text in (False, True)
)
PAPER = Variant("power")


@dataclass(frozen=True)
class Fit:
    """A fitted variant.

    held_out: leave-one-out relative error of each point, in the scan's order; ms: the points' times.
    grows: whether the batch, not a constant, takes a visible share of the scan's longest times.
    """

    variant: Variant
    cost: CostModel
    held_out: FloatArray
    ms: FloatArray
    grows: bool

    @property
    def median_error(self) -> float:
        return float(np.median(self.held_out))

    @property
    def score(self) -> float:
        """What the choice goes by: the mean held-out error, no point counting above ERROR_CAP."""
        return float(np.minimum(self.held_out, ERROR_CAP).mean())

    def quantile_error(self, quantile: float, above_ms: float = 0.0) -> float | None:
        """A quantile of the held-out errors over the points above a time; None where there are none."""
        errors = self.held_out[self.ms > above_ms]
        return float(np.quantile(errors, quantile)) if len(errors) else None

    def to_dict(self) -> dict:
        return {
            "name": self.variant.name,
            "form": self.variant.form,
            "cost": cost_to_dict(self.cost),
            "median_error": self.median_error,
            "p90_error": self.quantile_error(0.9),
            "median_error_above_60_ms": self.quantile_error(0.5, LONG_MS),
            "p90_error_above_60_ms": self.quantile_error(0.9, LONG_MS),
            "mean_error": self.score,
        }


def fit_all(batch_sizes: FloatArray, tokens: FloatArray, ms: FloatArray) -> tuple[Fit, ...]:
    """A fit of every variant that the number of points can hold."""
    fits = tuple(
        fit_variant(variant, batch_sizes, tokens, ms)
        for variant in VARIANTS
        if len(ms) > len(variant.parameters)
    )
    if not fits:
        needed = min(len(variant.parameters) for variant in VARIANTS) + 1
        raise CalibrationError(
            f"the scan has {len(ms)} measured points; a fit needs at least {needed}. Scan more (B, S) pairs."
        )
    return fits


def choose(fits: Sequence[Fit], form: str = "auto") -> Fit:
    """The simplest fit whose held-out error no richer one beats clearly; of one form, or of all."""
    if form not in ("auto", *FORMS):
        raise CalibrationError(f"form is {form!r}; allowed: auto, {', '.join(FORMS)}.")
    candidates = [fit for fit in fits if form in ("auto", fit.variant.form) and fit.grows]
    if not candidates:
        raise CalibrationError(
            "no fitted form grows with the batch: the points do not tell time from a constant, or are too "
            f"few for form {form!r}. Scan larger B and S."
        )
    best = min(fit.score for fit in candidates)
    good = [fit for fit in candidates if GAIN * fit.score <= best]
    return min(good, key=lambda fit: (len(fit.variant.parameters), fit.score))


def fit_variant(variant: Variant, batch_sizes: FloatArray, tokens: FloatArray, ms: FloatArray) -> Fit:
    """Fit one variant and hold out every point in turn."""
    longest = float(np.max(tokens))
    problem = cost_problem(variant, batch_sizes, tokens / longest, ms)
    solution = robust.fit(problem, _starts(variant, problem))
    model = cost_model(variant, solution.parameters, longest)
    grows = bool((batch_sizes * model.sample_cost(tokens)).max() > VISIBLE * np.max(ms))
    return Fit(variant, model, robust.leave_one_out(problem, solution), problem.target, grows)


def fit_once(variant: Variant, batch_sizes: FloatArray, tokens: FloatArray, ms: FloatArray) -> CostModel:
    """Fit one variant without holding anything out."""
    longest = float(np.max(tokens))
    problem = cost_problem(variant, batch_sizes, tokens / longest, ms)
    return cost_model(variant, robust.fit(problem, _starts(variant, problem)).parameters, longest)


def refits_without_each(
    variant: Variant, batch_sizes: FloatArray, tokens: FloatArray, ms: FloatArray
) -> list[CostModel]:
    """One model a point, fitted to all the others."""
    longest = float(np.max(tokens))
    problem = cost_problem(variant, batch_sizes, tokens / longest, ms)
    solution = robust.fit(problem, _starts(variant, problem))
    return [cost_model(variant, refit, longest) for refit in robust.refits_without_each(problem, solution)]


def cost_problem(variant: Variant, batch_sizes: FloatArray, lengths: FloatArray, ms: FloatArray) -> Problem:
    """The least-squares problem of a variant over lengths in units of the longest S.

    So every parameter but the exponent and the sharpness is in ms, and the solver's steps are of one size.
    """

    def predict(parameters: FloatArray, inputs: FloatArray) -> FloatArray:
        return cost_model(variant, parameters, 1.0).cost(inputs[:, 0], inputs[:, 1])

    bounds = np.array([BOUNDS.get(name, (0.0, np.inf)) for name in variant.parameters])
    inputs = np.stack([batch_sizes, lengths], axis=1).astype(np.float64)
    return Problem(predict, inputs, np.asarray(ms, dtype=np.float64), bounds[:, 0], bounds[:, 1])


def cost_model(variant: Variant, parameters: FloatArray, longest: float) -> CostModel:
    """The model whose parameters are given for lengths in units of `longest`."""
    values = dict(zip(variant.parameters, map(float, parameters), strict=True))
    if variant.form == "power":
        values["scale"] /= longest ** values["exponent"]
    else:
        values["linear"] /= longest
        values["quadratic"] /= longest**2
    return COST_FORMS[variant.form](**values)


def _starts(variant: Variant, problem: Problem) -> list[FloatArray]:
    """Starting points: the linear parameters by least squares for a few values of the others."""
    batch, lengths = problem.inputs.T
    ms = problem.target
    starts = []
    for exponent in EXPONENTS if variant.form == "power" else (2.0,):
        for floor in (0.0, ms.min(), *np.quantile(ms, (0.1, 0.25, 0.4))) if variant.floor else (0.0,):
            above = ms > 1.2 * floor
            terms = {"intercept": np.ones(len(ms)), "text": batch, "linear": batch * lengths}
            terms |= {"quadratic": batch * lengths**2, "scale": batch * lengths**exponent}
            linear = [name for name in variant.parameters if name in terms]
            if above.sum() < len(linear):
                continue
            design = np.stack([terms[name] for name in linear], axis=1)[above]
            values = dict(zip(linear, robust.linear_start(design, ms[above]), strict=True))
            values |= {"exponent": exponent, "floor": floor, "sharpness": SHARPNESS_START}
            starts.append(np.array([values[name] for name in variant.parameters]))
    return starts
