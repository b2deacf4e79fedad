"""Re-planning: what a straggler or a loss costs, that plans stay valid."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.errors import InfeasibleError, SpecError
from foreshard.planner.cuts import best_cuts
from foreshard.planner.migration import migration
from foreshard.planner.nearby import work_bound
from foreshard.planner.pools import pooled_problem, pools_of
from foreshard.planner.problem import Part, Problem, stage_seconds, template_faults
from foreshard.planner.replan import Replan, replan
from foreshard.planner.running import healthy_problem
from foreshard.spec.checks import check_plan
from foreshard.spec.layout import layer_spans
from foreshard.spec.plan import Group, Plan, Stage

MODEL = load_model("llama3-70b")
CLUSTER = load_cluster("8x8xa100-sxm-80gb@400Gb/s")


def even_plan(tp: int, pp: int, groups: int, *, model=MODEL, batch: int = 256, seq_len: int = 4096) -> Plan:
    """Return equal pipelines of equal cuts on ranks in order."""
    spans, ranks = layer_spans(model.num_layers, pp, 1), itertools.count()
    return Plan(
        global_batch=batch,
        seq_len=seq_len,
        groups=tuple(
            Group(
                share=batch // groups,
                sp=tp > 1,
                stages=tuple(
                    Stage(ranks=tuple(next(ranks) for _ in range(tp)), layers=tuple(span), tp=tp)
                    for span in spans
                ),
            )
            for _ in range(groups)
        ),
    )


@pytest.fixture(scope="module")
def healthy() -> Problem:
    return healthy_problem(MODEL, CLUSTER, even_plan(8, 4, 2))


def checked(found: Replan) -> Replan:
    check_plan(found.plan, MODEL, CLUSTER)
    assert found.lower_bound_s <= found.step_time_s * (1 + 1e-12)
    return found


@pytest.mark.parametrize(("tp", "pp", "groups"), [(8, 4, 2), (4, 8, 2), (4, 16, 1)])
def test_straggler_costs_little(healthy, tp, pp, groups):
    plan = even_plan(tp, pp, groups)
    whole = checked(replan(MODEL, CLUSTER, plan, problem=healthy))
    found = checked(replan(MODEL, CLUSTER, plan, slowdown={5: 2.6}, problem=healthy))
    # One of 64 devices at 1 / 2.6 leaves 63.4 of them; left as it is, every step waits for it.
    assert found.running_step_s > 2.0 * whole.running_step_s
    assert found.step_time_s < 1.15 * whole.running_step_s


def test_nothing_changes_when_nothing_happened_to_a_plan_that_is_good_enough(healthy):
    plan = checked(replan(MODEL, CLUSTER, even_plan(8, 4, 2), problem=healthy)).plan
    again = checked(replan(MODEL, CLUSTER, plan, problem=healthy))
    assert again.step_time_s <= again.running_step_s
    same = replan(MODEL, CLUSTER, again.plan, problem=healthy, dwell_s=1e-3)
    assert same.change == "none" and same.plan == again.plan
    assert same.migration.bytes_moved == 0.0


@pytest.mark.parametrize("lost", [(5,), (0, 1, 2, 3, 4, 5, 6, 7), (3, 20, 63)])
def test_lost_devices_are_left_out(healthy, lost):
    found = checked(replan(MODEL, CLUSTER, even_plan(8, 4, 2), lost=lost, problem=healthy))
    assert not set(lost) & set(found.plan.ranks)
    assert math.isinf(found.running_step_s)
    assert found.plan.global_batch == sum(group.share for group in found.plan.groups)


def test_state_without_a_surviving_copy_needs_the_checkpoint(healthy):
    one = replan(MODEL, CLUSTER, even_plan(4, 16, 1), lost=(5,), problem=healthy)
    two = replan(MODEL, CLUSTER, even_plan(8, 4, 2), lost=(5,), problem=healthy)
    assert one.migration.checkpoint
    assert not two.migration.checkpoint


def test_a_change_must_pay_for_what_it_moves(healthy):
    plan = even_plan(8, 4, 2)
    short = checked(replan(MODEL, CLUSTER, plan, slowdown={5: 1.05}, problem=healthy, dwell_s=0.5))
    long = checked(replan(MODEL, CLUSTER, plan, slowdown={5: 2.6}, problem=healthy, dwell_s=1e6))
    assert short.migration.bytes_moved == 0.0
    assert long.migration.bytes_moved > 0.0


def test_too_few_devices_left_is_infeasible(healthy):
    with pytest.raises(InfeasibleError) as caught:
        replan(MODEL, CLUSTER, even_plan(8, 4, 2), lost=range(4, 64), problem=healthy)
    assert "4 devices" in caught.value.what and caught.value.fix


@pytest.mark.parametrize("asked", [{"slowdown": {64: 2.0}}, {"lost": [-1]}, {"slowdown": {3: 0.0}}])
def test_bad_input_is_named(healthy, asked):
    with pytest.raises(SpecError):
        replan(MODEL, CLUSTER, even_plan(8, 4, 2), problem=healthy, **asked)


def test_prices_of_another_plan_are_refused():
    other = healthy_problem(MODEL, load_cluster("1x8xh100-sxm"), even_plan(8, 1, 1))
    with pytest.raises(SpecError):
        replan(MODEL, CLUSTER, even_plan(8, 4, 2, batch=250, seq_len=4096), problem=_renamed(other))


def _renamed(problem: Problem) -> Problem:
    from dataclasses import replace

    return replace(problem, names=tuple(range(len(problem.names))))


def test_mixed_cluster_keeps_kinds_apart():
    cluster = load_cluster("2x8xa100-sxm-80gb+2x8xh100-sxm@400Gb/s")
    model = load_model("llama3-8b")
    spans = layer_spans(model.num_layers, 4, 1)
    plan = Plan(
        global_batch=64, seq_len=4096,
        groups=(Group(share=64, sp=True, stages=tuple(
            Stage(ranks=tuple(range(8 * i, 8 * i + 8)), layers=tuple(span), tp=8)
            for i, span in enumerate(spans))),),
    )  # fmt: skip
    found = replan(model, cluster, plan, slowdown={17: 3.0})
    check_plan(found.plan, model, cluster)
    assert found.step_time_s < found.running_step_s
    for group in found.plan.groups:
        for stage in group.stages:
            assert len({rank < 16 for rank in stage.ranks}) == 1


def test_migration_counts_what_is_missing():
    plan = even_plan(8, 4, 2)
    moved = migration(MODEL, CLUSTER, plan, plan)
    assert moved.bytes_moved == 0.0 and moved.seconds == 0.0 and not moved.checkpoint
    first, *rest = plan.groups[0].stages
    one = first.layers[0][1]
    cut = Group(
        share=plan.groups[0].share, sp=True,
        stages=(
            Stage(ranks=first.ranks, layers=((0, one - 1),), tp=8),
            Stage(ranks=rest[0].ranks, layers=((one - 1, rest[0].layers[0][1]),), tp=8), *rest[1:],
        ),
    )  # fmt: skip
    new = Plan(global_batch=256, seq_len=4096, groups=(cut, plan.groups[1]))
    moved = migration(MODEL, CLUSTER, plan, new)
    # One block: 2 bytes of weight, 4 of master and 8 of moments a parameter, over one node's interface.
    block = 14.0 * MODEL.blocks[0].num_params
    assert moved.bytes_moved == pytest.approx(block, rel=1e-12)
    assert moved.seconds == pytest.approx(block / CLUSTER.nodes[0].nic_bytes_per_s, rel=1e-12)


def test_pools_hold_every_device_that_is_left_once():
    pools = pools_of(CLUSTER, (0,), {5: 2.0, 6: 2.0, 13: 3.0}, {0, 40})
    ranks = [rank for pool in pools for node in pool.nodes for rank in node]
    assert sorted(ranks) == [rank for rank in range(64) if rank not in (0, 40)]
    assert {pool.pace for pool in pools} == {1.0, 2.0, 3.0}
    assert pools[0].state == 0 and pools[0].count == 5 * 8


def test_stage_goes_at_the_pace_of_its_slowest_device(healthy):
    pools = pools_of(CLUSTER, (0,), {5: 2.6}, ())
    pooled = pooled_problem(healthy, pools, range(len(healthy.names)))
    for o, name in enumerate(pooled.names):
        slow = any(pools[p].pace > 1.0 for p, _ in name.demand)
        own = healthy.time_s[healthy.names.index(name.base)]
        finite = np.isfinite(own)
        assert np.allclose(pooled.time_s[o][finite], own[finite] * (2.6 if slow else 1.0), rtol=1e-12)
        assert pooled.takes[o].sum() == name.base.tp * name.base.inner_dp


def test_cuts_are_as_good_as_any(healthy):
    rng = np.random.default_rng(3)
    pooled = _small(rng)
    for _ in range(40):
        options = rng.integers(0, len(pooled.takes), size=int(rng.integers(1, 4)))
        passes = float(rng.integers(1, 30))
        found = best_cuts(pooled, [int(o) for o in options], passes)
        best = min((_seconds(pooled, one, passes) for one in _all_cuts(pooled, options)), default=math.inf)
        if found is None:
            assert math.isinf(best)
            continue
        assert not template_faults(pooled, found)
        # The slowest stage is the least possible, so the rest can lose at most what a slower one would gain.
        assert _seconds(pooled, found, passes) <= best * 1.08
        least = min(float(stage_seconds(pooled, one).max()) for one in _all_cuts(pooled, options))
        many = best_cuts(pooled, [int(o) for o in options], 1e9)
        assert float(stage_seconds(pooled, many).max()) == pytest.approx(least, rel=1e-9)


def _small(rng: np.random.Generator) -> Problem:
    layers, count = 6, 5
    start, stop = np.triu_indices(layers + 1, k=1)
    types = np.full((layers + 1, layers + 1), -1)
    types[start, stop] = np.arange(len(start))
    time_s = rng.uniform(0.5, 1.5, (count, len(start))) * (stop - start)
    return Problem(
        counts=(8,), global_batch=64, max_stages=4, types=types, takes=np.ones((count, 1), dtype=int),
        micro_batch=np.ones(count, dtype=int), grain=np.ones(count, dtype=int), time_s=time_s, copies=(1,),
        tail_s=np.zeros((1, count, len(start))), hop_s=rng.uniform(0, 0.2, (count, count)),
        max_in_flight=rng.integers(0, 5, (count, len(start))),
    )  # fmt: skip


def _all_cuts(problem: Problem, options) -> list[tuple[Part, ...]]:
    made = []
    for inner in itertools.combinations(range(1, problem.num_layers), len(options) - 1):
        cuts = (0, *inner, problem.num_layers)
        template = tuple(
            Part(option=int(o), start=a, stop=b) for o, a, b in zip(options, cuts[:-1], cuts[1:], strict=True)
        )
        if not template_faults(problem, template):
            made.append(template)
    return made


def _seconds(problem: Problem, template: tuple[Part, ...], passes: float) -> float:
    times = stage_seconds(problem, template)
    return float(times.sum() + (passes - 1.0) * times.max())


def test_work_alone_bounds_every_step():
    rng = np.random.default_rng(7)
    from foreshard.planner.nearby import rebalanced
    from foreshard.planner.problem import step_seconds

    for _ in range(20):
        problem = _small(rng)
        bound = work_bound(problem)
        for size in (1, 2, 3):
            for options in itertools.product(range(5), repeat=size):
                template = best_cuts(problem, options, 16.0)
                if template is None:
                    continue
                made = rebalanced(problem, [template] * (8 // size))
                assert bound <= step_seconds(problem, made) * (1 + 1e-12)
