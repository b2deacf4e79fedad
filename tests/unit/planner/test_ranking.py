"""Why a plan stands where it does, and limits that nothing keeps."""

from dataclasses import replace

import pytest

from foreshard import load_cluster, load_model, predict
from foreshard.planner.ranking import Limits, ranked


@pytest.fixture(scope="module")
def predicted():
    return predict(load_model("llama3.2-1b"), load_cluster("1x8xh100-sxm"), tokens=1e13)


@pytest.mark.parametrize("name", ["max_usd", "max_hours"])
def test_the_limit_that_is_told_can_be_kept(predicted, name):
    error = Limits(**{name: 1e-6}).error([predicted])
    assert "e" not in error.fix.split()[1] and float(error.what.split()[-2]) <= float(error.fix.split()[1])
    told = float(error.fix.split()[1])
    assert Limits(**{name: told}).keeps(predicted) and not Limits(**{name: 0.999 * told}).keeps(predicted)


@pytest.mark.parametrize(
    ("slower", "said"), [(1.0003, "0.03% slower"), (1.02, "2.0% slower"), (1.0, "as fast")]
)
def test_reasons_show_digits_where_there_are_some(predicted, slower, said):
    parts = dict(predicted.time_breakdown_s)
    parts["compute"] += (slower - 1.0) * predicted.step_time_s
    plan = replace(predicted.plan, precision="fp8")
    other = replace(predicted, plan=plan, step_time_s=slower * predicted.step_time_s, time_breakdown_s=parts)
    plans, _ = ranked([predicted, other], ("time",), Limits(), 2)
    assert plans[0].why.startswith("chosen: ") and plans[1].why.startswith(said)
    if slower > 1.001:
        assert "ms more for computation" in plans[1].why


def test_one_plan_of_each_family_is_shown(predicted):
    group = predicted.plan.groups[0]
    plans = {
        "best": predicted.plan,
        "other shares": replace(predicted.plan, groups=(replace(group, micro_batch=2 * group.micro_batch),)),
        "other degrees": replace(
            predicted.plan, groups=(replace(group, stages=(replace(group.stages[0], tp=2),)),)
        ),
    }
    some = [
        replace(predicted, plan=plan, step_time_s=predicted.step_time_s * (1.0 + 0.001 * i))
        for i, plan in enumerate(plans.values())
    ]
    shown, _ = ranked(some[::-1], ("time",), Limits(), 5)
    assert [one.plan for one in shown] == [plans["best"], plans["other degrees"]]
