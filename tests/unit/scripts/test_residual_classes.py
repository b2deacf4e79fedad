import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from residual_classes import (
    LeftOut,
    build_classes,
    class_entry,
    coverage,
    cross_fitted,
    feature_scale,
    interval_of,
    judged_by_others,
    no_surer,
)

from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.models import load_model
from foreshard.predict.interval import (
    absolute_bounds,
    class_intervals,
    class_of,
    conformal_quantile,
    features_of,
    neighbour_distance,
    points_of,
    residual_classes,
    signed_quantiles,
    spread,
    step_intervals,
    widening,
)
from foreshard.spec.degrees import plan_from_degrees


def interval(predicted, residuals, level=0.9, factor=1.0):
    return spread(predicted, signed_quantiles(residuals, level), factor)


def test_quantile_is_an_order_statistic_of_n_plus_one():
    scores = np.arange(1, 20)
    assert conformal_quantile(scores, 0.9) == 18
    assert conformal_quantile(scores, 0.95) == 19
    assert conformal_quantile(scores[:5], 0.9) == np.inf


@pytest.mark.parametrize("skew", [0.0, 0.3])
def test_coverage_on_exchangeable_residuals(skew):
    """Finite-sample coverage is at least the level, and close to it."""
    rng = np.random.default_rng(7)
    hits = []
    for _ in range(400):
        residuals = rng.gamma(2.0, 0.1, 61) * (1 if skew else rng.choice([-1, 1], 61)) - skew
        low, high = interval(2.0, residuals[:-1], 0.9)
        measured = 2.0 * np.exp(residuals[-1])
        hits.append(float(low) <= measured <= float(high))
    assert 0.9 - 0.03 <= np.mean(hits) <= 0.9 + 0.05


def test_a_small_class_says_it_knows_nothing():
    low, high = interval(1.0, [0.1, 0.2], 0.9)
    assert (float(low), float(high)) == (0.0, np.inf)


def test_a_biased_class_gets_a_shifted_interval():
    low, high = signed_quantiles(np.linspace(0.1, 0.3, 200), 0.9)
    assert 0.1 <= low < high <= 0.3


def test_far_queries_get_wider_intervals():
    rng = np.random.default_rng(1)
    data = rng.normal(size=(200, 3)) * [1.0, 10.0, 100.0]
    scale = feature_scale(data)
    typical = float(np.quantile(neighbour_distance(data, data, scale, skip_self=True), 0.9))
    near, far = neighbour_distance([[0, 0, 0], [20, 200, 2000]], data, scale)
    assert near < far
    assert widening(near, typical) < widening(far, typical)
    assert widening(typical * 0.5, typical) == 1.0
    a = interval(1.0, rng.normal(0, 0.1, 100), 0.9, widening(near, typical))
    b = interval(1.0, rng.normal(0, 0.1, 100), 0.9, widening(far, typical))
    assert b[0] < a[0] < a[1] < b[1]


def test_distance_ignores_the_row_itself_only_when_told():
    data = np.array([[0.0], [1.0], [5.0]])
    assert neighbour_distance(data, data, [1.0]).tolist() == [0, 0, 0]
    assert neighbour_distance(data, data, [1.0], skip_self=True).tolist() == [1, 1, 4]


def left_out(family, residual, features=(0.0,), classes=("dense", "all")):
    return LeftOut(
        family=family, measured_s=float(np.exp(residual)), predicted_s=1.0, classes=classes, features=features
    )


def test_classes_need_enough_rows_and_fall_back_to_all():
    rng = np.random.default_rng(3)
    rows = [left_out("a", r, (float(i),)) for i, r in enumerate(rng.normal(0, 0.1, 30))]
    rows += [left_out("b", 0.5, (1.0,), ("moe", "all"))] * 5
    classes = build_classes(rows)
    assert set(classes) == {"dense", "all"}
    moe = interval_of(rows[-1], classes)
    dense = interval_of(rows[0], classes)
    assert moe is not None and dense is not None
    assert moe[1] - moe[0] > dense[1] - dense[0]


