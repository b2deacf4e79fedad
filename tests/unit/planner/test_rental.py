"""Which instances to rent: offers in order, limits, and what was left out."""

from dataclasses import replace

import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.errors import InfeasibleError, LimitError, SpecError
from foreshard.planner.rental import rent
from foreshard.planner.search import plan
from foreshard.report.rental_table import rental_screen
from foreshard.spec.checks import check_plan

SOME = ("aws-p4d.24xlarge", "aws-p5.48xlarge", "aws-p3.16xlarge")
ASKED = {"global_batch": 64, "seq_len": 4096, "tokens": 1e10, "recompute": "full"}
RUN = ASKED | {"max_devices": 16, "instances": SOME}


@pytest.fixture(scope="module")
def cheapest():
    return rent(load_model("llama3-8b"), objective="cost", **RUN)


def test_offers_are_ordered_and_each_is_another_size(cheapest):
    dollars = [one.ranked.prediction.cost.usd_total for one in cheapest.offers]
    assert len(dollars) > 1
    assert dollars == sorted(dollars)
    assert len({(one.instance, one.num_nodes) for one in cheapest.offers}) == len(cheapest.offers)
    assert "bf16" in cheapest.left_out["aws-p3.16xlarge"]
    assert not cheapest.interrupted
    said = [rental_screen(replace(cheapest, interrupted=cut)).boxes[0].note for cut in (False, True)]
    assert [note.endswith("searched in time") for note in said] == [False, True]


def test_the_price_is_that_of_the_nodes_for_the_run(cheapest):
    for one in cheapest.offers:
        prediction = one.ranked.prediction
        assert prediction.cost.usd_total == pytest.approx(one.usd_per_h * prediction.run_time_s / 3600.0)
        cluster = load_cluster(one.cluster)
        assert cluster.num_devices <= 16
        check_plan(one.ranked.plan, load_model("llama3-8b"), cluster)


def test_the_first_offer_is_what_plan_finds_on_its_cluster(cheapest):
    first = cheapest.offers[0]
    found = plan(load_model("llama3-8b"), load_cluster(first.cluster), **ASKED).plans[0].prediction
    assert first.ranked.prediction.step_time_s <= found.step_time_s * (1 + 1e-9)


def test_a_limit_on_hours_costs_more(cheapest):
    hours = cheapest.offers[0].ranked.prediction.run_time_s / 3600.0
    least = cheapest.offers[0].ranked.prediction.cost.usd_total
    soon = rent(load_model("llama3-8b"), objective="cost", max_hours=hours / 2, **RUN)
    assert soon.infeasible is None
    assert all(one.ranked.prediction.run_time_s <= 1800.0 * hours for one in soon.offers)
    assert soon.offers[0].ranked.prediction.cost.usd_total >= least


def test_limits_that_nothing_meets():
    few = RUN | {"instances": SOME[:2], "max_devices": 8}
    result = rent(load_model("llama3-8b"), objective="time", max_hours=0.01, **few)
    assert isinstance(result.infeasible, LimitError)
    assert result.to_dict()["error"]["code"] == 4


def test_a_model_that_no_instance_holds():
    few = RUN | {"max_devices": 8, "instances": SOME[2:]}
    result = rent(load_model("gpt3-175b"), objective="cost", **few)
    assert isinstance(result.infeasible, InfeasibleError)
    assert not result.offers
    assert set(result.left_out) == set(few["instances"])


@pytest.mark.slow
def test_spot_prices_and_what_is_available_decide(cheapest):
    name = cheapest.offers[-1].instance
    spot = rent(load_model("llama3-8b"), objective="cost", usd_per_h={name: 0.01}, max_nodes={name: 2}, **RUN)
    first = spot.offers[0]
    assert first.instance == name
    assert first.price_date is None
    assert first.usd_per_h == pytest.approx(0.01 * first.num_nodes)
    assert max(one.num_nodes for one in spot.offers if one.instance == name) <= 2
    few = RUN | {"instances": ("aws-p5.48xlarge", name), "max_devices": 8}
    none = rent(load_model("llama3-8b"), objective="cost", max_nodes={name: 0}, **few)
    assert name in none.left_out


def test_an_unknown_instance():
    with pytest.raises(SpecError, match="unknown instance"):
        rent(load_model("llama3-8b"), **(RUN | {"instances": ("aws-p9",)}))


def test_nodes_whose_network_nobody_knows_are_not_rented_together():
    name = "lambda-gpu-8x-h100-sxm5"
    found = rent(load_model("llama3-8b"), objective="cost", **{**RUN, "instances": (name,)})
    assert {one.num_nodes for one in found.offers} == {1}
    assert "network" in found.left_out[name]


@pytest.mark.slow
def test_chips_for_inference_are_rented_by_name_only():
    asked = {key: value for key, value in RUN.items() if key != "instances"} | {"budget_s": 1e-3}
    assert rent(load_model("llama3-8b"), **asked).left_out["aws-inf2.48xlarge"] == "made for inference"
    named = rent(load_model("llama3-8b"), **{**RUN, "instances": ("aws-inf2.48xlarge",)})
    assert named.offers[0].instance == "aws-inf2.48xlarge"
