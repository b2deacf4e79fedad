"""Why no plan fits, and the nearest change that lets one fit, found by searching."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from foreshard.catalog.frameworks import load_framework
from foreshard.errors import InfeasibleError
from foreshard.planner.grid.found import Found
from foreshard.planner.grid.search import search_rows
from foreshard.planner.grid.space import GridRequest
from foreshard.planner.request import PlanRequest
from foreshard.spec.cluster import Cluster
from foreshard.units import number_of

if TYPE_CHECKING:
    from foreshard.predict.plan_table import PlanTable

_GROW = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
_SHORTER = (2, 4, 8, 16, 32)
_FRAMEWORKS = ("megatron-core", "torchtitan", "deepspeed")
_ONE_S, _ALL_S = 2.0, 12.0


def infeasible(
    request: PlanRequest,
    searched: Sequence[tuple[Cluster, Found]],
    *,
    exhaustive: bool = True,
    explain: bool = True,
) -> InfeasibleError:
    """Return what keeps every plan out and, with `explain`, the nearest change that lets one in."""
    part, found = min(searched, key=lambda one: one[1].least_peak_bytes)
    capacity = part.nodes[0].device.capacity_bytes / 2**30
    least, on = found.least_peak_bytes / 2**30, number_of(part.num_devices, "device")
    if not exhaustive:
        seen = (
            ""
            if found.least_peak is None
            else (f"; the least memory so far is {least:.1f} of {capacity:.1f} GiB on {on}")
        )
        return InfeasibleError(
            f"no plan that fits was found before the search ended{seen}",
            key="--budget-s",
            value=request.budget_s,
            rule="The search was not exhaustive: a plan may exist",
            fix=_changes(request) if explain else None,
        )
    if found.least_peak is None:
        return InfeasibleError(
            f"no degrees divide global batch {request.global_batch} and sequence {request.seq_len} on {on}",
            key="--global-batch",
            value=request.global_batch,
            rule="dp divides the global batch, tp the attention heads, cp and tp the sequence",
            fix="Use a global batch that is a multiple of the number of nodes",
        )
    return InfeasibleError(
        f"no plan fits memory: the least, on {on} "
        f"({_words(found.least_peak)}), takes {least:.1f} of {capacity:.1f} GiB",
        key="memory",
        value=f"{least:.1f} GiB",
        rule="The fullest device of a plan fits its memory",
        fix=_changes(request) if explain else None,
    )


def _words(table: PlanTable) -> str:
    row = {name: int(getattr(table, name)[0]) for name in ("tp", "pp", "cp", "ep", "dp", "zero")}
    text = " ".join(f"{name} {value}" for name, value in row.items() if value > 1 or name in ("tp", "zero"))
    return f"{text}, recompute {table.rules[int(table.recompute[0])]}"


def _grid(request: PlanRequest, cluster: Cluster) -> GridRequest:
    return GridRequest(
        model=request.model,
        cluster=cluster,
        framework=request.framework,
        constants=request.constants,
        global_batch=request.global_batch,
        seq_len=request.seq_len,
        precision=request.precision,
        optimizer=request.optimizer,
        comm=request.comm,
    )


def _fits(request: PlanRequest, cluster: Cluster | None = None) -> bool:
    """Return whether a search finds any plan within a moment."""
    grid = _grid(request, cluster or request.cluster)
    found = search_rows(grid, keep=1, deadline=time.perf_counter(), patience_s=_ONE_S)
    if found.stopped:
        raise KeyboardInterrupt
    return len(found.score) > 0


def _changes(request: PlanRequest) -> str | None:
    """Return the nearest change of each kind that fits, as far as the user waits for it."""
    stop = time.perf_counter() + _ALL_S
    kinds: tuple[Callable[[PlanRequest], Iterator[tuple[str, PlanRequest]]], ...] = (
        _batches,
        _devices,
        _frameworks,
        _optimizers,
        _sequences,
    )
    found: list[str] = []
    try:
        for kind in kinds:
            for text, changed in kind(request):
                if time.perf_counter() > stop:
                    break
                if _fits(changed):
                    found.append(text)
                    break
    except KeyboardInterrupt:
        if not found:
            return None
    if not found:
        return "Use devices with more memory: no change of devices, framework or sequence tried here fits"
    return f"It fits with {', or '.join(found)}"


def _batches(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Yield the nearest global batches that all devices divide, below and above."""
    devices = request.cluster.num_devices
    for batch in (
        request.global_batch // devices * devices,
        -(-request.global_batch // devices) * devices,
    ):
        if batch > 0 and batch != request.global_batch:
            yield f"--global-batch {batch}", replace(request, global_batch=batch)


def _devices(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    nodes = request.cluster.nodes[0]
    counts = sorted({nodes.count + 1} | {int(nodes.count * times) for times in _GROW} - {nodes.count})
    for count in counts:
        larger = replace(request.cluster, nodes=(replace(nodes, count=count),))
        text = f"{number_of(larger.num_devices, 'device')} instead of {request.cluster.num_devices}"
        yield text, replace(request, cluster=larger, max_devices=None)


def _frameworks(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    for label in _FRAMEWORKS:
        if label != request.framework.label:
            yield f"--framework {label}", replace(request, framework=load_framework(label))


def _optimizers(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    for name in ("adamw-8bit", "adafactor"):
        if name != request.optimizer:
            yield f"--optimizer {name}", replace(request, optimizer=name)


def _sequences(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    for divisor in _SHORTER:
        if request.seq_len // divisor:
            yield f"--seq {request.seq_len // divisor}", replace(request, seq_len=request.seq_len // divisor)
