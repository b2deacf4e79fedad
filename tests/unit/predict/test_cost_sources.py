"""Which cost source gave which share of a step, and that a search and a prediction ask the same one."""

import pytest

from foreshard import api
from foreshard.advise.diagnosis import diagnose
from foreshard.errors import SpecError


def predicted(cluster, model="llama3-8b", **options):
    return api.predict(api.load_model(model), api.load_cluster(cluster), **options)


def test_a_fitted_device_is_priced_by_formulas_unless_asked():
    auto, formula = (predicted("1x8xh100-sxm", costs=costs) for costs in ("auto", "formula"))
    assert auto.cost_sources == {"formula": 1.0} == formula.cost_sources
    assert (auto.step_time_s, auto.costs) == (formula.step_time_s, "formula")
    asked = predicted("1x8xh100-sxm", costs="learned")
    assert 0.2 < asked.cost_sources["learned"] < 1.0
    assert asked.costs == "learned and formula"


@pytest.mark.parametrize("engine", ["analytical", "graph"])
def test_shares_of_a_device_never_fitted(engine):
    found = predicted("1x8xh20-sxm", engine=engine)
    assert list(found.cost_sources) == ["learned", "formula"]
    assert sum(found.cost_sources.values()) == pytest.approx(1.0, abs=1e-12)
    # Collectives, optimizer and elementwise kernels have formulas only.
    computed = found.time_breakdown_s["compute"] / found.step_time_s
    assert 0.2 < found.cost_sources["learned"] < computed
    assert found.evidence == "learned"
    assert f"learned {found.cost_sources['learned']:.1%}" in found.explain["cost_sources"]
    assert found.to_dict()["cost_sources"] == found.cost_sources


def test_only_the_learned_kernels_of_a_mixed_cluster_count():
    # The share grows with the devices that are priced by learned costs.
    mixed = predicted("1x8xh20-sxm+1x8xh100-sxm@100Gb/s", pp=2, global_batch=16)
    pure = predicted("2x8xh20-sxm@100Gb/s", pp=2, global_batch=16)
    assert 0 < mixed.cost_sources["learned"] < pure.cost_sources["learned"]


def test_narrow_products_and_unknown_devices_fall_back_to_formulas():
    assert predicted("1x8xh20-sxm", precision="fp8").cost_sources == {"formula": 1.0}
    for cluster in ("1x8xtpu-v4", "1x8xb100-sxm"):
        assert predicted(cluster, costs="learned").cost_sources == {"formula": 1.0}


def test_learned_costs_have_intervals_of_their_own():
    # Catches an interval as narrow as if kernels of the device had been timed: it missed a quarter of the
    # runs on a device left out (docs/cost_sources.md).
    learned, fitted = predicted("1x8xh20-sxm", costs="learned"), predicted("1x8xh100-sxm", costs="formula")
    widths = [one.step_time_interval_s[1] / one.step_time_interval_s[0] for one in (learned, fitted)]
    assert (learned.evidence, fitted.evidence) == ("learned", "fitted")
    assert widths[0] > widths[1] > 1.0


@pytest.mark.parametrize("costs", ["formula", "learned"])
def test_a_search_prices_plans_as_a_prediction_does(costs):
    # Catches a bound or a table of plans that asks another source than the plans shown.
    model, cluster = api.load_model("llama3-8b"), api.load_cluster("1x8xh20-sxm")
    result = api.plan(model, cluster, global_batch=16, top=1, budget_s=10, costs=costs, tp=(1,), pp=(1,))
    best = result.plans[0]
    again = api.predict(model, cluster, best.plan, costs=costs)
    assert best.prediction.step_time_s == pytest.approx(again.step_time_s, rel=1e-12)
    assert best.prediction.cost_sources == again.cost_sources
    assert result.lower_bound_step_time_s <= best.prediction.step_time_s * (1 + 1e-9)
    assert result.gap < 0.05


def test_learned_costs_at_datasheet_fidelity_are_refused():
    with pytest.raises(SpecError, match="uses no fitted constant") as error:
        predicted("1x8xh20-sxm", costs="learned", fidelity="datasheet")
    assert error.value.key == "--costs"
    with pytest.raises(SpecError, match="auto, formula, learned"):
        predicted("1x8xh20-sxm", costs="guessed")


def test_a_diagnosis_prices_by_the_source_that_is_asked_for():
    paths = {}
    for costs in ("formula", "learned"):
        asked = api.request("gpt2", "1x4xl4", global_batch=8, seq_len=512, costs=costs)
        path = diagnose(asked, asked.predict()).path
        paths[costs] = sum(place.seconds for place in path)
    assert paths["formula"] != paths["learned"]
