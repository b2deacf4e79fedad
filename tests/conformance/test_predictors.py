"""Every engine against every promise of a Prediction, on runs that between them use every kind of plan."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from functools import cache

import pytest

from foreshard import api
from foreshard.predict import predict
from foreshard.predict.step import ENGINES
from foreshard.spec.plan import Group, Plan, Stage
from foreshard.spec.prediction import MEMORY_PARTS, TIME_PARTS

RUNS = {
    "one device": ("gpt2", "1x1xrtx-3090", {}),
    "data": ("llama3-8b", "2x8xh100-sxm", {"zero": 0}),
    "sharded": ("llama3-8b", "2x8xh100-sxm", {"zero": 3, "framework": "composer", "shard_size": 8}),
    "tensor and pipeline": ("llama3-70b", "8x8xh100-sxm", {"tp": 8, "pp": 4, "global_batch": 32}),
    "virtual stages": ("llama3-8b", "2x8xh100-sxm", {"tp": 2, "pp": 4, "vpp": 2, "recompute": "full"}),
    "zero bubble": ("llama3-8b", "2x8xa100-sxm-80gb", {"pp": 4, "schedule": "zb-h1", "global_batch": 32}),
    "all at once": ("llama3-8b", "2x8xh100-sxm", {"pp": 2, "schedule": "gpipe", "recompute": "selective"}),
    "context": ("llama3-8b", "2x8xh100-sxm", {"cp": 4, "tp": 2, "seq_len": 32768}),
    "experts": ("mixtral-8x7b", "2x8xh100-sxm", {"ep": 8, "tp": 2, "framework": "megatron-bridge@26.06"}),
    "8 bit": ("llama3-8b", "1x8xh100-sxm", {"precision": "fp8", "tp": 2}),
    "uneven blocks": ("gpt3-13b", "2x8xa100-sxm-80gb", {"pp": 16, "global_batch": 16, "offload": "all"}),
    "mixed": ("llama3-8b", "1x4xa100-sxm-40gb+1x4xv100-sxm-16gb@100Gb/s", None),
}
CASES = [
    pytest.param(name, engine, costs, id=f"{name}-{engine}-{costs}")
    for name in RUNS
    for engine in ENGINES
    for costs in ("formula", "learned")
]
each = pytest.mark.parametrize(("name", "engine", "costs"), CASES)


def mixed_plan():
    """Two groups: one inside a node, one over both; uneven shares, cuts, degrees; one idle device."""
    inside = Group(share=7, micro_batch=2, stages=(Stage(ranks=(0, 1), layers=((0, 34),), tp=2, zero=0),))
    left = Stage(ranks=(2, 3), layers=((0, 25),), rank_shares=(1, 2), zero=1)
    right = Stage(ranks=(4, 5, 6), layers=((25, 34),), zero=1, recompute="full")
    across = Group(share=5, micro_batch=3, stages=(left, right))
    return Plan(global_batch=12, seq_len=2048, precision="fp16", groups=(inside, across))


@cache
def inputs(name):
    model_name, cluster_name, choices = RUNS[name]
    model, cluster = api.load_model(model_name), api.load_cluster(cluster_name)
    plan = mixed_plan() if choices is None else api.make_plan(model, cluster, **choices)
    return model, cluster, plan


@cache
def predicted(name, engine, costs):
    return predict(*inputs(name), engine=engine, costs=costs, tokens=1e12, usd_per_device_hour=2.0)


def numbers(value, path=""):
    """Every number in nested data with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from numbers(inner, f"{path}[{i}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


@each
def test_time_parts_sum_to_the_step(name, engine, costs):
    got = predicted(name, engine, costs)
    assert tuple(got.time_breakdown_s) == TIME_PARTS
    assert min(got.time_breakdown_s.values()) >= 0.0
    assert sum(got.time_breakdown_s.values()) == pytest.approx(got.step_time_s, rel=1e-9)


@each
def test_the_interval_holds_the_step(name, engine, costs):
    got = predicted(name, engine, costs)
    low, high = got.step_time_interval_s
    assert 0.0 < low < got.step_time_s < high and got.interval == 0.9


@each
def test_memory_parts_sum_to_the_peak_of_the_fullest_stage(name, engine, costs):
    got = predicted(name, engine, costs).memory
    assert tuple(got.breakdown_bytes) == MEMORY_PARTS
    assert min(got.breakdown_bytes.values()) >= 0.0
    assert sum(got.breakdown_bytes.values()) == pytest.approx(got.peak_bytes, rel=1e-12)
    assert got.peak_allocated_bytes == pytest.approx(got.peak_bytes - got.breakdown_bytes["reserved"])
    counted = [got.counted(kind) for kind in ("allocated", "reserved", "device")]
    assert counted == sorted(counted) and counted[-1] == got.peak_bytes


@each
def test_every_stage_has_a_peak_and_the_fullest_rank_one_of_them(name, engine, costs):
    _, cluster, plan = inputs(name)
    memory = predicted(name, engine, costs).memory
    assert [len(row) for row in memory.per_stage_peak_bytes] == [len(group.stages) for group in plan.groups]
    (place,) = [
        (g, s)
        for g, group in enumerate(plan.groups)
        for s, stage in enumerate(group.stages)
        if memory.peak_rank in stage.ranks
    ]
    assert memory.per_stage_peak_bytes[place[0]][place[1]] == pytest.approx(memory.peak_bytes, rel=1e-12)
    assert memory.capacity_bytes == cluster.device_of(memory.peak_rank).capacity_bytes
    assert memory.fits <= (memory.peak_bytes <= memory.capacity_bytes)


@each
def test_the_same_input_gives_the_same_bytes(name, engine, costs):
    first = predicted(name, engine, costs).to_dict()
    again = predict(*inputs(name), engine=engine, costs=costs, tokens=1e12, usd_per_device_hour=2.0).to_dict()
    first.pop("predict_s"), again.pop("predict_s")
    assert json.dumps(first) == json.dumps(again)


@each
def test_inputs_stay_as_they_are(name, engine, costs):
    before = copy.deepcopy(inputs(name))
    predict(*inputs(name), engine=engine, costs=costs)
    assert before == inputs(name)


@each
def test_json_holds_finite_numbers_only(name, engine, costs):
    data = json.loads(json.dumps(predicted(name, engine, costs).to_dict(), allow_nan=False))
    assert data["schema_version"] == 1
    found = dict(numbers(data))
    assert found and all(math.isfinite(value) for value in found.values())
    assert all(value >= 0 for value in found.values())


@each
def test_rates_follow_from_the_step(name, engine, costs):
    model, cluster, plan = inputs(name)
    got = predicted(name, engine, costs)
    devices = len(plan.ranks)
    peak = sum(cluster.device_of(rank).peak(plan.precision) for rank in plan.ranks)
    flops = model.flops_per_token(plan.seq_len, False) * plan.tokens
    assert got.tokens_per_s * got.step_time_s == pytest.approx(plan.tokens)
    assert got.samples_per_s * plan.seq_len == pytest.approx(got.tokens_per_s)
    assert got.tokens_per_s_per_device * devices == pytest.approx(got.tokens_per_s)
    assert got.mfu == pytest.approx(flops / got.step_time_s / peak)
    assert 0.0 < got.mfu_causal < got.mfu <= got.hfu < 1.0
    usd = 2.0 * cluster.num_devices * got.step_time_s / 3600
    assert got.cost.usd_per_step == pytest.approx(usd)
    assert got.cost.usd_per_1b_tokens == pytest.approx(usd / plan.tokens * 1e9)
    assert got.cost.usd_total == pytest.approx(usd / plan.tokens * 1e12)


@each
def test_what_takes_time_is_explained(name, engine, costs):
    got = predicted(name, engine, costs)
    takes_time = {part for part, value in got.time_breakdown_s.items() if value > 0}
    assert takes_time | {"step_time_s", "mfu", "hfu", "energy_j_per_step"} <= set(got.explain)
    assert all(text == text.strip() and "nan" not in text for text in got.explain.values())
    assert got.assumptions and got.bottleneck and got.evidence and got.catalog_version


@each
def test_one_measured_step_is_met(name, engine, costs):
    plain = predicted(name, engine, costs)
    seconds = 1.25 * plain.step_time_s
    got = predict(*inputs(name), engine=engine, costs=costs, observed_step_s=seconds)
    assert got.step_time_s == pytest.approx(seconds) and got.fidelity == "calibrated"
    assert sum(got.time_breakdown_s.values()) == pytest.approx(seconds, rel=1e-9)
    for part, value in plain.time_breakdown_s.items():
        assert got.time_breakdown_s[part] == pytest.approx(1.25 * value)
    assert "1.250 of the time predicted without it" in got.assumptions[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_another_process_gives_the_same_bytes(engine):
    """Hash seeds and the order of sets leave no trace."""
    code = (
        "import json,sys;from foreshard import api;from foreshard.predict import predict;"
        "m,c=api.load_model('mixtral-8x7b'),api.load_cluster('1x4xa100-sxm-40gb+1x4xv100-sxm-16gb@100Gb/s');"
        "p=api.make_plan(m,c,ep=4,tp=2,pp=2,precision='fp16',global_batch=8);"
        f"d=predict(m,c,p,engine={engine!r}).to_dict();d.pop('predict_s');print(json.dumps(d))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(texts) == 1