def test_coverage_of_a_family_never_uses_it_or_its_siblings():
    rng = np.random.default_rng(5)
    rows = [left_out("near", r, (float(i % 7),)) for i, r in enumerate(rng.normal(0, 0.05, 60))]
    rows += [left_out("odd", 1.0, (3.0,))] * 30
    rows += [left_out("sibling", 1.0, (3.0,))] * 30
    alone, apart = judged_by_others(rows), judged_by_others(rows, [("odd", "sibling")])
    assert all(alone[60:90])  # the sibling's shift is in the interval that judges it
    assert not any(apart[60:])
    assert coverage(apart[60:]) == 0.0


def test_cross_fitting_covers_the_level_within_a_class():
    rng = np.random.default_rng(6)
    rows = [left_out("a", r, (float(i % 7),)) for i, r in enumerate(rng.normal(0.1, 0.05, 300))]
    assert 0.85 <= coverage(cross_fitted(rows)) <= 0.95
    assert cross_fitted(rows) == cross_fitted(rows)
    assert coverage([None, None]) is None


def test_a_shift_counts_on_both_sides():
    assert absolute_bounds(np.linspace(0.1, 0.3, 200))[0] == -absolute_bounds(np.linspace(0.1, 0.3, 200))[1]
    low, high = class_entry([left_out("a", r) for r in np.linspace(0.1, 0.3, 40)], signed=True)["bounds"][
        "0.9"
    ]
    assert low == 0.0  # the prediction itself stays inside
    assert 0.2 < high <= 0.3


def test_a_class_is_no_surer_than_others_at_every_level():
    entry = {"bounds": {"0.5": [-0.1, 0.3], "0.9": [-0.4, 0.4]}, "rows": 20}
    other = {"bounds": {"0.5": [-0.2, 0.2], "0.9": [-0.3, 0.5]}}
    assert no_surer(entry, [other]) == {"bounds": {"0.5": [-0.2, 0.3], "0.9": [-0.4, 0.5]}, "rows": 20}
    assert no_surer(entry, []) == entry


def test_points_of_a_class_are_those_of_its_narrower_classes():
    points = {
        "dense:flash:wide": [[1.0]],
        "dense:flash:narrow": [[2.0]],
        "dense:unfused:wide": [[3.0]],
        "densely": [[4.0]],
    }
    assert points_of("dense:flash", points) == [[1.0], [2.0]]
    assert points_of("dense", points) == [[1.0], [2.0], [3.0]]
    assert len(points_of("all", points)) == 4


@pytest.fixture
def case():
    model = load_model("llama-3-8b")
    plan = plan_from_degrees(model.num_layers, 8, tp=8, seq_len=8192)
    return SimpleNamespace(model=model, plan=plan, framework=load_framework("megatron-core"))


PARTS = {"compute": 1.0, "host": 0.0}


def test_classes_say_what_a_prediction_rests_on(case):
    seen = case.model, case.plan, case.framework
    assert class_of(*seen, PARTS) == (
        "dense:flash:wide:fitted",
        "dense:flash:wide",
        "dense:flash",
        "dense",
        "all",
    )
    assert class_of(*seen, {"compute": 1.0, "host": 1.0})[3] == "host"
    assert class_of(*seen[:2], load_framework("megatron-lm@2021"), PARTS)[2] == "dense:unfused"
    assert class_of(*seen, PARTS, fidelity="calibrated")[0] == "calibrated:dense"
    assert len(features_of(case.model, case.plan)) == 7


def test_a_query_gets_its_narrowest_class(case):
    classes = {"all": {"bounds": {"0.9": [-1, 1]}}, "dense": {"bounds": {"0.9": [-0.1, 0.1]}}}
    names = class_of(case.model, case.plan, case.framework, PARTS)
    found = class_intervals(names, features_of(case.model, case.plan), 1.0, classes)
    assert found[0.9] == pytest.approx((np.exp(-0.1), np.exp(0.1)))


@pytest.mark.parametrize("fidelity", ["datasheet", "zero-shot", "calibrated"])
def test_shipped_classes_bound_every_query(case, fidelity):
    assert "all" in residual_classes()
    for parts in (PARTS, {"compute": 1.0, "host": 1.0}):
        low, high = step_intervals(case, 2.0, parts, fidelity=fidelity)[0.9]
        assert 0 < low <= 2.0 <= high < np.inf
        assert low < high
