"""Plans by measured costs against every plan of small problems, and against a bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from foreshard.lab.lab import Lab
from foreshard.planner.measured.places import Places
from foreshard.planner.measured.plans import plan_measured
from foreshard.planner.measured.prices import one_pass_s, priced, work_bound_s
from foreshard.planner.solver.problem import Arrangement, StageSpan
from foreshard.planner.solver.problem import step_seconds as abstract_s
from foreshard.predict.measured.costs import LayerCost, MeasuredCosts
from foreshard.predict.measured.engine import step_seconds
from foreshard.spec.plan import Group, Plan, Stage

SIZES = (1, 2, 4)


def costs(rng, layers, slow, tables=()):
    def table():
        return tuple(
            LayerCost(
                forward_s=(f, e),
                backward_s=(f, 2 * e),
                backward_input_s=(f / 2, e),
                optimizer_s=float(rng.uniform(0, 1e-3)),
                parameter_bytes=float(rng.uniform(0, 1e6)),
                state_bytes=1e5,
                saved_bytes_per_sample=1e5,
                boundary_bytes_per_sample=1e4,
            )
            for f, e in rng.uniform(1e-4, 3e-3, (layers, 2)).tolist()
        )

    return MeasuredCosts(
        layers=table(),
        slow=slow,
        spread=(0.9, 1.1),
        clock="cpu",
        tokens_per_sample=1.0,
        path="c",
        largest=2,
        tables={name: table() for name in tables},
    )


def lab(devices, memory=None, rate=1e9):
    return Lab(
        clock="cpu",
        slow=(1.0,) * len(devices),
        devices=tuple(devices),
        bandwidth_bytes_per_s=rate,
        latency_s=1e-5,
        memory_bytes=(memory,) * len(devices),
    ).cluster()


def pipelines(ranks, layers):
    """Return all ways to lay the layers on the ranks in order, as stages."""
    cuts = [()] if len(ranks) == 1 else [(c,) for c in range(1, layers)]
    for order in permutations(ranks):
        for cut in cuts:
            edges = (0, *cut, layers)
            yield tuple(
                Stage(ranks=(rank,), layers=((lo, hi),), zero=0)
                for rank, lo, hi in zip(order, edges[:-1], edges[1:], strict=True)
            )


def every_plan(layers, batch):
    """Return every plan of two devices: one alone, both in a pipeline, both beside each other."""
    groups = []
    for ranks in ((0,), (1,), (0, 1)):
        for stages in pipelines(ranks, layers):
            groups += [(Group(share=batch, micro_batch=m, stages=stages),) for m in SIZES if m <= batch]
    alone = {rank: next(pipelines((rank,), layers)) for rank in (0, 1)}
    for share in range(1, batch):
        for a in (m for m in SIZES if m <= share):
            for b in (m for m in SIZES if m <= batch - share):
                groups.append(
                    (
                        Group(share=share, micro_batch=a, stages=alone[0]),
                        Group(share=batch - share, micro_batch=b, stages=alone[1]),
                    )
                )
    for made in groups:
        yield Plan(global_batch=batch, seq_len=1, groups=made)


@pytest.mark.parametrize("seed", range(8))
def test_no_plan_of_a_small_problem_beats_the_search_or_the_bound(seed):
    rng = np.random.default_rng(seed)
    told = costs(rng, 3, {"a": 1.0, "b": float(rng.uniform(1, 6))}, tables=("b",) if seed % 2 else ())
    cluster = lab("ab", rate=float(10 ** rng.uniform(7, 10)))
    result = plan_measured(told, cluster, global_batch=6, seq_len=1, budget_s=600.0)
    best_s = min(step_seconds(told, cluster, one) for one in every_plan(3, 6))
    found_s = result.plans[0].prediction.step_time_s
    assert found_s <= best_s * (1 + 1e-9)
    assert result.lower_bound_step_time_s <= best_s * (1 + 1e-9)
    assert result.gap == pytest.approx(found_s / result.lower_bound_step_time_s - 1)
    times = [one.prediction.step_time_s for one in result.plans]
    assert times == sorted(times)


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_beats_one_pass_of_device_and_host(seed):
    """Few samples whose launches take longest: the work alone says next to nothing."""
    rng = np.random.default_rng(seed)
    launches = tuple(((float(f), 0.0), (float(b), 0.0)) for f, b in rng.uniform(2e-3, 9e-3, (3, 2)))
    told = replace(
        costs(rng, 3, {"a": 1.0, "b": 2.0}, tables=("b",) if seed % 2 else ()),
        launch_s={"a": launches, "b": launches},
        host_sharpness=float(rng.uniform(2.0, 6.0)),
        clock="formula",
    )
    cluster = lab("ab")
    best_s = min(step_seconds(told, cluster, one) for one in every_plan(3, 2))
    work_s, pass_s = work_bound_s(told, cluster, SIZES, 2), one_pass_s(told, cluster, 2)
    assert work_s < pass_s <= best_s * (1 + 1e-9)
    assert best_s < 3.0 * pass_s
    found = plan_measured(told, cluster, global_batch=2, seq_len=1, budget_s=600.0)
    assert found.lower_bound_step_time_s == pytest.approx(pass_s)


def test_one_table_and_the_program_over_tables_give_one_bound():
    rng = np.random.default_rng(1)
    told = costs(rng, 5, {"a": 1.0, "b": 3.0})
    cluster = lab("aab")
    b = tuple(
        replace(
            layer,
            forward_s=tuple(3 * v for v in layer.forward_s),
            backward_s=tuple(3 * v for v in layer.backward_s),
        )
        for layer in told.layers
    )
    both = replace(told, tables={"b": b}, slow={"a": 1.0, "b": 1.0})
    assert work_bound_s(both, cluster, (2, 4), 12) == pytest.approx(work_bound_s(told, cluster, (2, 4), 12))


@pytest.mark.parametrize("rule", ["none", "full"])
def test_prices_are_those_of_the_engine_where_nothing_overlaps(rule):
    rng = np.random.default_rng(2)
    told, cluster = costs(rng, 4, {"a": 1.0, "b": 2.0}), lab("ab")
    problem = priced(told, Places(cluster), SIZES, 8, rules=("none", "full"))
    option = problem.names.index((1, 2, 1, rule))
    made = Arrangement(templates=((StageSpan(option=option, start=0, stop=4),),), shares=(6,))
    stage = Stage(ranks=(1,), layers=((0, 4),), zero=0, recompute=rule)
    plan = Plan(global_batch=6, seq_len=1, groups=(Group(share=6, micro_batch=2, stages=(stage,)),))
    assert abstract_s(problem, made) == pytest.approx(step_seconds(told, cluster, plan))


def test_a_mixed_lab_gets_shares_by_speed_near_the_bound():
    rng = np.random.default_rng(3)
    told = costs(rng, 6, {"a": 1.0, "b": 2.0, "c": 4.0, "d": 8.0})
    result = plan_measured(told, lab("abcd"), global_batch=480, seq_len=1, budget_s=600.0)
    assert result.gap < 0.05
    assert len(result.plans) > 1  # equal shares are shown beside it
    assert result.plans[-1].prediction.step_time_s > 1.5 * result.plans[0].prediction.step_time_s


def test_what_fits_nowhere_is_said():
    told = costs(np.random.default_rng(4), 3, {"a": 1.0})
    result = plan_measured(told, lab("a", memory=1e5), global_batch=4, seq_len=1)
    assert not result.plans and "memory" in str(result.infeasible)
    assert result.to_dict()["gap"] is None


def test_a_model_too_large_for_one_device_is_cut():
    told = costs(np.random.default_rng(5), 3, {"a": 1.0})
    need = max(2 * one.parameter_bytes + one.state_bytes for one in told.layers)
    result = plan_measured(told, lab("aaa", memory=need + 7e5), global_batch=4, seq_len=1)
    assert result.plans[0].prediction.memory.fits
    assert max(len(g.stages) for g in result.plans[0].plan.groups) > 1


def with_parts(rng, told, efficiency):
    """Costs with the part of each of two ranks, and the sums between them."""

    def halved(table):
        return tuple(
            replace(
                layer,
                forward_s=tuple(v * efficiency for v in layer.forward_s),
                backward_s=tuple(v * efficiency for v in layer.backward_s),
                parameter_bytes=layer.parameter_bytes * 0.6,
                optimizer_s=layer.optimizer_s * 0.6,
                sums_forward=((float(rng.uniform(0, 1e4)), 1.0),),
                sums_backward=((float(rng.uniform(0, 1e4)), 1.0),),
            )
            for layer in table
        )

    parts = {name: {2: halved(table)} for name, table in {"": told.layers, **told.tables}.items()}
    return replace(told, parts=parts)


def units_of(layers, pair):
    """Return pipelines of three devices, of which two may compute together, as stages."""
    units = [(0,), (1,), (2,), pair]
    for unit in units:
        yield (Stage(ranks=unit, tp=len(unit), layers=((0, layers),), zero=0),)
    for a in units:
        for b in units:
            if not set(a) & set(b):
                for cut in range(1, layers):
                    yield (
                        Stage(ranks=a, tp=len(a), layers=((0, cut),), zero=0),
                        Stage(ranks=b, tp=len(b), layers=((cut, layers),), zero=0),
                    )


def beside(pipes, batch, taken=frozenset()):
    """Return every choice of pipelines beside each other with shares that sum to the batch."""
    for number, stages in enumerate(pipes):
        ranks = {rank for stage in stages for rank in stage.ranks}
        if ranks & taken:
            continue
        for size in (m for m in SIZES if m <= batch):
            yield (Group(share=batch, micro_batch=size, stages=stages),)
        for share in range(1, batch):
            for rest in beside(pipes[number + 1 :], batch - share, taken | ranks):
                for size in (m for m in SIZES if m <= share):
                    yield (Group(share=share, micro_batch=size, stages=stages), *rest)


TOGETHER = (0, 1, 3, 4, 5)
"""Seeds whose best plan has ranks that compute together."""


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_with_ranks_that_compute_together_beats_the_search(seed):
    """Parts from twice as good as their number to hardly worth it."""
    rng = np.random.default_rng(seed)
    told = costs(rng, 2, {"a": 1.0, "b": float(rng.uniform(1, 4))}, tables=("b",) if seed % 2 else ())
    told = with_parts(rng, told, (0.3, 0.45, 0.6)[seed % 3])
    cluster = lab("aab", rate=float(10 ** rng.uniform(7, 10)))
    result = plan_measured(told, cluster, global_batch=4, seq_len=1, budget_s=600.0)
    plans = [Plan(global_batch=4, seq_len=1, groups=made) for made in beside(list(units_of(2, (0, 1))), 4)]
    seconds = [step_seconds(told, cluster, plan) for plan in plans]
    assert result.plans[0].prediction.step_time_s <= min(seconds) * (1 + 1e-9)
    assert result.lower_bound_step_time_s <= min(seconds) * (1 + 1e-9)
    best = plans[int(np.argmin(seconds))]
    assert any(stage.tp > 1 for group in best.groups for stage in group.stages) == (seed in TOGETHER)


def test_ranks_that_compute_together_are_of_one_node():
    node = lab("a").nodes[0]
    cluster = replace(lab("a"), nodes=(replace(node, count=2, per_node=3),))
    places = Places(cluster)
    assert list(places.blocks(0, 2)) == [(0, 1), (3, 4)]
    assert places.given([(0, 1), (0, 2), (0, 2), (0, 1)]) == [(2,), (0, 1), (3, 4), (5,)]
    assert places.given([(0, 2)] * 3) is None
    rng = np.random.default_rng(0)
    told = with_parts(rng, costs(rng, 2, {"a": 1.0}), 0.45)
    assert places.degrees(told, 0) == (2,)
    assert places.degrees(replace(told, parts={"": {4: told.parts[""][2]}}), 0) == ()


def test_what_is_not_measured_in_parts_is_not_planned_in_parts():
    rng = np.random.default_rng(0)
    told = costs(rng, 2, {"a": 1.0})
    result = plan_measured(told, lab("aa"), global_batch=4, seq_len=1, budget_s=600.0)
    assert "one device a stage" in result.space
    both = plan_measured(with_parts(rng, told, 0.3), lab("aa"), global_batch=4, seq_len=1, budget_s=600.0)
    assert "one device or tp 2 a stage" in both.space
    assert both.plans[0].plan.groups[0].stages[0].tp == 2
    assert both.plans[0].prediction.step_time_s < result.plans[0].prediction.step_time_s


def test_idle_nodes_are_not_paid():
    told = costs(np.random.default_rng(6), 3, {"a": 1.0, "b": 1e4})
    cluster = lab("ab")
    cluster = replace(cluster, nodes=tuple(replace(nodes, usd_per_h=10.0) for nodes in cluster.nodes))
    assert len(cluster.nodes) == 2
    best = plan_measured(told, cluster, global_batch=4, seq_len=1, budget_s=600.0).plans[0]
    assert best.plan.ranks == (0,)
    hours = best.prediction.step_time_s / 3600.0
    assert best.prediction.cost.usd_per_step == pytest.approx(10.0 * hours)
