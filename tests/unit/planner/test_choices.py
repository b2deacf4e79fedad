"""What is fixed, limited or forbidden holds for every plan of a search, and nothing else does."""

import re
from functools import cache

import pytest

from foreshard import api
from foreshard.catalog.frameworks import load_framework
from foreshard.errors import SpecError
from foreshard.planner import idle_devices as idle
from foreshard.planner.choices import choices
from foreshard.planner.grid.equal_nodes import search_homogeneous
from foreshard.planner.grid.space import cells_of, passes_of, rows_of
from foreshard.planner.request import checked_request
from foreshard.planner.solver.time_budget import TimeBudget

MEGATRON = load_framework("megatron-core")
ASKED = {"global_batch": 32, "seq_len": 2048, "engine": "analytical", "budget_s": 20.0, "top": 50}
BRIEFLY = {"budget_s": 2.0, "top": 5}
LONGER = BRIEFLY | {"budget_s": 8.0}  # a search without limits that a busy machine cuts short is no measure
STATED = [
    {"tp": 2},
    {"pp": (2, 4), "micro_batch": 1},
    {"recompute": "none", "zero": 1},
    {"min_tp": 2, "max_tp": 4, "max_pp": 2},
    {"forbid": ("recompute=full", "tp=8", "zero=3")},
    {"dp": 4, "sp": False},
    {"vpp": 2},
    {"offload": "none", "schedule": "1f1b", "cp": 1},
]


def rows(**stated):
    model, cluster = api.load_model("llama3.2-1b"), api.load_cluster("8xh100")
    request = checked_request(model, cluster, **ASKED, **stated)
    grid = request.grid_on(cluster)
    table = rows_of(grid, passes_of(grid, cells_of(grid)))
    plan = {"seq_len": 2048, "framework": "megatron-core", "precision": "bf16", "optimizer": "adamw"}
    return [table.plan(i, model, **plan) for i in range(len(table))]


@cache
def unstated_s(cluster):
    """Return the step time of the best plan when nothing is stated."""
    found = api.plan(api.load_model("llama3.2-1b"), api.load_cluster(cluster), **ASKED | LONGER)
    return found.plans[0].prediction.step_time_s


@pytest.fixture(scope="module")
def everything():
    return rows()


@pytest.mark.parametrize("stated", STATED, ids=str)
@pytest.mark.slow
def test_the_space_is_the_part_of_the_whole_that_is_as_stated(everything, stated):
    chosen = choices(stated, MEGATRON)
    expected = [plan for plan in everything if chosen.holds(plan)]
    assert 0 < len(expected) < len(everything)
    assert {repr(plan) for plan in rows(**stated)} == {repr(plan) for plan in expected}


EQUAL, MIXED = "8xh100", "4xh100+4xa100@100Gb/s"
QUICK = [(MIXED, STATED[2]), (MIXED, STATED[3])]
OTHERS = [(name, stated) for name in (EQUAL, MIXED) for stated in STATED[:5] if (name, stated) not in QUICK]


@pytest.mark.parametrize(
    ("name", "stated"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS)], ids=str
)
def test_plans_are_as_stated_and_none_that_is_stated_is_better(name, stated):
    model, cluster = api.load_model("llama3.2-1b"), api.load_cluster(name)
    found = api.plan(model, cluster, **ASKED | BRIEFLY, **stated)
    chosen = choices(stated, MEGATRON)
    assert found.plans and all(chosen.holds(one.plan) for one in found.plans)
    assert found.lower_bound_step_time_s <= found.plans[0].prediction.step_time_s
    assert found.plans[0].prediction.step_time_s >= unstated_s(name) * (1 - 0.02)


def test_the_search_of_a_part_is_the_best_of_that_part(everything):
    model, cluster = api.load_model("llama3.2-1b"), api.load_cluster("8xh100")
    found = search_homogeneous(checked_request(model, cluster, **ASKED, tp=4, recompute="full"))
    plans = [p for p in everything if choices({"tp": 4, "recompute": "full"}, MEGATRON).holds(p)]
    steps = [api.predict(model, cluster, plan, engine="analytical") for plan in plans[::7]]
    fitting = [one.step_time_s for one in steps if one.memory.fits]
    assert found.plans[0].prediction.step_time_s <= min(fitting) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("stated", "key", "words"),
    [
        ({"zero": 2}, "--zero", "It has 0, 1. The same flags run megatron-fsdp"),
        ({"min_tp": 4, "max_tp": 2}, "--min-tp", "The least is at most"),
        ({"forbid": ("tpp=8",)}, "--forbid", "NAME one of"),
        ({"recompute": "some"}, "--recompute", "Must be none"),
        ({"tp": 4, "forbid": ("tp=4",)}, "--tp", "Leave one of them out"),
        ({"tpp": 4}, "--tpp", "Did you mean"),
    ],
)
def test_what_cannot_be_stated_is_refused(stated, key, words):
    with pytest.raises(SpecError) as caught:
        choices(stated, MEGATRON)
    assert caught.value.key == key and words in str(caught.value)


