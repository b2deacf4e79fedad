"""Intervals on peak memory: coverage of held-out runs, probabilities of fitting, the margin of a search."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.models import load_model
from foreshard.catalog.shipped import shipped
from foreshard.errors import SpecError
from foreshard.planner.headroom import asking, leaving_free
from foreshard.planner.request import MARGIN, checked_request
from foreshard.planner.search import plan
from foreshard.predict.interval import signed_quantiles
from foreshard.predict.memory_interval import (
    _of,
    fits_probability,
    kin,
    memory_interval,
    usable_share,
)

GIB = 2**30
KNOWN, POOLED = load_framework("megatron-core"), load_framework("torchtitan")

RESIDUALS = shipped("memory_residuals.json")


@pytest.mark.parametrize("figure", ["allocated", "reserved"])
def test_ninety_percent_intervals_hold_nine_tenths_of_runs_left_out(figure):
    """Each run is judged by an interval from all others of the pool."""
    values = [value for own in RESIDUALS[figure].values() for value in own]
    inside = 0
    for i, value in enumerate(values):
        low, high = signed_quantiles(values[:i] + values[i + 1 :])
        inside += low <= value <= high
    assert 0.85 <= inside / len(values) <= 0.95


def test_kin_with_twenty_runs_are_judged_by_themselves():
    assert kin(load_framework("nemo")) == "megatron-core"
    assert len(_of("reserved", "megatron-core")) == len(RESIDUALS["reserved"]["megatron-core"])
    assert len(_of("reserved", "fsdp2")) == sum(map(len, RESIDUALS["reserved"].values()))


@pytest.mark.parametrize("framework", [KNOWN, POOLED])
def test_the_usable_share_is_where_the_probability_is_reached(framework):
    for probability in (0.1, 0.5, 0.8, 0.9, 0.95):
        share = usable_share(framework, probability)
        assert 0 < share <= 1
        assert fits_probability(framework, share * GIB, GIB) >= probability
        if share < 1:
            assert fits_probability(framework, share * GIB * 1.0001, GIB) < probability


def test_probability_falls_with_the_peak():
    rng = np.random.default_rng(5)
    peaks = np.sort(rng.uniform(0.3, 2.0, 200)) * GIB
    found = [fits_probability(POOLED, peak, GIB) for peak in peaks]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.95 > found[-1] == 0.0


def test_intervals_hold_the_prediction():
    low, high = memory_interval(POOLED, 10 * GIB)
    assert low < 10 * GIB < high
    assert math.isfinite(high)


@pytest.mark.parametrize("margin", [-0.1, 1.0, 0.999])
def test_a_margin_that_cannot_be_shown_is_refused(margin):
    with pytest.raises(SpecError, match="--memory-margin"):
        usable_share(KNOWN, margin)


def _asked(**words):
    return checked_request(load_model("llama3-8b"), load_cluster("1x8xh100-sxm"), global_batch=8, **words)


def _usable(request):
    """Return what plans of a request may take of a device."""
    return request.cluster.nodes[0].device.capacity_bytes


def test_a_search_leaves_memory_free_unless_it_is_asked_not_to():
    whole = _usable(_asked())
    assert _usable(leaving_free(_asked())) == pytest.approx(whole * usable_share(KNOWN, MARGIN))
    assert _usable(leaving_free(_asked())) < whole
    assert _usable(leaving_free(_asked(memory_margin=0.0))) == whole


@pytest.mark.parametrize("margin", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("label", ["megatron-core", "torchtitan"])
def test_a_changed_request_leaves_as_much_as_one_that_asks_so_from_the_start(label, margin):
    changed = asking(leaving_free(_asked()), framework=load_framework(label), margin=margin)
    stated = leaving_free(_asked(framework=label, memory_margin=margin))
    assert _usable(changed) == pytest.approx(_usable(stated))


def test_a_plan_keeps_the_margin_and_is_shown_beside_all_memory():
    """At 8k the best plan without tensor parallelism and without a margin fills 98 % of a device."""
    words = {"global_batch": 64, "seq_len": 8192, "engine": "analytical", "tp": 1, "cp": 1, "budget_s": 3.0}
    model, cluster = load_model("llama3-8b"), load_cluster("1x8xh100-sxm")
    whole = cluster.nodes[0].device.capacity_bytes
    kept, filled = plan(model, cluster, **words), plan(model, cluster, memory_margin=0.0, **words)
    assert "--memory-margin 0.95" in kept.space and "margin" not in filled.space
    for found in kept.plans:
        memory = found.prediction.memory
        assert memory.capacity_bytes == whole and memory.fits_probability >= MARGIN
    assert filled.plans[0].prediction.memory.fits_probability < MARGIN
    assert filled.lower_bound_step_time_s <= kept.plans[0].prediction.step_time_s
