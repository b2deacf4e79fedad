"""How the layers of an interleaved stage are divided among its chunks, by the exact schedule.

With chunks of unequal lengths stages wait for each other within a round even where each of them has as much
to do in all: a stage on a long chunk holds up one on a short chunk. The closed form knows the layers of a
stage and not those of its chunks, so the schedule is executed for every layout that is tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import cycle

import numpy as np

from foreshard.graph.pipeline import program_of
from foreshard.planner.request import PlanRequest
from foreshard.planner.solver.time_budget import ENDLESS, TimeBudget
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.graph.lowering import durations_of, shape_of
from foreshard.predict.graph.prices import GroupPrices, group_prices
from foreshard.predict.placement import first_of_equals
from foreshard.sim import critical_path
from foreshard.spec.plan import Group, Plan

_GAIN = 1e-6
"""Part of a step that a change has to save: less is rounding."""
_ROUNDS = 12
"""Rounds of as many micro-batches as there are stages that tell which layout is faster: those after the
first few are alike."""


def laid_out(request: PlanRequest, plan: Plan, budget: TimeBudget = ENDLESS) -> Plan:
    """Return an interleaved plan with the layers of each stage in the chunks that make it fastest.

    Every stage keeps its layers. From each of three layouts (the longer chunks first, last or in the middle)
    single layers go from chunk to chunk of a stage as long as that saves time; then whole rounds of
    micro-batches go to the pipeline that ends first.

    Parameters
    ----------
    request : PlanRequest
    plan : Plan
        Returned as it is without numba: hundreds of schedules are executed.
    budget : TimeBudget
        After it the best so far is returned.
    """
    if find_spec("numba") is None:
        return plan
    case = PlannedRun(
        model=request.model,
        cluster=request.cluster,
        plan=plan,
        framework=request.framework,
        costs=request.costs,
    )
    first = first_of_equals(case.cluster, case.plan)
    priced = {one.index: one for one in group_prices(case, build_batch([case], request.constants))}
    pipelines = {index: _Pipeline(price) for index, price in priced.items()}
    sizes = {index: _best_sizes(pipeline, budget) for index, pipeline in pipelines.items()}
    shares = _balanced(plan.groups, first, pipelines, sizes, budget)
    groups = [
        replace(_with_sizes(group, sizes[index]), share=share)
        for group, index, share in zip(plan.groups, first, shares, strict=True)
    ]
    return replace(plan, groups=tuple(groups))


class _Pipeline:
    """The schedule of one group, executed for any layers of its chunks and any share.

    An op takes the time of its layers, in proportion, and what the ends of the model add.
    """

    def __init__(self, price: GroupPrices):
        self.price = price
        self.sizes = np.array([[stop - start for start, stop in spans] for spans in price.spans])
        # The first chunk of the first stage and the last one of the last hold the ends of the model.
        inner = np.append(np.full(price.num_stages - 1, price.num_chunks - 1), 0)
        stages = np.arange(price.num_stages)
        self.layer_s = (price.op_s[:, stages, inner] / self.sizes[stages, inner, None])[:, :, None]
        beside_s = price.op_s - self.layer_s * self.sizes[:, :, None]
        self.end_s = np.zeros_like(beside_s)
        for end in ((0, 0), (-1, -1)):
            self.end_s[:, *end] = beside_s[:, *end]
        self._known: dict[tuple[bytes, int], float] = {}

    def seconds(self, sizes: np.ndarray, share: int) -> float:
        """Return when the last op ends, with chunks of so many layers, shape (stages, chunks)."""
        asked = sizes.tobytes(), share
        if asked not in self._known:
            self._known[asked] = self._executed_s(sizes, share)
        return self._known[asked]

    def _executed_s(self, sizes: np.ndarray, share: int) -> float:
        op_s = np.maximum(self.layer_s * sizes[:, :, None] + self.end_s, 0.0)
        price = replace(self.price, parts={"all": op_s}, group=replace(self.price.group, share=share))
        shape = shape_of(price)
        return critical_path.run(program_of(shape, durations_of(shape, price)), compiled=True).makespan_s


def _best_sizes(pipeline: _Pipeline, budget: TimeBudget) -> np.ndarray:
    """Return the layers of each chunk, shape (stages, chunks), that end the pipeline first."""
    if budget.is_over:
        return pipeline.sizes
    group = pipeline.price.group
    share = min(group.share, _ROUNDS * len(group.stages) * group.micro_batch)
    best_s, best = pipeline.seconds(pipeline.sizes, share), pipeline.sizes
    for start in _layouts(pipeline.sizes):
        seconds, sizes = _improved(pipeline, start, share, budget)
        if seconds < best_s * (1.0 - _GAIN):
            best_s, best = seconds, sizes
    return best


def _improved(
    pipeline: _Pipeline, sizes: np.ndarray, share: int, budget: TimeBudget
) -> tuple[float, np.ndarray]:
    """Return seconds and layers of chunks after single layers went to other chunks as long as that helped."""
    seconds = pipeline.seconds(sizes, share)
    stages, chunks = sizes.shape
    changes = [(s, a, b) for s, a, b in np.ndindex(stages, chunks, chunks) if a != b]
    least = np.ones_like(sizes)  # every chunk keeps a block, beside an end of the model too
    least[0, 0] += 1
    least[-1, -1] += 1
    in_vain = 0
    for s, longer, shorter in cycle(changes):
        in_vain += 1
        if sizes[s, longer] > least[s, longer]:
            changed = sizes.copy()
            changed[s, [longer, shorter]] += [-1, 1]
            changed_s = pipeline.seconds(changed, share)
            if changed_s < seconds * (1.0 - _GAIN):
                seconds, sizes, in_vain = changed_s, changed, 0
        if in_vain == len(changes) or budget.is_over:
            break
    return seconds, sizes


def _layouts(sizes: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the chunks of each stage as equal as they go, the longer ones first, last and in the middle."""
    chunks = sizes.shape[1]
    if chunks == 1:
        return
    few, more = np.divmod(sizes.sum(1, keepdims=True), chunks)
    place = np.arange(chunks)
    from_middle = np.argsort(np.argsort(np.abs(place - (chunks - 1) / 2.0), kind="stable"))
    for order in (place, place[::-1], from_middle):
        yield few + (order < more)


