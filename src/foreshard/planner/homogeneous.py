"""Plans for equal nodes: how many of them to use, the best degrees on those, and what to do when nothing fits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from foreshard.errors import InfeasibleError
from foreshard.planner.grid import SPACE, Found, GridRequest, search_rows
from foreshard.planner.ranking import ranked
from foreshard.planner.request import Request
from foreshard.planner.result import PlanResult
from foreshard.predict.step import predict
from foreshard.spec.cluster import Cluster
from foreshard.spec.prediction import Prediction

_GROW = (2, 4, 8, 16, 32, 64)
_NEAR_BATCHES = 64


def search_homogeneous(request: Request) -> PlanResult:
    """Return the best plans on equal nodes, proven best by the analytical engine unless time runs out.

    Raises
    ------
    SpecError
        When the devices lack the precision.
    """
    started = time.perf_counter()
    deadline = started + request.budget_s
    searched: list[tuple[Cluster, Found]] = []
    for part in _parts(request):
        found = search_rows(_grid(request, part), keep=_kept(request), deadline=deadline)
        searched.append((part, found))
        enough = len(found.score) and not _compares_sizes(request)
        if enough or found.interrupted or time.perf_counter() >= deadline:
            break
    predictions = [one for part, found in searched for one in _predictions(request, part, found)]
    plans, error = ranked(predictions, request.objectives, request.limits, request.top)
    floors = [found.floor_s for part, found in searched if found.floor_s > 0]
    bounds = [found.bound if request.objectives[0] != "energy" else found.floor_s for _, found in searched]
    ladder = {"compute": min(floors, default=0.0)}
    proven = request.engine == "analytical" and request.objectives[0] != "energy"
    if proven:
        ladder["search"] = min(bounds)
    best = plans[0].prediction.step_time_s if plans else 0.0
    bound = min(max(ladder.values()), best) if plans else 0.0
    bound = best if bound > best * (1.0 - 1e-12) else bound  # the same sum in another order
    return PlanResult(
        plans=plans,
        lower_bound_step_time_s=bound,
        gap=best / bound - 1.0 if bound > 0 else 0.0,
        binding=plans[0].prediction.bottleneck if plans else "",
        evaluated=sum(found.evaluated for _, found in searched),
        pruned=sum(found.pruned for _, found in searched),
        wall_s=time.perf_counter() - started,
        space=SPACE,
        ladder=ladder,
        interrupted=any(found.interrupted for _, found in searched),
        infeasible=error if plans else _infeasible(request, searched),
        notes=tuple(_notes(request, searched, proven)),
    )


def _kept(request: Request) -> int:
    """Return the plans to keep: more where another engine will order them anew, or limits drop some."""
    return request.top if request.engine == "analytical" and not request.limits else 4 * request.top


def _grid(request: Request, cluster: Cluster) -> GridRequest:
    return GridRequest(
        model=request.model, cluster=cluster, framework=request.framework, constants=request.constants,
        global_batch=request.global_batch, seq_len=request.seq_len, precision=request.precision,
        optimizer=request.optimizer, objective=request.objectives[0],
    )  # fmt: skip


def _compares_sizes(request: Request) -> bool:
    """Return whether fewer devices may be better: when money or energy counts."""
    return request.objectives != ("time",) or request.limits.max_usd is not None


def part_of(cluster: Cluster, num_devices: int) -> Cluster:
    """Return the first devices of a cluster of equal nodes: whole nodes, or a part of one."""
    nodes = cluster.nodes[0]
    if num_devices >= nodes.per_node:
        return replace(cluster, nodes=(replace(nodes, count=num_devices // nodes.per_node),))
    price = None if nodes.usd_per_h is None else nodes.usd_per_h * num_devices / nodes.per_node
    domain = min(nodes.nvlink_domain, num_devices)
    return replace(
        cluster,
        nodes=(replace(nodes, count=1, per_node=num_devices, usd_per_h=price, nvlink_domain=domain),),
    )


def _parts(request: Request) -> Iterator[Cluster]:
    """Yield the clusters to search: all devices, then fewer, halving; without a choice, one by one."""
    nodes = request.cluster.nodes[0]
    most = min(request.max_devices or nodes.num_devices, nodes.num_devices)
    unit = nodes.per_node if most >= nodes.per_node else 1
    sizes = [most // unit * unit]
    while sizes[-1] > 1:
        smaller = sizes[-1] // 2
        unit = nodes.per_node if smaller >= nodes.per_node else 1
        sizes.append(max(1, smaller // unit * unit))
    top = sizes[0]
    unit = nodes.per_node if top >= 2 * nodes.per_node else 1
    steps = [top - i * unit for i in range(1, 9) if top - i * unit > 0]
    for size in sorted({*sizes, *steps}, reverse=True):
        yield request.cluster if size == nodes.num_devices else part_of(request.cluster, size)


def _predictions(request: Request, part: Cluster, found: Found) -> list[Prediction]:
    options = {"precision": request.precision, "optimizer": request.optimizer}
    made = []
    for table in found.tables:
        plan = table.plan(
            0, request.model, seq_len=request.seq_len, framework=request.framework.label, **options
        )
        made.append(
            predict(
                request.model,
                part,
                plan,
                framework=request.framework,
                engine=request.engine,
                tokens=request.tokens,
                usd_per_device_hour=request.usd_per_device_hour,
                timeline=False,
            )  # fmt: skip
        )
    return made


def _notes(request: Request, searched: list[tuple[Cluster, Found]], proven: bool) -> Iterator[str]:
    whole = request.cluster.num_devices
    used = [part.num_devices for part, found in searched if len(found.score)]
    if used and max(used) < min(whole, request.max_devices or whole):
        yield f"No plan uses all {whole} devices (divisibility or memory); {max(used)} of them are used"
    if not proven and used:
        yield (
            "The bound counts computation alone: the search is exhaustive by the analytical engine for the step "
            f"time, not for objective {request.objectives[0]} by engine {request.engine}"
        )
    if any(found.interrupted for _, found in searched):
        yield "The search ended before it was exhaustive; the bound holds for what was left out too"


def _infeasible(request: Request, searched: list[tuple[Cluster, Found]]) -> InfeasibleError:
    """Return what keeps every plan out and the nearest change that lets one in."""
    least = min(searched, key=lambda one: one[1].least_peak_bytes)
    if least[1].least_peak is None:
        return InfeasibleError(
            f"no degrees divide global batch {request.global_batch} and sequence {request.seq_len} on "
            f"{request.cluster.num_devices} devices",
            key="--global-batch", value=request.global_batch,
            rule="dp divides the global batch, tp the attention heads, cp and tp the sequence",
            fix=_near_batch(request),
        )  # fmt: skip
    part, found = least
    capacity = part.nodes[0].device.capacity_bytes / 2**30
    return InfeasibleError(
        f"every plan needs more than memory: the least, on {part.num_devices} devices, "
        f"{found.least_peak_bytes / 2**30:.1f} of {capacity:.1f} GiB",
        key="memory", value=f"{found.least_peak_bytes / 2**30:.1f} GiB",
        rule="the fullest device of a plan fits its memory",
        fix=_fitting_change(request),
    )  # fmt: skip


def _fits(request: Request, cluster: Cluster) -> bool:
    found = search_rows(_grid(request, cluster), keep=1, deadline=time.perf_counter() + 2.0)
    return len(found.score) > 0


def _near_batch(request: Request) -> str | None:
    for distance in range(1, _NEAR_BATCHES + 1):
        for batch in (request.global_batch + distance, request.global_batch - distance):
            if batch > 0 and _fits(replace(request, global_batch=batch), request.cluster):
                return f"Use --global-batch {batch}"
    return "Use a global batch that is a multiple of the number of nodes"


def _fitting_change(request: Request) -> str:
    """Return changes that were searched and fit: more nodes, or a shorter sequence."""
    found = []
    nodes = request.cluster.nodes[0]
    for times in _GROW:
        larger = replace(request.cluster, nodes=(replace(nodes, count=nodes.count * times),))
        if _fits(request, larger):
            found.append(f"{larger.num_devices} devices of the same kind")
            break
    for divisor in (2, 4, 8, 16):
        shorter = request.seq_len // divisor
        if shorter and _fits(replace(request, seq_len=shorter), request.cluster):
            found.append(f"--seq {shorter}")
            break
    if not found:
        return "Use devices with more memory: neither 64 times the nodes nor a sixteenth of the sequence fits"
    return f"It fits with {', or '.join(found)}"
