"""Planning anew from stages that cut experts or join two kinds of devices: kept, moved and mended."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.errors import SpecError
from foreshard.planner.judge import engine_seconds
from foreshard.planner.mapping import plan_of
from foreshard.planner.migration import migration
from foreshard.planner.pools import demand_of, pooled_problem, pools_of
from foreshard.planner.problem import Arrangement, Part, template_faults
from foreshard.planner.replan import replan
from foreshard.planner.request import checked_request
from foreshard.planner.running import healthy_problem, kind_of
from foreshard.planner.stage_prices import price_stages
from foreshard.spec.checks import check_plan
from foreshard.spec.plan import Group, Plan, Stage

ODD = load_cluster("1x2xrtx-3090+1x1xa100-sxm-40gb@400Gb/s")
PAIR = load_cluster("1x4xa100-sxm-80gb+1x4xh100-sxm@400Gb/s")
DENSE = load_model("gpt2-xl")
EXPERTS = replace(load_model("mixtral-8x7b"), blocks=load_model("mixtral-8x7b").blocks[:8])


def one_group(stages, batch: int, micro_batch: int, seq_len: int) -> Plan:
    group = Group(share=batch, stages=tuple(stages), micro_batch=micro_batch, sp=True)
    return Plan(global_batch=batch, seq_len=seq_len, groups=(group,))


def joint_plan() -> Plan:
    whole = Stage(ranks=(0, 1, 2), layers=((0, DENSE.num_layers + 2),), rank_shares=(2, 2, 6))
    return one_group([whole], 64, 10, 1024)


def cut_plan() -> Plan:
    first = Stage(ranks=(0, 1, 2, 3), layers=((0, 4),), ep=4)
    last = Stage(ranks=(4, 5, 6, 7), layers=((4, EXPERTS.num_layers + 2),), tp=2, ep=4, recompute="full")
    return one_group([first, last], 32, 4, 4096)


RUNNING = {"joint": (DENSE, ODD, joint_plan()), "cut": (EXPERTS, PAIR, cut_plan())}


@pytest.fixture(scope="module")
def prices():
    return {name: healthy_problem(*running) for name, running in RUNNING.items()}


@pytest.mark.parametrize("name", RUNNING)
def test_what_runs_well_stays_and_is_timed_as_the_engine_does(prices, name):
    model, cluster, plan = RUNNING[name]
    check_plan(plan, model, cluster)
    found = replan(model, cluster, plan, problem=prices[name], dwell_s=1e-3)
    assert found.migration.bytes_moved == 0.0 and found.change in ("none", "shares")
    again = replan(model, cluster, found.plan, problem=prices[name], dwell_s=1e-3)
    assert again.change == "none" and again.plan == found.plan
    request = checked_request(model, cluster, global_batch=plan.global_batch, seq_len=plan.seq_len)
    assert found.running_step_s == pytest.approx(engine_seconds(request, [plan])[0], rel=0.02)


@pytest.mark.parametrize(("name", "change"), [
    ("joint", {"slowdown": {2: 2.0}}), ("joint", {"slowdown": {0: 2.0}}), ("joint", {"lost": [0]}),
    ("joint", {"lost": [2]}), ("cut", {"slowdown": {1: 2.0}}), ("cut", {"slowdown": {6: 2.0}}),
    ("cut", {"lost": [5]}),
])  # fmt: skip
def test_a_change_is_answered_with_stages_of_the_whole_space(prices, name, change):
    pytest.importorskip("scipy")
    model, cluster, plan = RUNNING[name]
    found = replan(model, cluster, plan, problem=prices[name], narrow=False, budget_s=0.5, **change)
    check_plan(found.plan, model, cluster)
    lost = change.get("lost", [])
    assert not set(lost) & set(found.plan.ranks)
    assert np.isinf(found.running_step_s) == bool(lost)
    assert found.lower_bound_s <= found.step_time_s <= found.running_step_s * (1 + 1e-12)
    if change.get("slowdown"):
        # A stage waits for its slowest device; without a stage that does, the step is shorter.
        assert found.step_time_s < found.running_step_s


@pytest.mark.parametrize("slow", [0, 2])
def test_a_joint_stage_deals_its_samples_anew_at_once(prices, slow):
    model, cluster, plan = RUNNING["joint"]
    found = replan(model, cluster, plan, slowdown={slow: 1.3}, problem=prices["joint"])
    check_plan(found.plan, model, cluster)
    assert found.change == "shares" and found.migration.bytes_moved == 0.0
    assert found.step_time_s < 0.97 * found.running_step_s
    before, after = (one.groups[0].stages[0].rank_shares for one in (plan, found.plan))
    # Of the slowed kind ranks take less of each sample of the others than before.
    assert (after[slow] / after[2 - slow]) < (before[slow] / before[2 - slow])


@pytest.mark.parametrize("slow", [0, 2])
def test_a_joint_stage_is_left_where_one_of_its_devices_is_much_slower(prices, slow):
    model, cluster, plan = RUNNING["joint"]
    found = replan(model, cluster, plan, slowdown={slow: 2.0}, problem=prices["joint"])
    check_plan(found.plan, model, cluster)
    assert found.step_time_s < 0.9 * found.running_step_s


def test_a_joint_stage_waits_for_the_slower_of_its_kinds(prices):
    healthy = prices["joint"]
    kind = kind_of(ODD, joint_plan(), joint_plan().groups[0], joint_plan().groups[0].stages[0])
    own, other = (healthy.time_s[healthy.names.index(one), 0] for one in (kind, kind.turned))
    for slowdown, least in (({}, own), ({2: 2.0}, 2.0 * other), ({0: 3.0}, 3.0 * own)):
        pools = pools_of(ODD, (0, 1), slowdown, ())
        ranks = joint_plan().ranks
        demand = demand_of(ranks, pools)
        pooled = pooled_problem(healthy, pools, [], [(healthy.names.index(kind), demand)])
        assert pooled.time_s[0, 0] == pytest.approx(max(own, other, least), rel=1e-12)
    assert not healthy.max_in_flight[healthy.names.index(kind.turned)].any()


@pytest.mark.parametrize("change", [
    {"slowdown": {1: 1.5}}, {"slowdown": {1: 1.5, 6: 2.0}}, {"lost": [2]},
    {"lost": [0, 7], "slowdown": {4: 1.2}},
])  # fmt: skip
def test_joint_stages_are_placed_on_what_hurt_nodes_have_left(change):
    whole = Stage(ranks=(0, 1, 4, 5), layers=((0, DENSE.num_layers + 2),), rank_shares=(2, 2, 4, 4))
    other = replace(whole, ranks=(2, 3, 6, 7))
    groups = tuple(Group(share=48, stages=(one,), micro_batch=12, sp=True) for one in (whole, other))
    plan = Plan(global_batch=96, seq_len=1024, groups=groups)
    check_plan(plan, DENSE, PAIR)
    found = replan(DENSE, PAIR, plan, **change)
    check_plan(found.plan, DENSE, PAIR)
    assert not set(change.get("lost", [])) & set(found.plan.ranks)
    assert found.step_time_s <= found.running_step_s


def test_experts_on_one_rank_alone_are_lost_with_it():
    model, cluster, plan = RUNNING["cut"]
    first, last = plan.groups[0].stages
    copied = one_group([replace(first, ep=2), replace(last, ep=2)], 32, 4, 4096)
    assert migration(model, cluster, plan, plan, lost=[1]).checkpoint
    # Optimizer states are cut over the ranks that hold the same weights: those of zero 1 have no copy.
    assert migration(model, cluster, copied, copied, lost=[1]).checkpoint
    spare = [replace(stage, zero=0) for stage in (replace(first, ep=2), replace(last, tp=1, ep=2))]
    whole = one_group(spare, 32, 4, 4096)
    assert not migration(model, cluster, whole, whole, lost=[1]).checkpoint


def test_joining_cut_experts_moves_the_half_that_each_rank_lacks():
    model, cluster = EXPERTS, PAIR
    stage = Stage(ranks=(0, 1), layers=((0, model.num_layers + 2),), ep=2, zero=0)
    plans = [one_group([replace(stage, ep=ep)], 8, 2, 4096) for ep in (1, 2)]
    experts = sum(block.num_experts * block.expert_params for block in model.blocks)
    moved = migration(model, cluster, plans[1], plans[0])
    # 2 bytes of weight, 4 of master and 8 of moments a parameter.
    assert moved.bytes_moved == pytest.approx(2 * 14.0 * experts / 2, rel=1e-12)
    assert migration(model, cluster, plans[0], plans[1]).bytes_moved == 0.0


@pytest.mark.parametrize("name", RUNNING)
def test_every_stage_of_the_space_is_known_when_it_runs(name):
    model, cluster, plan = RUNNING[name]
    request = checked_request(model, cluster, global_batch=plan.global_batch, seq_len=plan.seq_len)
    problem = price_stages(request, (0, 1), every=True)
    seen = 0
    for option, kind in enumerate(problem.names):
        template = (Part(option=option, start=0, stop=problem.num_layers),)
        if template_faults(problem, template):
            continue
        arrangement = Arrangement(templates=(template,), shares=(plan.global_batch,))
        made = plan_of(request, problem, arrangement)
        (stage,) = made.groups[0].stages
        assert kind_of(cluster, made, made.groups[0], stage) == kind
        seen += not kind.is_plain
    assert seen


@pytest.mark.parametrize(("change", "said"), [
    ({"etp": 2}, "etp 2"), ({"offload": "optimizer"}, "offload optimizer"),
    ({"rank_shares": (1, 3, 6)}, "a stage on ranks 0, 1, 2"),
    ({"ranks": (2, 0, 1)}, "a stage on ranks 2, 0, 1"),
])  # fmt: skip
def test_what_the_search_does_not_know_is_refused_by_name(change, said):
    plan = joint_plan()
    (stage,) = plan.groups[0].stages
    other = one_group([replace(stage, **change)], 64, 10, 1024)
    with pytest.raises(SpecError, match=f"cannot be re-planned: {said}"):
        replan(DENSE, ODD, other)
