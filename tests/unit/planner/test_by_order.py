"""Searches of schedules that have no closed form."""

from __future__ import annotations

import pytest

from foreshard import api
from foreshard.errors import SpecError

RUN = {"global_batch": 64, "seq_len": 4096, "framework": "torchtitan", "micro_batch": 1}


@pytest.fixture(scope="module")
def found():
    return api.plan("llama3-8b", "1x8xh100-sxm", schedule="zbv", **RUN)


def test_plans_are_as_stated_fit_and_are_timed_as_predict_times_them(found):
    assert found.plans and found.evaluated + found.pruned > len(found.plans)
    for one in found.plans:
        assert one.plan.groups[0].schedule == "zbv" and one.prediction.memory.fits_probability >= 0.95
        assert one.prediction.step_time_s == pytest.approx(
            api.predict("llama3-8b", "1x8xh100-sxm", one.plan).step_time_s
        )
    assert "zbv" in found.space and found.gap < 0.1


def test_none_of_the_grid_is_faster(found):
    """Every pair of degrees, with the rules that fit: the search must not miss one."""
    best = found.plans[0].prediction.step_time_s
    for tp, pp in ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)):
        for rule in ("none", "selective:op", "full"):
            one = api.predict(
                "llama3-8b", "1x8xh100-sxm", tp=tp, pp=pp, schedule="zbv", zero=2, recompute=rule, **RUN
            )
            assert one.memory.fits_probability < 0.95 or one.step_time_s >= best * (1 - 1e-9)


@pytest.mark.parametrize(
    "cluster, framework, schedule, said",
    [
        ("1x8xh100-sxm", "megatron-core", "zbv", "has no schedule zbv"),
        ("1x8xh100-sxm", "torchtitan", ("zbv", "1f1b"), "searched by themselves"),
        ("1x4xh100-sxm+1x4xa100-sxm-80gb", "torchtitan", "zbv", "equal nodes"),
    ],
)
def test_what_is_not_searched_is_said(cluster, framework, schedule, said):
    with pytest.raises(SpecError, match=said):
        api.plan("llama3-8b", cluster, global_batch=64, framework=framework, schedule=schedule)
