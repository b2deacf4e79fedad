"""The controller beside real ranks in virtual time: what links carried reaches it, and plans follow."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from small_jobs import gpt

from foreshard.control.controller import Controller
from foreshard.control.slots import MP_OVER_DP, Budget, Chain, State
from foreshard.lab.lab import Change, Lab
from foreshard.runtime.adaptive.idle_probe import MESSAGE_BYTES, PROBED_LAYERS
from foreshard.runtime.adaptive.stage_balancer import StageBalancer
from foreshard.runtime.membership.fixed_membership import FixedMembership
from foreshard.runtime.trainer import Options, Trainer
from foreshard.spec.online import StepMeasured
from foreshard.spec.plan_file import parse_plan

LAYERS, RANKS, BATCH = 8, 4, 32
FAST, SLOW = 4e6, 4e5
LAB = Lab(
    clock="table",
    slow=(1.0,) * RANKS,
    devices=("x",) * RANKS,
    bandwidth_bytes_per_s=FAST,
    latency_s=1e-4,
    table_s={"forward": 1e-3, "backward": 2e-3, "optimizer": 1e-4},
    changes=(Change(at_step=5, bandwidth=SLOW),),
)


def replicas(shares):
    groups = [
        {"share": share, "micro_batch": 2, "zero": 0, "stages": [{"ranks": [rank], "layers": [[0, LAYERS]]}]}
        for rank, share in enumerate(shares)
    ]
    return parse_plan({"global_batch": BATCH, "seq_len": 8, "precision": "fp32", "groups": groups})


def world_of(job):
    """Return the table and the job's bytes, and the ranks as they are stated."""
    sizes = np.array(
        [sum(p.numel() * p.element_size() for p in job.layer(layer).parameters()) for layer in range(LAYERS)],
        float,
    )
    chain = Chain(
        layer_s=np.full((RANKS, LAYERS), 3e-3),
        boundary_bytes=np.full(LAYERS - 1, 2.0 * 8 * 16 * 8),
        sync_bytes=sizes,
        state_bytes=4 * sizes,
        saved_bytes=np.zeros(LAYERS),
        memory_bytes=np.full(RANKS, 1e12),
    )
    nobody = np.zeros(RANKS)
    rate, apart = np.full((RANKS, RANKS), FAST), np.zeros((RANKS, RANKS))
    stated = State(
        speed=np.ones(RANKS),
        available=np.ones(RANKS, bool),
        bandwidth_bytes_per_s=rate,
        latency_s=np.full((RANKS, RANKS), 1e-4),
        usd_per_h=nobody,
        busy_w=nobody,
        idle_w=nobody,
        usd_per_byte=apart,
        kg_per_j=nobody,
    )
    return chain, stated


def controller_of(job, plan):
    """Return a controller that knows the table, and the job's bytes."""
    return Controller(*world_of(job), plan)


def trained(plan, steps, policy_of=None, probe_every=0, slow=(1.0,) * RANKS):
    """Return, by rank, the losses and times, the plans at the ends, and what was told of links."""
    store, found, job = dist.HashStore(), {}, gpt(torch.float64)

    def body(rank):
        at = [0]

        def before(step):
            at[0] = step

        clock = LAB.make_clock(at)
        clock.slow = slow[rank]
        policy = policy_of(job) if policy_of is not None and rank == 0 else None

        def asked(done):
            if policy is None:
                return
            held = {
                r: len(range(*s.layers[0])) for g in trainer.plan.groups for s in g.stages for r in s.ranks
            }
            speeds = {r: 3e-3 * held[r] / seconds for r, seconds in done.vote.sample_s.items()}
            event = StepMeasured(
                step=done.step, time_s=done.time_s, relative_speed=speeds, link_s=done.vote.links
            )
            for command in policy.on(event):
                trainer.propose(command)

        trainer = Trainer(
            job,
            membership=FixedMembership(store, rank, plan, range(RANKS), timeout_s=30),
            clock=clock,
            before_step=before,
            on_step=asked,
            options=Options(probe_every=probe_every),
        )
        done = [trainer.train_step() for _ in range(steps)]
        found[rank] = (done, trainer.plan, policy)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == RANKS, "a rank is missing"
    return found


@pytest.fixture(scope="module")
def runs():
    plan = replicas((8,) * RANKS)
    return trained(plan, 12, lambda job: controller_of(job, plan)), trained(plan, 12)