def test_no_degree_as_stated_is_infeasible_and_says_so():
    model = api.load_model("llama3.2-1b")
    for cluster in ("8xh100", "4xh100+4xa100@100Gb/s"):
        found = api.plan(model, api.load_cluster(cluster), **ASKED, tp=3)
        assert found.infeasible is not None and "tp 3" in str(found.infeasible)
        assert found.infeasible.exit_code == 3


def test_adapters_are_stated_in_the_plan_and_predicted_from_it(tmp_path):
    model, cluster = api.load_model("llama3.2-1b"), api.load_cluster("2xh100")
    asked = ASKED | {"top": 1}
    chosen = api.plan(model, cluster, **asked, lora="16:q+v").plans[0]
    assert chosen.plan.lora == "16:q+v" and chosen.plan.to_dict()["lora"] == "16:q+v"
    again = api.predict(model, cluster, chosen.plan, engine="analytical")
    assert again.step_time_s == pytest.approx(chosen.prediction.step_time_s)
    assert again.memory.peak_bytes == pytest.approx(chosen.prediction.memory.peak_bytes)
    with_weights = api.plan(model, cluster, **asked).plans[0]
    assert chosen.prediction.step_time_s < with_weights.prediction.step_time_s


def test_idle_devices_are_explained():
    """What keeps them out is named with what it would take: memory, or no network at all."""
    model = api.load_model("llama3-8b")
    asked = {"global_batch": 64, "seq_len": 2048, "precision": "fp16", "budget_s": 4.0, "top": 1}
    found = api.plan(model, api.load_cluster("8xh100+8xt4@25GbE"), **asked)
    said = [note for note in found.notes if "t4 stay idle" in note]
    assert len(found.plans[0].plan.ranks) == 8
    assert said and ("GiB" in said[0] or "longer" in said[0])


def test_no_plan_is_priced_for_idle_devices_once_time_is_over(monkeypatch):
    """A note on a large cluster priced 759 plans and took seven seconds beyond ten."""
    model, cluster = (
        api.load_model("gpt2-xl"),
        api.load_cluster("1x2xh100-sxm@100Gb/s+1x2xa100-sxm-80gb@100Gb/s"),
    )
    asked = checked_request(model, cluster, global_batch=24, seq_len=1024, budget_s=1.0)
    chosen = api.make_plan(model, "1x2xh100-sxm", dp=2, global_batch=24, seq=1024)
    slower = api.make_plan(model, cluster, dp=4, global_batch=24, seq=1024)
    priced = []
    monkeypatch.setattr(idle, "engine_seconds", lambda _, plans: priced.extend(plans) or [1.0] * len(plans))
    (said,) = idle.idle_devices(asked, chosen, 1.0, [(2.0, slower)], TimeBudget.of(0.0))
    assert not priced and said.endswith("takes 100.0 % longer")
    (said,) = idle.idle_devices(asked, chosen, 1.0, [(2.0, slower)])
    assert priced and "would pay" in said


@pytest.mark.slow
def test_the_network_that_would_pay_does():
    model, cluster = api.load_model("gpt2-xl"), "1x2xh100-sxm{0}+1x2xa100-sxm-80gb{0}"
    asked = {"global_batch": 24, "seq_len": 1024, "budget_s": 60.0, "top": 1}  # ended by its proof
    slow = api.plan(model, cluster.format("@100Gb/s"), **asked)
    (note,) = [note for note in slow.notes if "a100-sxm-80gb stay idle" in note]
    rate = re.search(r"NICs of (\d+ Gb/s) on all nodes would pay", note)[1]
    fast = api.plan(model, cluster.format(f"@{rate}"), **asked)
    assert fast.plans[0].prediction.step_time_s < slow.plans[0].prediction.step_time_s
    assert len(fast.plans[0].plan.ranks) == 4


def test_a_stated_price_is_that_of_every_offer_to_rent():
    from foreshard.planner.rental import rent

    asked = {"global_batch": 64, "tokens": 1e9, "max_devices": 8, "budget_s": 5.0, "engine": "analytical"}
    names = ["aws-p5.48xlarge", "azure-nd96isr-h100-v5"]
    found = rent(api.load_model("llama3.2-1b"), instances=names, usd_per_device_hour=2.0, **asked)
    assert {offer.instance for offer in found.offers} == set(names)
    for offer in found.offers:
        prediction = offer.ranked.prediction
        assert offer.usd_per_h == pytest.approx(2.0 * 8 * offer.num_nodes)
        assert prediction.cost.usd_per_step == pytest.approx(offer.usd_per_h * prediction.step_time_s / 3600)
