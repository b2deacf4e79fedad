"""Rules to run beside the controller: what they order, and how they keep a budget of money."""

import itertools

import numpy as np
import pytest

from foreshard.control import orders
from foreshard.control.policies import GreedyReplanning, LbBsp
from foreshard.control.search.pricing import evaluate
from foreshard.control.slots import Budget, Chain, State, Structure, WorkerPipeline
from foreshard.errors import SpecError
from foreshard.spec.online import DeviceSeen, RankLost, StepMeasured
from foreshard.spec.plan_file import parse_plan

LAYERS, BATCH = 4, 30


def chain(sync_bytes=1e3):
    return Chain(
        layer_s=np.full((3, LAYERS), 1e-2),
        boundary_bytes=np.full(LAYERS - 1, 1e2),
        sync_bytes=np.full(LAYERS, sync_bytes),
        state_bytes=np.full(LAYERS, 1e3),
        saved_bytes=np.zeros(LAYERS),
        memory_bytes=np.full(3, 1e9),
    )


def stated(rate=1e9):
    nobody, apart = np.zeros(3), np.zeros((3, 3))
    return State(
        speed=np.array([1.0, 0.5, 0.5]),
        available=np.ones(3, bool),
        latency_s=apart,
        bandwidth_bytes_per_s=np.full((3, 3), rate),
        usd_per_h=np.array([4.0, 1.0, 1.0]),
        busy_w=nobody,
        idle_w=nobody,
        usd_per_byte=apart,
        kg_per_j=nobody,
    )


@pytest.fixture
def plan():
    groups = [
        {"share": 10, "micro_batch": 1, "stages": [{"ranks": [rank], "layers": [[0, LAYERS]]}]}
        for rank in range(3)
    ]
    return parse_plan({"global_batch": BATCH, "seq_len": 8, "precision": "fp32", "groups": groups})


def measured(rule, step, speeds, costs=None):
    """Tell a step in which ranks had these speeds."""
    relative = {rank: speeds[rank] for rank in rule.choice.structure.workers}
    return rule.on(StepMeasured(step=step, time_s=1.0, relative_speed=relative, costs=costs or {}))


def shares(plan):
    return {group.stages[0].ranks[0]: group.share for group in plan.groups}


def test_shares_follow_the_last_speeds_at_once(plan):
    rule = LbBsp(chain(), stated(), plan)
    (order,) = measured(rule, 0, (1.0, 0.5, 0.5))
    assert order.kind == "re-share"
    assert (
        max(n / (1.0, 0.5, 0.5)[rank] for rank, n in shares(order.plan).items()) == 16
    )  # 15 with parts of samples
    (order,) = measured(rule, 1, (1.0, 1.0, 0.5))
    assert shares(order.plan) == {0: 12, 1: 12, 2: 6}
    (order,) = measured(rule, 2, (1.0, 1.0, 0.5))
    assert order.plan is None and (rule.reshares, rule.reconfigurations) == (2, 0)


def test_who_is_lost_gets_nothing_until_it_is_back(plan):
    rule = LbBsp(chain(), stated(), plan)
    (order,) = rule.on(RankLost(step=1, rank=0))
    assert shares(order.plan) == {1: 15, 2: 15}
    (order,) = rule.on(DeviceSeen(step=2, rank=0))
    assert set(shares(order.plan)) == {0, 1, 2} and rule.reconfigurations == 2


def test_a_budget_rents_no_more_than_it_allows(plan):
    budget = Budget(name="usd_per_h", kind="usd", limit=5.0, per="hour")
    for kind in (LbBsp, GreedyReplanning):
        rule = kind(chain(), stated(), plan, budgets=(budget,))
        measured(rule, 0, (1.0, 0.5, 0.5), {"usd_per_h": 1e-3})
        used = rule.plan.ranks
        assert sum((4.0, 1.0, 1.0)[rank] for rank in used) <= 5.0 and 0 in used
        assert rule.queues["usd_per_h"].spent == 1e-3


def test_other_budgets_are_refused(plan):
    for budget in (Budget(name="x", kind="joule", limit=1.0), Budget(name="y", kind="usd", limit=1.0)):
        with pytest.raises(SpecError, match="does not know"):
            GreedyReplanning(chain(), stated(), plan, budgets=(budget,))


def test_allowed_sets_are_all_that_are_largest(plan):
    budget = Budget(name="usd_per_h", kind="usd", limit=2.5, per="hour")
    rule = LbBsp(chain(), stated(), plan, budgets=(budget,))
    assert rule._allowed() == [(1, 2)]
    assert LbBsp(chain(), stated(), plan)._allowed() == [(0, 1, 2)]


@pytest.mark.parametrize(("sync_bytes", "speeds"), [(1e3, (1.0, 0.5, 0.25)), (1e7, (1.0, 1.0, 1.0))])
def test_the_greedy_plan_is_the_fastest_of_all(plan, sync_bytes, speeds):
    """Against every structure of three ranks with every split of the batch into thirds of micro-batches."""
    rule = GreedyReplanning(chain(sync_bytes), stated(2e7), plan, max_stages=3)
    measured(rule, 0, speeds)
    measured(rule, 1, speeds)
    state = rule.estimates.state((0, 1, 2))
    best = min(times(chain(sync_bytes), state))
    now = evaluate(
        chain(sync_bytes), state, orders.structure_of(rule.plan), rule.choice.shares, micro_batch=1
    )
    assert now.time_s <= best * (1 + 1e-9)


def times(layers, state):
    cuts = {n: [(0, *c, LAYERS) for c in itertools.combinations(range(1, LAYERS), n - 1)] for n in (1, 2, 3)}
    for groups in (
        ((0, 1, 2),),
        ((0, 1), (2,)),
        ((0, 2), (1,)),
        ((1, 2), (0,)),
        ((0,), (1,), (2,)),
        ((0,), (1,)),
        ((0,),),
    ):
        for orders_ in itertools.product(*(itertools.permutations(group) for group in groups)):
            for chosen in itertools.product(*(cuts[len(group)] for group in groups)):
                made = Structure(
                    groups=tuple(
                        WorkerPipeline(workers=order, cuts=cut)
                        for order, cut in zip(orders_, chosen, strict=True)
                    )
                )
                for split in splits(len(groups)):
                    yield evaluate(layers, state, made, split, micro_batch=1).time_s


def splits(count):
    if count == 1:
        return [(BATCH,)]
    if count == 2:
        return [(n, BATCH - n) for n in range(1, BATCH)]
    return [(a, b, BATCH - a - b) for a in range(1, BATCH) for b in range(1, BATCH - a)]
