"""Stages that ranks of two node groups share: what the engine says of them, and when a search takes them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.planner.mixed import search
from foreshard.planner.pricing import stage_prices
from foreshard.planner.pricing.engine_times import engine_seconds, predicted
from foreshard.planner.pricing.mapping import plan_of
from foreshard.planner.pricing.stage_options import MOST_JOINED, joint_options, stage_options
from foreshard.planner.pricing.stage_prices import price_stages
from foreshard.planner.request import PlanRequest, checked_request
from foreshard.planner.search import plan
from foreshard.planner.solver.problem import (
    Arrangement,
    Problem,
    StageSpan,
    faults,
    least_step_seconds,
    step_seconds,
    tail_seconds,
)
from foreshard.predict.analytical.engine import stage_times
from foreshard.predict.batch import Case, build_batch
from foreshard.predict.placement import stage_workers
from foreshard.spec.checks import check_plan
from foreshard.spec.model import Model
from foreshard.spec.plan import Group, Plan, Stage

PAIR = "1x1xrtx-3090+1x1xa100-sxm-40gb@400Gb/s"
ODD = "1x2xrtx-3090+1x1xa100-sxm-40gb@400Gb/s"
WIDE = "2x4xa100-sxm-40gb+2x4xv100-sxm-16gb@100Gb/s"


def short_model(num_layers: int) -> Model:
    model = load_model("gpt2-xl")
    return replace(model, blocks=model.blocks[:num_layers])


def asked(cluster: str, batch: int, *, model: Model | None = None, precision: str = "bf16") -> PlanRequest:
    return checked_request(
        model or load_model("gpt2-xl"),
        load_cluster(cluster),
        global_batch=batch,
        seq_len=1024,
        precision=precision,
    )


def joint_of(problem: Problem) -> list[int]:
    return [i for i, kind in enumerate(problem.names) if kind.beside]


def whole(problem: Problem, option: int, batch: int) -> Arrangement:
    part = StageSpan(option=option, start=0, stop=problem.num_layers)
    return Arrangement(templates=((part,),), shares=(batch,))


def test_a_joint_stage_alone_costs_what_the_engine_says():
    request = asked(PAIR, 20, model=short_model(6))
    problem = price_stages(request, (0, 1), by_domain=True, every=True)
    compared = set()
    for option in joint_of(problem):
        arrangement = whole(problem, option, 20)
        if faults(problem, arrangement):
            continue
        made = plan_of(request, problem, arrangement)
        check_plan(made, request.model, request.cluster)
        assert made.groups[0].stages[0].rank_shares == problem.names[option].rank_shares
        found = engine_seconds(request, [made])[0]
        assert step_seconds(problem, arrangement) == pytest.approx(found, rel=1e-9)
        memory = predicted(request, made).memory
        assert memory.peak_bytes <= memory.capacity_bytes * 1.02
        compared.add(problem.names[option].rank_shares)
    assert len(compared) >= 4 and any(len(set(shares)) > 1 for shares in compared)


def test_no_plan_with_joint_stages_is_faster_by_the_engine():
    request, rng = asked(WIDE, 64, precision="fp16"), np.random.default_rng(3)
    problem = price_stages(request, (0, 1), by_domain=True, every=True)
    joint, judged = joint_of(problem), 0
    for _ in range(600):
        first = int(rng.choice(joint))
        same = np.flatnonzero(problem.micro_batch == problem.micro_batch[first])
        options = [first, *(int(o) for o in rng.choice(same, int(rng.integers(0, 3))))]
        rng.shuffle(options)
        cuts = sorted(rng.choice(np.arange(1, problem.num_layers), len(options) - 1, replace=False).tolist())
        bounds = zip([0, *cuts], [*cuts, problem.num_layers], strict=True)
        template = tuple(
            StageSpan(option=o, start=int(a), stop=int(b)) for o, (a, b) in zip(options, bounds, strict=True)
        )
        arrangement = Arrangement(templates=(template,), shares=(64,))
        made = None if faults(problem, arrangement) else plan_of(request, problem, arrangement)
        if made is None:
            continue
        # A short last micro-batch is split over unequal ranks in whole samples.
        assert least_step_seconds(problem, arrangement) <= engine_seconds(request, [made])[0] * 1.001
        judged += 1
    assert judged >= 25


def test_no_rank_of_a_joint_stage_is_slower_than_the_one_looked_at():
    """The engine prices the ranks of most samples over peak; others must not hold the stage up."""
    request = asked(PAIR, 20, model=short_model(6))
    problem = price_stages(request, (0, 1), every=True)
    uneven = 0
    for option in joint_of(problem):
        arrangement = whole(problem, option, 20)
        if faults(problem, arrangement):
            continue
        made = plan_of(request, problem, arrangement)
        group, (stage,) = made.groups[0], made.groups[0].stages
        alone = []
        for worker in stage_workers(request.cluster, group, stage):
            own = replace(stage, ranks=(worker.rank,), rank_shares=None)
            size = int(worker.share)
            one = replace(made, groups=(replace(group, stages=(own,), micro_batch=size),))
            case = Case(model=request.model, cluster=request.cluster, plan=one, framework=request.framework)
            alone.append(float(stage_times(build_batch([case], request.constants)).total.max()))
        looked_at = step_seconds(problem, arrangement) - tail_seconds(problem, arrangement.templates[0], 1)
        passes = 20 / int(problem.micro_batch[option])
        assert max(alone) * passes <= looked_at * 1.011
        uneven += len(set(stage.rank_shares)) > 1
    assert uneven >= 2


def test_joint_stages_are_offered_where_they_can_help():
    request = asked(WIDE, 64, precision="fp16")
    found = joint_options(request, (0, 1))
    assert {kind.tp for kind in found} == {kind.tp for kind in stage_options(request, (0, 1))}
    assert all(kind.samples == sum(kind.rank_shares) and kind.width <= 8 for kind in found)
    assert all(kind.turned.turned == kind for kind in found)
    assert not joint_options(request, (0,))
    assert not joint_options(asked(WIDE, 64, precision="bf16"), (0, 1))  # V100 have no bf16
    many = WIDE.replace("2x4xa100", f"{MOST_JOINED}x4xa100")
    assert not joint_options(asked(many, 64, precision="fp16"), (0, 1))


def test_a_problem_without_joint_stages_is_that_priced_without_them():
    request = asked(WIDE, 64, precision="fp16")
    plain = price_stages(request, (0, 1), by_domain=True)
    every = price_stages(request, (0, 1), by_domain=True, every=True)
    alone = [kind.is_plain for kind in every.names]
    assert tuple(kind for kind in every.names if kind.is_plain) == plain.names == every.names[: sum(alone)]
    for name in ("takes", "micro_batch", "grain", "time_s", "max_in_flight", "leave_s"):
        assert np.allclose(getattr(every, name)[alone], getattr(plain, name), rtol=1e-12), name
    assert np.allclose(every.tail_s[:, alone], plain.tail_s, rtol=1e-12)
    assert np.allclose(every.hop_s[np.ix_(alone, alone)], plain.hop_s, rtol=1e-12)


def every_plan(request: PlanRequest) -> float:
    """The least step time by the engine over every plan of two devices that fits."""
    problem = price_stages(request, (0, 1), by_domain=True, every=True)
    batch, end, options = request.global_batch, problem.num_layers, range(len(problem.names))
    found = [whole(problem, option, batch) for option in options]
    for one, other in product(options, repeat=2):
        if (problem.takes[one] + problem.takes[other]).max() > 1:
            continue
        for cut in range(1, end):
            parts = StageSpan(option=one, start=0, stop=cut), StageSpan(option=other, start=cut, stop=end)
            found.append(Arrangement(templates=(parts,), shares=(batch,)))
        for share in range(1, batch) if problem.takes[one][0] else ():
            pair = tuple((StageSpan(option=option, start=0, stop=end),) for option in (one, other))
            if share >= problem.micro_batch[one] and batch - share >= problem.micro_batch[other]:
                found.append(Arrangement(templates=pair, shares=(share, batch - share)))
    best = np.inf
    # No plan is faster by the engine than by the problem: from the least on, until none can be better.
    for arrangement in sorted(
        (one for one in found if not faults(problem, one)), key=lambda one: step_seconds(problem, one)
    ):
        if step_seconds(problem, arrangement) >= best:
            break
        made = plan_of(request, problem, arrangement)
        if made is not None and predicted(request, made).memory.fits:
            best = min(best, engine_seconds(request, [made])[0])
    return best


@pytest.mark.parametrize(
    ("layers", "batch", "cluster"),
    [
        (2, 7, PAIR),
        (3, 12, PAIR),
        (4, 10, "1x1xa100-sxm-40gb+1x1xh100-sxm@400Gb/s"),
        (3, 9, "1x1xrtx-3090+1x1xrtx-4090@1600Gb/s"),
    ],
)
def test_the_best_of_every_plan_on_two_devices_is_found(layers, batch, cluster):
    pytest.importorskip("scipy")
    model = short_model(layers)
    request = asked(cluster, batch, model=model)
    found = plan(model, load_cluster(cluster), global_batch=batch, seq_len=1024, budget_s=5.0)
    alone = [engine_alone(request, g) for g in (0, 1)]
    best = min(every_plan(request), *alone)
    assert found.lower_bound_step_time_s <= best * (1 + 1e-9)
    assert found.plans[0].prediction.step_time_s <= best * (1 + max(found.gap, 1e-9))


def engine_alone(request: PlanRequest, g: int) -> float:
    """The least step time by the engine on one device."""
    problem = price_stages(request, (g,), by_domain=True)
    made = [whole(problem, option, request.global_batch) for option in range(len(problem.names))]
    plans = [plan_of(request, problem, one) for one in made if not faults(problem, one)]
    return min(engine_seconds(request, plans), default=np.inf)


def test_a_joint_stage_is_chosen_where_it_is_faster(monkeypatch):
    pytest.importorskip("scipy")
    model, cluster = load_model("gpt2-xl"), load_cluster(ODD)
    monkeypatch.setattr(search, "chunk_counts", lambda *_: ())
    made = {"global_batch": 64, "seq_len": 512, "budget_s": 30.0}  # it ends as soon as the gap is small
    joined = plan(model, cluster, **made)
    best = joined.plans[0]
    check_plan(best.plan, model, cluster)
    stages = [stage for group in best.plan.groups for stage in group.stages]
    assert any(stage.rank_shares and len(set(stage.rank_shares)) > 1 for stage in stages)
    assert best.prediction.memory.fits and joined.gap < 0.02
    monkeypatch.setattr(stage_prices, "joint_options", lambda *_: [])
    alone = plan(model, cluster, **made)
    # Not only faster than the plan without: faster than any such plan can be.
    assert best.prediction.step_time_s < alone.plans[0].prediction.step_time_s
    assert best.prediction.step_time_s < alone.lower_bound_step_time_s


def test_a_joint_stage_that_drains_nothing_does_not_hide_interleaved_plans(even_clock):
    """The best 1f1b plan is one stage without a pipeline to fill; two stages in chunks are faster."""
    pytest.importorskip("scipy")
    model, cluster = load_model("gpt2-xl"), load_cluster(ODD)
    found = plan(model, cluster, global_batch=64, seq_len=1024, budget_s=10.0)
    best = found.plans[0]
    check_plan(best.plan, model, cluster)
    assert best.plan.groups[0].schedule == "interleaved"
    plain = [one for one in found.plans if all(group.num_chunks == 1 for group in one.plan.groups)]
    assert best.prediction.step_time_s < 0.99 * min(one.prediction.step_time_s for one in plain)


def one_group(batch: int, micro_batch: int, *stages: Stage) -> Plan:
    group = Group(share=batch, stages=stages, micro_batch=micro_batch, sp=True)
    return Plan(global_batch=batch, seq_len=1024, groups=(group,))