def test_every_rank_hears_the_same_of_all_links(runs):
    _, still = runs
    for step in range(12):
        told = [still[rank][0][step].vote.links for rank in range(RANKS)]
        assert all(one == told[0] for one in told)
        assert sorted(told[0]) == [(0, 1), (1, 2), (2, 3), (3, 0)], "the ring of four replicas"
        for size, seconds in told[0].values():
            assert seconds == pytest.approx(1e-4 + size / (FAST if step < 5 else SLOW), rel=1e-9)


def test_links_that_fade_are_noticed_and_the_plan_avoids_them(runs):
    steered, still = runs
    _, plan, controller = steered[0]
    rates = controller.estimates.state().bandwidth_bytes_per_s
    seen = [rates[a, b] for a, b in steered[0][0][-1].vote.links]
    assert seen and np.allclose(seen, SLOW, rtol=0.1)
    assert controller.reconfigurations >= 1
    assert len(plan.groups) < RANKS, "rings over slow links were to be avoided"
    last = [run[0][0][-1].time_s for run in runs]
    assert last[0] < 0.7 * last[1], "and are"
    assert still[0][0][4].time_s == pytest.approx(steered[0][0][4].time_s, rel=0.05), (
        "as long as they are fast"
    )


def test_losses_are_those_of_the_plan_that_stayed(runs):
    steered, still = ([step.loss for step in run[0][0]] for run in runs)
    assert steered == pytest.approx(still, rel=1e-9)


def test_what_is_idle_is_measured_and_nothing_else_changes():
    """Three replicas: their ring leaves out the links of the fourth rank, which has nothing to do."""
    plan = replicas((12, 10, 10))
    probed, still = (trained(plan, 10, probe_every=every) for every in (4, 0))
    assert [one.loss for one in probed[3][0]] == [one.loss for one in still[3][0]]
    for step in range(10):
        vote = probed[0][0][step].vote
        due = step % 4 == 0
        assert vote.idle_s == ({3: pytest.approx(PROBED_LAYERS * 3e-3)} if due else {})
        assert ((2, 3) in vote.links and (3, 0) in vote.links) == due
        if due:
            size, seconds = vote.links[2, 3]
            assert size == MESSAGE_BYTES
            assert seconds == pytest.approx(1e-4 + MESSAGE_BYTES / (FAST if step < 5 else SLOW))


def wide_stages():
    """Two stages of two ranks."""
    stages = [{"ranks": [0, 1], "layers": [[0, 4]]}, {"ranks": [2, 3], "layers": [[4, LAYERS]]}]
    return parse_plan(
        {
            "global_batch": BATCH,
            "seq_len": 8,
            "precision": "fp32",
            "groups": [{"share": BATCH, "micro_batch": 4, "stages": stages}],
        }
    )


def test_samples_inside_stages_follow_the_speeds_of_real_ranks():
    """Two stages of two ranks; rank 1 is three times as slow as it says."""
    plan = wide_stages()
    slow = (1.0, 3.0, 1.0, 1.0)
    dealt, still = (
        trained(plan, 7, policy_of, slow=slow)
        for policy_of in (
            lambda job: StageBalancer(*world_of(job), plan),
            None,
        )
    )
    done, last, _ = dealt[0]
    assert [stage.rank_shares for stage in last.groups[0].stages] == [(3, 1), None]
    assert done[-1].time_s < 0.7 * still[0][0][-1].time_s
    assert [one.loss for one in done] == pytest.approx([one.loss for one in still[0][0]], rel=1e-9)


@pytest.mark.slow
def test_one_pipeline_of_wide_stages_is_steered_whole_on_real_ranks():
    """Two stages of two ranks, rank 1 six times as slow as it says; dear ranks are left out for a budget."""
    plan = wide_stages()
    slow = (1.0, 6.0, 1.0, 1.0)
    budget = Budget(name="rest", kind="duty", limit=1e-4, worker=3)

    def steers(job, budgets=()):
        return Controller(*world_of(job), plan, budgets=budgets)

    free, still = (trained(plan, 9, policy_of, slow=slow) for policy_of in (steers, None))
    spared = trained(plan, 9, lambda job: steers(job, (budget,)), slow=slow)
    for run in (free, spared):
        done, last, controller = run[0]
        assert controller.reading == MP_OVER_DP and len(last.groups) == 1
        assert [one.loss for one in done] == pytest.approx([one.loss for one in still[0][0]], rel=1e-9)
        controller.check_invariants()
    assert free[0][0][-1].time_s < 0.6 * still[0][0][-1].time_s
    assert sum(free[0][2].counts[kind] for kind in ("re-cut", "regroup", "idle", "activate")) >= 1
    assert 3 not in spared[0][1].ranks
