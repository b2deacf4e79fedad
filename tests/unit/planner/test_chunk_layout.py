"""Layers of interleaved stages laid out in chunks: by the exact schedule, against every layout there is."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.planner.mixed import chunk_layout
from foreshard.planner.mixed.chunk_layout import laid_out
from foreshard.planner.mixed.interleaving import interleaved
from foreshard.planner.request import PlanRequest, checked_request
from foreshard.predict.step import predict
from foreshard.spec.checks import check_plan
from foreshard.spec.degrees import plan_from_degrees
from foreshard.spec.plan import Plan

pytest.importorskip("numba", reason="executing hundreds of schedules needs the extra `plan`")

MODEL = load_model("gpt2-large")
CLUSTER = load_cluster("1x4xa100-sxm-40gb+1x4xl4@100Gb/s")


def asked(batch: int) -> PlanRequest:
    return checked_request(MODEL, CLUSTER, global_batch=batch, seq_len=1024)


def seconds(plan: Plan) -> float:
    return predict(MODEL, CLUSTER, plan, timeline=False).step_time_s


def two_kinds(seed: int) -> Plan:
    """Return one interleaved pipeline on each kind of device, their stages cut anywhere."""
    rng = random.Random(seed)
    stages, chunks = rng.choice([2, 4]), rng.choice([2, 4])
    even = plan_from_degrees(MODEL.num_layers, 4, pp=stages, tp=4 // stages, global_batch=16, seq_len=1024)
    groups = []
    for first in (0, 4):
        cuts = [0, *sorted(rng.sample(range(chunks, 38 - chunks, chunks), stages - 1)), 38]
        made = tuple(
            replace(stage, layers=((start, stop),), ranks=tuple(rank + first for rank in stage.ranks))
            for stage, start, stop in zip(even.groups[0].stages, cuts[:-1], cuts[1:], strict=True)
        )
        share = stages * rng.randint(2, 8)
        groups.append(replace(even.groups[0], stages=made, share=share, micro_batch=1))
    plan = replace(even, groups=tuple(groups), global_batch=sum(group.share for group in groups))
    cut = interleaved(plan, chunks)
    assert cut is not None
    return cut


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_laid_out_is_valid_and_not_slower(seed):
    plan = two_kinds(seed)
    laid = laid_out(asked(plan.global_batch), plan)
    check_plan(laid, MODEL, CLUSTER)
    assert sum(group.share for group in laid.groups) == plan.global_batch
    for before, after in zip(plan.groups, laid.groups, strict=True):
        assert [s.num_layers for s in before.stages] == [s.num_layers for s in after.stages]
        assert after.num_micro_batches % len(after.stages) == 0
    assert seconds(laid) <= seconds(plan) * 1.002


def test_no_schedule_of_a_pipeline_is_executed_twice(monkeypatch):
    """Layouts that begin alike, and climbs that meet, ask for the same ones."""
    pipelines: list = []
    executed, executed_s = [], chunk_layout._Pipeline._executed_s

    def counted(self, sizes, share):
        pipelines.append(self)  # a number of one that is gone may be given again
        executed.append((id(self), sizes.tolist(), share))
        return executed_s(self, sizes, share)

    monkeypatch.setattr(chunk_layout._Pipeline, "_executed_s", counted)
    plan = two_kinds(1)
    laid_out(asked(plan.global_batch), plan)
    assert len(executed) == len({str(one) for one in executed}) > 10


class Ending:
    """A budget that is over once it was asked so often."""

    def __init__(self, times: int) -> None:
        self.times = times

    @property
    def is_over(self) -> bool:
        self.times -= 1
        return self.times < 0


def test_a_layout_that_time_ends_is_the_best_so_far():
    plan = two_kinds(1)
    request = asked(plan.global_batch)
    assert laid_out(request, plan, Ending(0)) == plan
    ended = [laid_out(request, plan, Ending(times)) for times in (4, 40)]
    assert ended[0] != laid_out(request, plan)
    for laid in ended:
        check_plan(laid, MODEL, CLUSTER)
        assert seconds(laid) <= seconds(plan) * 1.002


def test_unequal_chunks_are_found_that_save_several_percent():
    saved = [
        1.0 - seconds(laid_out(asked(plan.global_batch), plan)) / seconds(plan)
        for plan in map(two_kinds, range(12))
    ]
    assert max(saved) > 0.05


def test_no_layout_of_two_stages_is_faster():
    """Every division of the layers of two stages among three chunks."""
    model = replace(MODEL, blocks=MODEL.blocks[:12])
    even = plan_from_degrees(model.num_layers, 2, pp=2, global_batch=12, seq_len=1024)
    group = even.groups[0]
    cuts = tuple(
        replace(stage, layers=(span,)) for stage, span in zip(group.stages, ((0, 6), (6, 14)), strict=True)
    )
    plan = interleaved(replace(even, groups=(replace(group, stages=cuts),)), 3)
    assert plan is not None
    asked = checked_request(model, CLUSTER, global_batch=12, seq_len=1024)
    laid_s = predict(model, CLUSTER, laid_out(asked, plan)).step_time_s
    divided = [
        [(a, b, total - a - b) for a, b in itertools.product(range(1, total), repeat=2) if total - a - b > 0]
        for total in (6, 8)
    ]
    seconds = []
    for rows in itertools.product(*divided):
        stops = np.cumsum(np.array(rows).T.ravel()).tolist()
        spans = list(zip([0, *stops[:-1]], stops, strict=True))
        stages = tuple(
            replace(stage, layers=tuple(spans[i::2])) for i, stage in enumerate(plan.groups[0].stages)
        )
        other = replace(plan, groups=(replace(plan.groups[0], stages=stages),))
        seconds.append(predict(model, CLUSTER, other, timeline=False).step_time_s)
    assert min(seconds) * 1.05 < max(seconds)
    assert laid_s <= min(seconds) * 1.01
