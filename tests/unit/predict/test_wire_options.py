"""The algorithm of all-reduces and the bucket size as part of a plan."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshard import api
from foreshard.comm.collectives import all_reduce_s
from foreshard.comm.fabric import fabric_between, links_alone, network_alone
from foreshard.errors import SpecError
from foreshard.spec.plan_file import parse_plan

CLUSTERS = (
    "1x8xh100-sxm",
    "4x8xh100-sxm",
    "4x8xa100-sxm-80gb@100Gb/s",
    "2x8xl40s@100Gb/s",
    "2x8xv100-sxm-16gb",
)
groups = st.tuples(
    st.sampled_from(CLUSTERS), st.integers(1, 40), st.sampled_from([2, 4, 8, 16]), st.sampled_from([1, 2, 8])
)


def seconds(cluster, size, ranks, stride, algorithm="auto", part=lambda fabric: fabric):
    cluster = api.load_cluster(cluster)
    fabric = fabric_between(cluster, range(cluster.num_devices), collectives=algorithm)
    return float(all_reduce_s(2.0**size, ranks, stride, part(fabric)))


@given(groups)
def test_the_faster_algorithm_is_taken_unless_one_is_asked_for(group):
    cluster, size, ranks, stride = group
    ring, tree, faster = (seconds(cluster, size, ranks, stride, name) for name in ("ring", "tree", "auto"))
    assert faster == min(ring, tree) < float("inf")


@given(groups, st.sampled_from(["auto", "ring", "tree"]))
def test_bytes_occupy_links_and_nics_no_longer_than_the_collective_takes(group, algorithm):
    parts = [seconds(*group, algorithm, part) for part in (links_alone, network_alone)]
    assert 0.0 < max(parts) <= seconds(*group, algorithm) * (1.0 + 1e-9)


def data_parallel(**choices):
    model, cluster = api.load_model("llama3-8b"), api.load_cluster("8x8xh100-sxm@400Gb/s")
    given_ = {"tp": 2, "global_batch": 64, "seq_len": 2048, "grad_overlap": True} | choices
    return api.predict(model, cluster, **given_)


@pytest.mark.parametrize("engine", ["analytical", "graph"])
def test_engines_price_the_algorithm_of_the_plan(engine):
    steps = {
        name: data_parallel(engine=engine, zero=0, collectives=name).step_time_s
        for name in ("auto", "ring", "tree")
    }
    assert steps["auto"] == pytest.approx(min(steps["ring"], steps["tree"]), rel=1e-9)
    assert steps["ring"] != steps["tree"]


@pytest.mark.parametrize("network", ["closed-form", "flow"])
def test_the_best_buckets_are_no_slower_than_any_tried(network):
    best = data_parallel(buckets="auto", network=network)
    assert best.step_time_s <= data_parallel(network=network).step_time_s * (1.0 + 1e-9)
    for mib in (1, 64, 512, 2048, 16384):
        stated = data_parallel(buckets=mib * 2**20, network=network)
        assert stated.plan.buckets == mib * 2**20
        assert best.step_time_s <= stated.step_time_s * (1.0 + 1e-9)
    again = api.predict(
        api.load_model("llama3-8b"), api.load_cluster("8x8xh100-sxm@400Gb/s"), best.plan, network=network
    )
    assert again.step_time_s == best.step_time_s


def test_sharded_weights_have_no_buckets_to_choose():
    assert data_parallel(zero=3, buckets="auto").plan.buckets is None


def test_a_plan_file_states_both():
    plan = replace(data_parallel().plan, collectives="ring", buckets=64 * 2**20)
    assert parse_plan(json.loads(json.dumps(plan.to_dict()))) == plan
    assert {"collectives", "buckets"}.isdisjoint(data_parallel().plan.to_dict())


@pytest.mark.parametrize(
    ("key", "value"), [("collectives", "rings"), ("buckets", 0), ("buckets", True), ("buckets", "many")]
)
def test_a_plan_file_with_another_value_is_refused(key, value):
    with pytest.raises(SpecError) as caught:
        parse_plan(data_parallel().plan.to_dict() | {key: value}, file="plan.json")
    assert caught.value.file == "plan.json" and key in caught.value.key


@pytest.mark.parametrize(
    ("choices", "key"),
    [
        ({"collectives": "rings"}, "--collectives"),
        ({"buckets": 0}, "--buckets"),
        ({"buckets": 1.5}, "--buckets"),
        ({"buckets": "auto", "engine": "analytical"}, "--buckets"),
    ],
)
def test_bad_choices_name_their_flag(choices, key):
    with pytest.raises(SpecError) as caught:
        data_parallel(**choices)
    assert caught.value.key == key and caught.value.fix


@pytest.mark.parametrize("asked", [{"collectives": "ring"}, {"buckets": 256 * 2**20}, {"buckets": "auto"}])
def test_predicting_a_plan_gives_what_the_search_promised(asked):
    model, cluster = api.load_model("llama3-8b"), api.load_cluster("2x8xh100-sxm@400Gb/s")
    found = api.plan(
        model, cluster, global_batch=32, seq_len=2048, budget_s=2.0, comm=("grad_overlap",), top=2, **asked
    )
    for one in found.plans:
        read = parse_plan(one.plan.to_dict())
        assert read.collectives == asked.get("collectives", "auto")
        assert api.predict(model, cluster, read).step_time_s == one.prediction.step_time_s
        assert found.lower_bound_step_time_s <= one.prediction.step_time_s * (1.0 + 1e-9)


def test_an_export_says_how_to_set_both():
    plan = replace(data_parallel().plan, collectives="ring", buckets=64 * 2**20)
    notes = " ".join(api.export(plan, "megatron").notes)
    assert "NCCL_ALGO=allreduce:Ring" in notes and "16,777,216 elements" in notes
    assert "NCCL_ALGO" not in " ".join(api.export(data_parallel().plan, "megatron").notes)
