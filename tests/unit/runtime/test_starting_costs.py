"""What a policy starts from, measured, predicted or neither, and what it learns from the first steps."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.errors import SpecError
from foreshard.predict.measured.costs import load_costs
from foreshard.predict.measured.memory import measured_memory
from foreshard.runtime.adaptive.controller_config import ControllerConfig
from foreshard.runtime.adaptive.starting_costs import starting_costs
from foreshard.runtime.adaptive.steering import LEARNED_STEPS, Steering, SteppedRun
from foreshard.spec.plan import Group, Stage
from foreshard.spec.plan_file import load_plan, parse_plan

CLUSTER = """
[[devices]]
name = "fast"
base = "h100-sxm"
[[devices]]
name = "slow"
base = "a100-sxm-40gb"
[[nodes]]
count = 2
device = "fast"
per_node = 1
nic = "10 Gb/s"
usd_per_h = 4.0
power = "300 W"
carbon_kg_per_kwh = 0.4
[[nodes]]
count = 2
device = "slow"
per_node = 1
nic = "10 Gb/s"
usd_per_h = 1.0
carbon_kg_per_kwh = 0.1
"""


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return load_cluster(str(tmp_path / "cluster.toml"))


def test_prices_power_and_carbon_are_the_cluster_s(cluster, measured_job):
    costs, plan = measured_job(fast=1.0, slow=2.0)
    known = starting_costs(load_plan(plan), cluster, costs=load_costs(costs))
    state = known.state
    assert state.usd_per_h.tolist() == [4.0, 4.0, 1.0, 1.0] and state.speed.tolist() == [1.0, 1.0, 0.5, 0.5]
    assert state.busy_w.tolist() == [300.0, 300.0, 400.0, 400.0], "the a100's limit where nothing is stated"
    assert state.idle_w == pytest.approx(0.4 * state.busy_w)
    assert state.kg_per_j == pytest.approx(np.array([0.4, 0.4, 0.1, 0.1]) / 3.6e6)
    assert not known.unmeasured and known.knows_layers


def test_a_device_without_costs_starts_as_predicted_or_equal(cluster, measured_job):
    costs, file = measured_job(fast=1.0)
    plan, model = load_plan(file), replace_layers(load_model("gpt2-small"))
    alone = starting_costs(plan, cluster, costs=load_costs(costs))
    assert alone.unmeasured == {2, 3} and alone.state.speed.tolist() == [1.0] * 4
    predicted = starting_costs(plan, cluster, costs=load_costs(costs), model=model)
    assert predicted.unmeasured == {2, 3}
    assert predicted.state.speed[:2].tolist() == [1.0, 1.0] and (predicted.state.speed[2:] < 0.8).all()
    learned = predicted.learned({0: 0.9, 1: 1.0, 2: 0.3})
    assert learned.state.speed[[0, 1]].tolist() == [1.0, 1.0], "what was measured before stays"
    assert learned.state.speed[2] == 0.3
    assert learned.state.speed[3] == pytest.approx(0.9 * predicted.state.speed[3]), "rank 3 was idle"
    assert not learned.unmeasured and np.array_equal(learned.passes.pass_s, predicted.passes.pass_s)


def test_layers_take_the_memory_of_the_prediction_frozen_ones_included(cluster, measured_job):
    costs, file = measured_job(fast=1.0, slow=2.0)
    plan, told = load_plan(file), load_costs(costs)
    frozen = tuple(replace(layer, frozen_bytes=1e6 * i) for i, layer in enumerate(told.layers))
    told, count = replace(told, layers=frozen, tables={}), len(frozen)
    sizes = starting_costs(plan, cluster, costs=told).sizes
    stages = tuple(Stage(ranks=(i,), layers=((i, i + 1),), zero=0) for i in range(count))
    group = Group(share=8 * count, micro_batch=8, stages=stages, schedule="1f1b")
    peaks = measured_memory(told, cluster, replace(plan, global_batch=8 * count, groups=(group,)))
    held = sizes.state_bytes + 8 * np.arange(count, 0, -1) * sizes.saved_bytes
    assert held == pytest.approx(peaks.per_stage_peak_bytes[0])


def replace_layers(model):
    """Return the model with two blocks: with its ends the four layers of the measured job."""
    return replace(model, blocks=model.blocks[:2])


def test_without_costs_the_model_s_prediction_tells_layers_apart(cluster, measured_job):
    _, file = measured_job(fast=1.0)
    plan, model = load_plan(file), replace_layers(load_model("gpt2-small"))
    known = starting_costs(plan, cluster, model=model)
    assert known.unmeasured == {0, 1, 2, 3} and known.knows_layers
    seconds = known.passes.layer_s(4)
    assert (seconds[2, 1:] > 1.2 * seconds[0, 1:]).all(), "an a100 beside an h100"
    assert seconds[0, 0] < 0.7 * seconds[0, 1], "an embedding is no block"
    learned = known.learned({0: 1e-3, 1: 2e-3, 2: 1e-3, 3: 1e-3})
    assert learned.state.speed == pytest.approx([0.5, 1.0, 0.5, 0.5]), "the fastest rank has speed 1"
    assert learned.passes.layer_s(4) == pytest.approx(500.0 * seconds)
    with pytest.raises(SpecError, match="the plan splits 4 layers"):
        starting_costs(plan, cluster, model=load_model("gpt2-small"))


def test_the_prediction_is_of_the_plan_s_framework_and_what_it_sets_of_it(cluster, measured_job):
    """Eager kernels keep what those of Megatron do not; unfused attention keeps its scores besides."""
    _, file = measured_job(fast=1.0)
    plan, model = load_plan(file), replace_layers(load_model("gpt2-small"))
    ddp = replace(plan, framework="ddp")
    saved = [
        starting_costs(run, cluster, model=model).sizes.saved_bytes[1]
        for run in (plan, ddp, replace(ddp, attention="unfused"))
    ]
    assert saved[0] < saved[1] < saved[2]


def steered(config, sample_s, steps, *, first=0):
    """Let steps pass in which ranks take so long a sample; return the steering and what it proposed."""
    orders: list = []
    steering = Steering(config, orders.append)
    for step in range(first, first + steps):
        stage_s = {rank: seconds * (3.0 if step == 0 else 1.0) for rank, seconds in sample_s.items()}
        steering.stepped(
            SteppedRun(
                step=step, time_s=1.0, running=config.plan, ranks=range(4), stage_s=stage_s, generation=0
            )
        )
    return steering, orders


@pytest.fixture
def unknown(tmp_path, cluster, measured_job):
    """A job that nobody knows, on four ranks."""
    _, plan = measured_job(fast=1.0)
    return ControllerConfig(
        plan=load_plan(plan),
        cluster=cluster,
        steps=100,
        log=tmp_path / "controller.jsonl",
        parameter_bytes=(1e5,) * 4,
        budgets=("usd_per_h=20",),
    )


def test_speeds_of_an_unknown_job_are_learned_from_its_first_steps(unknown):
    unknown.check()
    sample_s = {0: 0.02, 1: 0.02, 2: 0.04, 3: 0.08}
    steering, orders = steered(unknown, sample_s, LEARNED_STEPS + 1)
    assert not orders and not unknown.log.exists(), "as long as nothing is known nothing changes"
    steering, orders = steered(unknown, sample_s, LEARNED_STEPS + 2)
    shares = {group.stages[0].ranks[0]: group.share for group in orders[-1].plan.groups}
    ends = [shares[rank] * seconds for rank, seconds in sample_s.items()]
    assert max(ends) < 1.15 * 64 / sum(1 / s for s in sample_s.values()), "all end about together"
    policy = steering.policy
    assert policy.queues.steps == LEARNED_STEPS + 2, "steps that teach speeds count in budgets"
    assert policy.chain.before_s[0, -1] == pytest.approx(0.02), "seconds are those of the fastest rank"
    lines = [json.loads(line) for line in unknown.log.read_text().splitlines()]
    assert lines[0]["learned"].keys() == {"0", "1", "2", "3"}, "the first step warms up and teaches nothing"
    successor = Steering(unknown, lambda command: None).policy
    assert successor.plan == policy.plan and successor.step == policy.step
    assert np.array_equal(successor.chain.layer_s, policy.chain.layer_s)


def test_pipelines_of_an_unknown_job_get_no_longer(unknown):
    stages = [{"ranks": [0], "layers": [[0, 2]]}, {"ranks": [1], "layers": [[2, 4]]}]
    groups = [{"share": 64, "micro_batch": 4, "stages": stages}]
    plan = parse_plan({"global_batch": 64, "seq_len": 8, "precision": "fp32", "groups": groups})
    config = replace(unknown, plan=plan, budgets=())
    _, orders = steered(config, {0: 0.02, 1: 0.04}, 30)
    assert all(len(group.stages) <= 2 for order in orders for group in order.plan.groups)
    assert orders, "four ranks are better than two"


def test_a_probe_of_an_unknown_job_is_compared_with_the_rank_s_own(unknown):
    """Rank 3 is idle; its first layers take far less than their part of all layers."""
    few = replace(unknown.plan, groups=(*unknown.plan.groups[:2], replace(unknown.plan.groups[2], share=32)))
    config, events = replace(unknown, plan=few), []
    steering = Steering(config, lambda command: None)
    for step in range(12):
        steering.stepped(
            SteppedRun(
                step=step,
                time_s=1.0,
                running=few,
                ranks=range(4),
                stage_s=dict.fromkeys(range(3), 0.02),
                idle_s={3: 1e-4 if step < 9 else 3e-4},
                generation=0,
            )
        )
    events = [json.loads(line) for line in config.log.read_text().splitlines()]
    seen = [event["relative_speed"] for event in events if event.get("event") == "DeviceSeen"]
    assert seen and seen[0] == pytest.approx(1 / 3), "it takes three times what it took"
