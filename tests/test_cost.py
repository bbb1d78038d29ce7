"""Cost models: what they predict, what fits a budget, and how they travel."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from al_deepspeed.errors import CalibrationError
from al_deepspeed.scheduling.cost import PowerCost, RooflineCost, TwoTermCost, cost_from_dict, cost_to_dict

ROOFLINE = RooflineCost(floor=40.0, intercept=4.0, linear=0.005, quadratic=3e-7)
ROUNDED = RooflineCost(floor=170.0, sharpness=23.0, intercept=3.2, text=0.2, linear=0.005, quadratic=3e-7)
MODELS = [
    PowerCost(),
    PowerCost(intercept=5.0, scale=1e-6, exponent=1.7, text=0.1),
    TwoTermCost(intercept=2.0, linear=0.004, quadratic=2e-7),
    ROOFLINE,
    ROUNDED,
]


@st.composite
def models(draw):
    terms = {"intercept": draw(st.floats(0, 1e4)), "text": draw(st.floats(0, 10))}
    two = {"linear": draw(st.floats(1e-9, 1)), "quadratic": draw(st.floats(0, 1e-4)), **terms}
    rounded = draw(st.just(0.0) | st.floats(1, 50))
    return draw(
        st.sampled_from(
            [
                PowerCost(scale=draw(st.floats(1e-9, 1)), exponent=draw(st.floats(0.5, 4)), **terms),
                TwoTermCost(**two),
                RooflineCost(floor=draw(st.floats(0, 1e5)), sharpness=rounded, **two),
            ]
        )
    )


def test_without_a_calibration_cost_is_b_times_s_squared():
    assert PowerCost().cost(3, 10) == 300


def test_roofline_is_the_two_terms_above_its_floor():
    assert ROOFLINE.cost(1, 100) == 40.0
    assert ROOFLINE.cost(2, 10000) == pytest.approx(4 + 0.005 * 20000 + 3e-7 * 2e8)


def test_text_is_a_term_a_sample():
    with_text = TwoTermCost(intercept=1.0, linear=0.01, quadratic=0.0, text=0.5)
    assert with_text.cost(4, 100) == pytest.approx(1 + 4 * (1.0 + 0.5))


@pytest.mark.parametrize("model", MODELS)
def test_largest_batch_is_the_last_that_fits(model):
    tokens = np.array([16, 256, 1560, 75600])
    for budget in (200.0, 1e3, 1e6, float(model.cost(3, 1560))):
        largest = model.largest_batch(tokens, budget)
        fits = np.where(largest > 0, model.cost(largest, tokens), 0.0)
        assert (fits <= budget * (1 + 1e-6)).all()
        assert (model.cost(largest + 1, tokens) > budget).all()


@given(models(), st.integers(1, 10**6), st.lists(st.integers(1, 200_000), min_size=1, max_size=4))
@settings(deadline=None)
def test_a_batch_fits_the_budget_that_is_its_cost(model, batch, tokens):
    for budget in model.cost(batch, np.array(tokens)).tolist():
        largest = model.largest_batch(tokens, budget)
        costs = model.cost(np.maximum(1, largest), tokens)
        assert (np.where(largest > 0, costs, 0.0) <= budget * (1 + 1e-8)).all()
    for length in tokens:
        assert model.largest_batch(length, float(model.cost(batch, length))) >= batch


def test_near_a_rounded_floor_every_single_sample_fits_its_own_cost():
    # Up to S ~ 4000 the cost alone is 170 to the last digit or nearly so: (straight / 170)^23 is lost in it.
    lengths = np.arange(1, 10_000)
    costs = ROUNDED.cost(1, lengths)
    assert (costs == 170.0).sum() > 1000
    alone = [int(ROUNDED.largest_batch(length, cost)) for length, cost in zip(lengths, costs, strict=True)]
    assert min(alone) >= 1


@pytest.mark.parametrize("model", [ROOFLINE, ROUNDED])
def test_a_budget_below_the_floor_fits_nothing(model):
    assert model.largest_batch([16], 0.99 * model.floor).tolist() == [0]
    assert model.largest_batch([16], model.floor).tolist() > [0]


def test_the_longest_sample_meets_a_budget_made_from_it():
    assert PowerCost().largest_batch([75600], 75600.0**2).tolist() == [1]


@pytest.mark.parametrize("model", MODELS)
def test_models_travel_as_plain_dicts(model):
    assert cost_from_dict(cost_to_dict(model)) == model


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"form": "cubic"}, "cubic"),
        ({"form": "two_term", "linear": 1.0}, "quadratic"),
        ({"form": "power", "slope": 1.0}, "slope"),
        ({"form": "power", "exponent": float("nan")}, "exponent"),
        ({"form": "two_term", "linear": 0.0, "quadratic": 0.0}, "does not grow"),
        ({"form": "roofline", "linear": 1.0, "quadratic": 0.0, "floor": 1.0, "sharpness": 0.5}, "sharpness"),
    ],
)
def test_a_broken_model_is_refused_by_name(data, named):
    with pytest.raises(CalibrationError, match=named):
        cost_from_dict(data)
