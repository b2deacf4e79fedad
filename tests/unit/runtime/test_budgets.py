"""Names of budgets, what the lab has to state for them, and what a step costs."""

import pytest

from foreshard.control.nominal import cluster_state
from foreshard.control.slots import Budget
from foreshard.errors import SpecError
from foreshard.lab.lab import Lab
from foreshard.runtime.adaptive.budgets import NAMES, budget_of, check_budgets, spent
from foreshard.spec.plan_file import parse_plan

LAB = Lab(
    clock="cpu",
    slow=(1.0, 2.0, 2.0),
    devices=("a", "b", "b"),
    bandwidth_bytes_per_s=1e9,
    latency_s=0.0,
    usd_per_h=(4.0, 1.0, 1.0),
    busy_w=(300.0, 100.0, 100.0),
    idle_w=(60.0, 20.0, 20.0),
    kg_per_kwh=(0.5, 0.1, 0.1),
)
PLAN = parse_plan(
    {
        "global_batch": 4,
        "seq_len": 8,
        "precision": "fp32",
        "groups": [
            {"share": 3, "stages": [{"ranks": [0], "layers": [[0, 4]]}]},
            {"share": 1, "stages": [{"ranks": [2], "layers": [[0, 4]]}]},
        ],
    }
)


def test_names_say_what_and_per_what():
    assert NAMES == (
        "usd_per_h",
        "usd_per_step",
        "energy_j_per_h",
        "energy_j_per_step",
        "carbon_kg_per_h",
        "carbon_kg_per_step",
    )
    assert budget_of("usd_per_h=3.5") == Budget(name="usd_per_h", kind="usd", limit=3.5, per="hour")
    found = budget_of("energy_j_per_step=900")
    assert (found.kind, found.limit, found.per) == ("joule", 900.0, "step")
    duty = budget_of("duty:2=0.5")
    assert (duty.kind, duty.worker, duty.per, duty.limit) == ("duty", 2, "second", 0.5)


@pytest.mark.parametrize(
    "text",
    [
        "euro_per_h=3",
        "usd_per_h=",
        "usd_per_h=much",
        "usd_per_h=-1",
        "usd_per_h",
        "duty=0.5",
        "duty:x=0.5",
        "duty:1=2",
        "duty:1=0",
        "usd=3",
        "energy_j_per_h=nan",
    ],
)
def test_what_is_no_budget_is_refused_with_the_names(text):
    with pytest.raises(SpecError) as told:
        budget_of(text)
    assert told.value.rule


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("usd_per_step=1", "usd_per_h", "no prices"),
        ("energy_j_per_h=1", "busy_w", "no power"),
        ("carbon_kg_per_h=1", "kg_per_kwh", "no carbon_kg_per_kwh"),
        ("carbon_kg_per_h=1", "busy_w", "no power"),
    ],
)
def test_what_the_lab_does_not_state_has_no_budget(text, field, said):
    from dataclasses import replace

    check_budgets([budget_of(text)], LAB.cluster())
    for lacking in ((1.0, None, 1.0), (0.0, 0.0, 0.0)):
        with pytest.raises(SpecError, match=said):
            check_budgets([budget_of(text)], replace(LAB, **{field: lacking}).cluster())


def test_duty_is_of_a_rank_of_the_lab():
    check_budgets([budget_of("duty:2=0.5")], LAB.cluster())
    with pytest.raises(SpecError, match="rank 3 of 3"):
        check_budgets([budget_of("duty:3=0.5")], LAB.cluster())


def test_a_step_costs_what_its_ranks_do():
    """Two seconds: rank 0 computes for all of them, rank 2 for one; rank 1 is not in use."""
    work_s = {0: 2.0, 2: 1.0}

    def cost(text):
        return spent(budget_of(text), cluster_state(LAB.cluster())[0], PLAN, 2.0, work_s)

    assert cost("usd_per_h=1") == pytest.approx(5.0 * 2 / 3600)
    assert cost("energy_j_per_step=1") == pytest.approx(2 * 300 + 100 + 20)
    assert cost("carbon_kg_per_step=1") == pytest.approx((600 * 0.5 + 120 * 0.1) / 3.6e6)
    assert (cost("duty:2=1"), cost("duty:1=1")) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("usd_per_hour = 3", "usd_per_h=3"),
        ("USD/h=3 $", "usd_per_h=3"),
        ("energy_j_per_h=1 kWh", "energy_j_per_h=3.6e6"),
        ("carbon_kg_per_step=500 g", "carbon_kg_per_step=0.5"),
        ("duty:2=50 %", "duty:2=0.5"),
    ],
)
def test_budgets_are_read_as_people_write_them(text, same):
    assert budget_of(text) == budget_of(same)


def test_two_limits_of_one_budget_are_refused():
    with pytest.raises(SpecError, match="two limits"):
        check_budgets([budget_of("duty:1=0.5"), budget_of("duty:1=50 %")], LAB.cluster())
