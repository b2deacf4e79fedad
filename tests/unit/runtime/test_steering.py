"""The controller at the config: what it is built from, how it follows speeds, who takes over from it."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from foreshard.control.policies import BASELINE_POLICIES
from foreshard.errors import SpecError
from foreshard.lab.lab import load_lab
from foreshard.runtime.adaptive.controller_config import ControllerConfig
from foreshard.runtime.adaptive.steering import Steering, SteppedRun
from foreshard.runtime.membership.plan_repair import repaired
from foreshard.runtime.records.durable_jsonl import DurableJsonl
from foreshard.spec.online import RUN_POLICIES
from foreshard.spec.plan_file import load_plan


@pytest.fixture
def config(tmp_path, measured_job):
    """Two fast and two slow ranks, replicas with even shares."""
    costs, plan = measured_job(fast=1.0, slow=2.0)
    (tmp_path / "lab.toml").write_text(
        'clock = "cpu"\n[[ranks]]\ncount = 2\ndevice = "fast"\nslow = 1.0\nusd_per_h = 4.0\n'
        '[[ranks]]\ncount = 2\ndevice = "slow"\nslow = 2.0\nusd_per_h = 1.0\n'
    )
    return ControllerConfig(
        plan=load_plan(plan),
        costs=costs,
        cluster=load_lab(str(tmp_path / "lab.toml")).cluster(),
        steps=100,
        log=tmp_path / "controller.jsonl",
    )


def lived(steering: Steering, orders: list, plan, steps: range, sample_s: dict[int, float], ranks=range(4)):
    """Let steps pass in which orders are obeyed at once; return the plan in the end."""
    for step in steps:
        by_rank = {rank: group.share for group in plan.groups for rank in group.stages[0].ranks}
        steering.stepped(
            SteppedRun(
                step=step,
                time_s=max(sample_s[r] * n for r, n in by_rank.items()),
                running=plan,
                ranks=ranks,
                stage_s={r: sample_s[r] for r in by_rank},
                generation=0,
            )
        )
        if orders:
            plan = orders[-1].plan
            orders.clear()
    return plan


def shares(plan) -> dict[int, int]:
    return {group.stages[0].ranks[0]: group.share for group in plan.groups}


def test_shares_follow_the_speeds(config):
    orders: list = []
    sample_s = {0: 0.026, 1: 0.026, 2: 0.052, 3: 0.052}
    plan = lived(Steering(config, orders.append), orders, config.plan, range(10), sample_s)
    even, found = (
        max(16 * s for s in sample_s.values()),
        max(sample_s[r] * n for r, n in shares(plan).items()),
    )
    assert sum(shares(plan).values()) == 64
    assert found < 0.75 * even, "balanced shares take about 2/3 of the time of even ones"


def test_a_rank_that_is_gone_gets_no_samples_and_gets_some_again(config):
    orders: list = []
    steering = Steering(config, orders.append)
    sample_s = {0: 0.026, 1: 0.026, 2: 0.052, 3: 0.052}
    plan = lived(steering, orders, config.plan, range(5), sample_s)
    plan = lived(steering, orders, plan, range(5, 8), sample_s, ranks=(0, 2, 3))
    assert 1 not in shares(plan)
    plan = lived(steering, orders, plan, range(8, 60), sample_s)
    assert shares(plan).get(1, 0) > 0


def test_a_full_disk_delays_the_log_and_stops_nothing(config, tmp_path, monkeypatch):
    sample_s = {0: 0.1, 1: 0.026, 2: 0.052, 3: 0.052}
    undisturbed, full, told = replace(config, log=tmp_path / "undisturbed.jsonl"), [], []
    orders: list = []
    lived(Steering(undisturbed, orders.append), orders, config.plan, range(12), sample_s)

    def write(self, file, write=DurableJsonl._write_first):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, file)

    monkeypatch.setattr(DurableJsonl, "_write_first", write)
    orders.clear()
    steering = Steering(config, orders.append, lambda kind, text, **facts: told.append(kind))
    plan = lived(steering, orders, config.plan, range(3), sample_s)
    full.append(True)
    before = config.log.read_bytes()
    lived(steering, orders, plan, range(3, 12), sample_s)
    assert config.log.read_bytes() == before and told == ["write blocked"]
    full.clear()
    steering.flush()
    assert told[1:] == ["write resumed"]
    assert config.log.read_bytes() == undisturbed.log.read_bytes()


def test_a_log_that_waits_for_too_long_has_no_gap(config, monkeypatch):
    told: list = []
    monkeypatch.setattr("foreshard.runtime.adaptive.steering._KEPT_BYTES", 300)
    monkeypatch.setattr(DurableJsonl, "flush", lambda self: False)
    steering = Steering(config, lambda command: None, lambda kind, text, **facts: told.append(kind))
    lived(steering, [], config.plan, range(20), dict.fromkeys(range(4), 0.03))
    assert told == ["log given up"]
    waiting = [json.loads(line) for line in steering._log.lines.unwritten()]
    assert [line["step"] for line in waiting if "event" in line] == list(
        range(sum("event" in w for w in waiting))
    )


def test_a_successor_knows_what_the_log_knows(config):
    orders: list = []
    first = Steering(config, orders.append)
    plan = lived(first, orders, config.plan, range(12), {0: 0.1, 1: 0.026, 2: 0.052, 3: 0.052})
    second = Steering(config, lambda command: None)
    assert second.policy.plan == first.policy.plan
    assert config.as_run(second.policy.plan, config.starting_costs()).groups == plan.groups
    assert second.policy.step == first.policy.step


def test_steps_that_a_run_does_again_are_paid_again(config):
    steering = Steering(replace(config, budgets=("usd_per_h=3",)), lambda command: None)
    for step in (*range(6), *range(2, 8)):
        steering.stepped(
            SteppedRun(
                step=step,
                time_s=0.1,
                running=config.plan,
                ranks=range(4),
                generation=step,
                stage_s=dict.fromkeys(config.plan.ranks, 0.026),
            )
        )
    assert steering.policy.queues.steps == 12 and steering.policy.ignored == 0


def test_the_chain_is_the_measured_layers(config):
    chain = config.starting_costs().chain(4)
    assert chain.layer_s.shape == (4, 4)
    assert chain.layer_s[0, 0] == pytest.approx((1e-3 + 1e-3) / 4 + 6e-3)


def wide(config, *, micro_batch=4, **stage):
    """Return the config for one pipeline whose only stage has two ranks."""
    first = config.plan.groups[0]
    made = replace(first.stages[0], ranks=(0, 1), **stage)
    plan = replace(config.plan, groups=(replace(first, share=64, micro_batch=micro_batch, stages=(made,)),))
    return replace(config, plan=plan)


def dealt(config, **stage):
    """Return the config for that pipeline and one of a single rank beside it."""
    joint = wide(config, **stage).plan
    other = replace(config.plan.groups[2], share=16)
    plan = replace(joint, groups=(replace(joint.groups[0], share=48), other))
    return replace(config, plan=plan)


def test_samples_inside_a_stage_of_several_pipelines_follow_the_speeds_and_nothing_else_changes(config):
    orders: list = []
    steering, plan = Steering(dealt(config), orders.append), dealt(config).plan
    for step in range(12):
        mine = plan.groups[0].stages[0].rank_shares or (2, 2)
        sample_s = (0.078, 0.026)  # rank 0 takes three times what is stated
        steering.stepped(
            SteppedRun(
                step=step,
                time_s=12 * max(n * s for n, s in zip(mine, sample_s, strict=True)),
                running=plan,
                ranks=(0, 1, 2),
                stage_s=dict(enumerate((*sample_s, 0.052))),
                generation=0,
            )
        )
        if orders:
            plan = orders[-1].plan
            orders.clear()
    assert plan.groups[0].stages[0].rank_shares == (1, 3)
    assert steering.policy.reshares == 1 and steering.policy.reconfigurations == 0
    assert steering.metrics(plan)["pipelines"] == [[[0, 1, 0, 4]], [[2, 0, 4]]]


def test_a_stage_that_loses_a_rank_is_dealt_to_the_rest_until_it_is_back(config):
    orders: list = []
    steering = Steering(dealt(config, rank_shares=(3, 1)), orders.append)
    plan = dealt(config, rank_shares=(3, 1)).plan
    for step, ranks in enumerate([(0, 1, 2)] * 2 + [(0, 2)] * 3 + [(0, 1, 2)] * 3):
        steering.stepped(
            SteppedRun(
                step=step,
                time_s=1.0,
                running=plan,
                ranks=ranks,
                generation=0,
                stage_s=dict.fromkeys(plan.ranks, 0.026),
            )
        )
        plan = orders[-1].plan if orders else plan
        assert set(plan.ranks) <= set(ranks)
    assert plan.groups[0].stages[0].rank_shares == (2, 2)


def test_stages_of_several_pipelines_keep_no_budget_and_no_wide_stage_knows_a_rival(config):
    dealt(config).check()
    wide(config).check()
    replace(wide(config), budgets=("usd_per_h=3",)).check()
    refused = [replace(made(config), policy="greedy") for made in (wide, dealt)]
    for one in (*refused, replace(dealt(config), budgets=("usd_per_h=3",))):
        with pytest.raises(SpecError, match="stage of several ranks"):
            one.check()
    with pytest.raises(SpecError, match="several chunks"):
        wide(config, layers=((0, 2), (2, 4))).check()
    with pytest.raises(SpecError, match="2 ranks share 1 samples"):
        wide(config, micro_batch=1).check()


def joint_lived(config, steps, *, slow=(1.0, 1.0, 2.0, 2.0), there=lambda step: range(4)):
    """Let steps of one pipeline pass, orders obeyed two steps later; return the steering and all plans."""
    orders: list = []
    steering, plans = Steering(config, orders.append), [config.plan]
    due: dict = {}
    for step in range(steps):
        plan = repaired(due.pop(step, plans[-1]), there(step))
        passes, sample_s, ends = config.starting_costs().passes, {}, []
        (group,) = plan.groups
        for stage in group.stages:
            sizes = stage.rank_shares or (group.micro_batch // len(stage.ranks),) * len(stage.ranks)
            for rank, size in zip(stage.ranks, sizes, strict=True):
                sample_s[rank] = slow[rank] * passes.sample_s(rank, stage.layers[0], size, size)
            ends.append(max(sample_s[r] * n for r, n in zip(stage.ranks, sizes, strict=True)))
        time_s = sum(ends) + (group.num_micro_batches - 1) * max(ends)
        steering.stepped(
            SteppedRun(
                step=step,
                time_s=time_s,
                running=plan,
                ranks=tuple(there(step)),
                stage_s=sample_s,
                generation=int(there(step) != range(4)),
            )
        )
        if orders:
            due[step + 2] = orders[-1].plan
            orders.clear()
        plans.append(plan)
    return steering, plans


def test_one_pipeline_of_wide_stages_takes_all_ranks_and_splits_by_their_speeds(config):
    steering, plans = joint_lived(wide(config, micro_batch=6), 30)
    (group,) = plans[-1].groups
    assert set(plans[-1].ranks) == set(range(4)) and group.micro_batch == 6
    shares = {
        r: n for stage in group.stages for r, n in zip(stage.ranks, stage.rank_shares or (6,), strict=True)
    }
    assert len(group.stages) > 1 or shares[0] > shares[2]
    steering.policy.check_invariants()


def test_one_pipeline_of_wide_stages_keeps_a_budget(config):
    given = replace(wide(config, micro_batch=6), steps=200)
    free, _ = joint_lived(given, 200)
    dear = replace(given, budgets=("usd_per_h=5",), log=config.log.with_name("dear.jsonl"))
    kept, plans = joint_lived(dear, 200)
    (queue,) = [kept.policy.queues[one.name] for one in kept.policy.budgets]
    assert queue.violation < 0.02 and kept.policy.queues.identity_error() < 1e-9
    assert kept.policy.queues.total_s > free.policy.queues.total_s
    assert len({plan.ranks for plan in plans}) > 1


def test_one_pipeline_of_wide_stages_loses_a_rank_and_takes_it_back(config):
    steering, plans = joint_lived(
        wide(config, micro_batch=6), 60, there=lambda step: (0, 2, 3) if 20 <= step < 30 else range(4)
    )
    assert all(1 not in plan.ranks for plan in plans[21:31]) and 1 in plans[-1].ranks
    steering.policy.check_invariants()


def test_a_budget_needs_prices(config, tmp_path):
    (tmp_path / "free.toml").write_text('clock = "cpu"\n[[ranks]]\ncount = 4\ndevice = "fast"\nslow = 1.0\n')
    with pytest.raises(SpecError, match="no prices"):
        free = load_lab(str(tmp_path / "free.toml")).cluster()
        replace(config, cluster=free, budgets=("usd_per_h=3",)).check()


def test_a_plan_is_run_with_micro_batches_that_fit_its_ranks(config):
    known = config.starting_costs()
    wide = replace(config.plan, groups=tuple(replace(g, micro_batch=g.share) for g in config.plan.groups))
    config = replace(config, plan=wide)
    sizes = known.sizes
    room = sizes.before_state[-1] + 2.5 * sizes.before_saved[-1]
    tight = replace(known, sizes=replace(sizes, memory_bytes=np.full(len(sizes.memory_bytes), room)))
    assert max(group.micro_batch for group in config.as_run(wide, known).groups) > 2
    assert max(group.micro_batch for group in config.as_run(wide, tight).groups) <= 2


def test_every_policy_that_a_run_may_name_can_be_built():
    assert set(RUN_POLICIES) == {"static", "lyapunov", *BASELINE_POLICIES}