def _with_sizes(group: Group, sizes: np.ndarray) -> Group:
    """Return a group whose chunks have so many layers."""
    if sizes.shape[1] != group.num_chunks:
        return group
    stops = np.cumsum(sizes.T).reshape(sizes.T.shape).T
    stages = [
        replace(stage, layers=tuple(zip((stop - size).tolist(), stop.tolist(), strict=True)))
        for stage, stop, size in zip(group.stages, stops, sizes, strict=True)
    ]
    return replace(group, stages=tuple(stages))


def _balanced(
    groups: Sequence[Group],
    first: Sequence[int],
    pipelines: Mapping[int, _Pipeline],
    sizes: Mapping[int, np.ndarray],
    budget: TimeBudget,
) -> list[int]:
    """Return the samples of each group, moved in whole rounds to where they end first."""
    shares = [group.share for group in groups]
    rounds = [g.micro_batch * (len(g.stages) if g.schedule == "interleaved" else 1) for g in groups]

    def seconds(g: int, share: int) -> float:
        return pipelines[first[g]].seconds(sizes[first[g]], share) if share > 0 else math.inf

    while not budget.is_over:
        slow = max(range(len(groups)), key=lambda g: seconds(g, shares[g]))
        slow_s = seconds(slow, shares[slow])
        best_s, best = slow_s * (1.0 - _GAIN), None
        for other in range(len(groups)):
            moved = math.lcm(rounds[slow], rounds[other])
            if other != slow and shares[slow] > moved:
                after_s = max(seconds(slow, shares[slow] - moved), seconds(other, shares[other] + moved))
                if after_s < best_s:
                    best_s, best = after_s, (other, moved)
        if best is None:
            break
        other, moved = best
        shares[slow] -= moved
        shares[other] += moved
    return shares
