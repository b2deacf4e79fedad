"""Why no pipeline fits on devices of several kinds, and the nearest change that lets one fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from foreshard.errors import InfeasibleError
from foreshard.planner.pricing.stage_prices import price_stages
from foreshard.planner.request import PlanRequest
from foreshard.planner.solver.pricing import cheapest_path
from foreshard.planner.solver.problem import Problem
from foreshard.planner.solver.solve import solve

_GROW = (2, 4, 8, 16, 32)
_SHORTER = (2, 4, 8)
_TRIED_S = 1.0


def nothing_fits(request: PlanRequest, sets: Sequence[tuple[int, ...]]) -> InfeasibleError:
    """Return the error that names what binds, and a change that was tried and fits.

    Parameters
    ----------
    request : PlanRequest
    sets : sequence of tuple of int
        Node groups that may train together, the largest set first.
    """
    memory = sum(
        request.cluster.nodes[g].num_devices * request.cluster.nodes[g].device.capacity_bytes for g in sets[0]
    )
    devices = sum(request.cluster.nodes[g].num_devices for g in sets[0])
    joined = _joined_by_fp16(request, sets[0])
    fix = (
        "Use --dtype fp16, which all of them have"
        if joined
        else next(
            (text for text, changed in _changes(request) if any(_fits(changed, use) for use in sets)), None
        )
    )
    where = (
        f"{devices} devices with {memory / 2**30:,.0f} GiB together"
        if devices > 1
        else (f"the one device that may be used, with {memory / 2**30:,.0f} GiB")
    )
    return InfeasibleError(
        f"no pipeline of {request.model.name} fits {where}",
        key="memory",
        value=f"{memory / 2**30:.0f} GiB",
        rule="Every stage holds its weights, gradients, optimizer states and one micro-batch for each stage "
        "after it",
        fix=fix or "Use devices with more memory, many more of them, or a smaller model",
    )


def _joined_by_fp16(request: PlanRequest, use: tuple[int, ...]) -> bool:
    """Return whether a pipeline fits when devices that lack the precision join in fp16."""
    nodes = request.cluster.nodes
    vendor = nodes[use[0]].device.vendor
    able = [g for g, one in enumerate(nodes) if one.device.vendor == vendor and one.device.supports("fp16")]
    if request.precision == "fp16" or len(able) <= len(use):
        return False
    return _fits(replace(request, precision="fp16"), tuple(able))


def _changes(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Yield changes of the request, the least first."""
    if request.max_devices is not None:
        yield "Leave out --max-devices", replace(request, max_devices=None)
    if request.optimizer == "adamw":
        yield "Use --optimizer adamw-8bit", replace(request, optimizer="adamw-8bit")
    for factor in _SHORTER:
        if request.seq_len % factor == 0 and request.seq_len // factor >= 256:
            text = f"Use --seq {request.seq_len // factor}"
            yield text, replace(request, seq_len=request.seq_len // factor)
    for factor in _GROW:
        nodes = tuple(replace(group, count=group.count * factor) for group in request.cluster.nodes)
        cluster = replace(request.cluster, nodes=nodes)
        yield f"Use {factor} times as many nodes", replace(request, cluster=cluster)


def _fits(request: PlanRequest, use: tuple[int, ...]) -> bool:
    """Return whether a pipeline is found on the devices there are of each kind."""
    problem = price_stages(request, use, every=True)
    if least_devices(problem) > sum(problem.counts):
        return False
    return solve(problem, budget_s=_TRIED_S, target_gap=np.inf).arrangement is not None


def least_devices(problem: Problem) -> float:
    """Return the fewest devices a pipeline takes, inf where none fits."""
    ones, none = np.ones(len(problem.counts)), np.zeros_like(problem.time_s)
    sizes = np.unique(problem.micro_batch)
    found = [cheapest_path(problem, none, ones, int(size), (1e12, 1e12), np.inf) for size in sizes]
    return min((float(round(one[0])) for one in found if one), default=float("inf"))
