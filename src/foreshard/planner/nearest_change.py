"""The nearest change of a request that lets a plan fit: what to change, in which order, and what to say.

A search says whether a changed request has a plan; each kind of change is tried from the least on, until one
fits. `planner.grid` and `planner.mixed` ask with searches of their own; `advise.fit` tries the same sequences
and optimizers for a plan of stated degrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.offers import as_chosen
from foreshard.errors import SpecError
from foreshard.planner.headroom import asking
from foreshard.planner.request import PlanRequest
from foreshard.planner.solver.time_budget import ENDLESS, TimeBudget
from foreshard.units import number_of

_TIMES = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
"""Times as many nodes of one kind: steps of at most a half, since nodes are the dearest change."""
_TIMES_OF_EACH = (2, 4, 8, 16, 32)
"""Times as many nodes of each kind: powers of two, since every one costs a search of mixed devices."""
_SHORTEST = 256
"""Tokens below which nobody trains a language model."""
_FRAMEWORKS = ("megatron-core", "megatron-fsdp", "torchtitan", "deepspeed")
"""Frameworks that are tried instead: each shards states in a way of its own."""
_OPTIMIZERS = ("adamw-8bit", "adafactor")
"""Optimizers of less state than AdamW, the more alike it first."""
_MARGINS = (0.9, 0.8, 0.5, 0.0)
"""Probabilities of fitting that are tried instead: most of the time a plan of the last still fits."""

Changes = Iterator[tuple[str, PlanRequest]]
"""Changes of one kind, the least first: what to say, and the changed request."""


def fitting_changes(
    kinds: Iterable[Changes],
    fits: Callable[[PlanRequest], bool],
    *,
    most: int,
    budget: TimeBudget = ENDLESS,
) -> list[str]:
    """Return the nearest change that fits of each kind, at most so many; Ctrl-C keeps those found.

    Parameters
    ----------
    kinds : iterable of Changes
    fits : callable
        Whether a request has a plan.
    most : int
    budget : TimeBudget
        When to stop looking.

    Raises
    ------
    KeyboardInterrupt
        When none was found before.
    """
    found: list[str] = []
    try:
        for kind in kinds:
            for text, changed in kind:
                if budget.is_over:
                    return found
                if fits(changed):
                    found.append(text)
                    break
            if len(found) == most:
                return found
    except KeyboardInterrupt:
        if not found:
            raise
    return found


def shorter_sequences(seq_len: int) -> Iterator[int]:
    """Yield the halves of a sequence, in tokens, as long as it divides and is worth training on."""
    while seq_len % 2 == 0 and seq_len // 2 >= _SHORTEST:
        seq_len //= 2
        yield seq_len


def smaller_optimizers(optimizer: str) -> Iterator[str]:
    """Yield optimizers of less state."""
    yield from _OPTIMIZERS[_OPTIMIZERS.index(optimizer) + 1 :] if optimizer in _OPTIMIZERS else _OPTIMIZERS


def other_sequences(request: PlanRequest) -> Changes:
    """Yield shorter sequences."""
    for seq_len in shorter_sequences(request.seq_len):
        yield f"--seq {seq_len}", replace(request, seq_len=seq_len)


def other_optimizers(request: PlanRequest) -> Changes:
    """Yield optimizers of less state."""
    for name in smaller_optimizers(request.optimizer):
        yield f"--optimizer {name}", replace(request, optimizer=name)


def other_frameworks(request: PlanRequest) -> Changes:
    """Yield frameworks that shard otherwise and take what is asked for of compiler, recipe and dispatcher."""
    for label in _FRAMEWORKS:
        if label == request.framework.label:
            continue
        framework = load_framework(label)
        try:
            framework = as_chosen(framework, request, model=request.model, devices=request.cluster.devices)
        except SpecError:
            continue
        yield f"--framework {label}", asking(request, framework=framework)


def smaller_margins(request: PlanRequest) -> Changes:
    """Yield smaller probabilities of fitting."""
    for margin in _MARGINS:
        if margin < request.memory_margin:
            yield f"--memory-margin {margin:g}", asking(request, margin=margin)


def other_batches(request: PlanRequest) -> Changes:
    """Yield the nearest global batches that all devices divide, below and above."""
    devices, batch = request.cluster.num_devices, request.global_batch
    for near in (batch // devices * devices, -(-batch // devices) * devices):
        if near > 0 and near != batch:
            yield f"--global-batch {near}", replace(request, global_batch=near)


def more_equal_nodes(request: PlanRequest) -> Changes:
    """Yield larger clusters of the same nodes: one node more, then half as many more, and so on."""
    nodes = request.cluster.nodes[0]
    for count in sorted({nodes.count + 1} | {int(nodes.count * times) for times in _TIMES} - {nodes.count}):
        larger = replace(request.cluster, nodes=(replace(nodes, count=count),))
        text = f"{number_of(larger.num_devices, 'device')} instead of {request.cluster.num_devices}"
        yield text, replace(request, cluster=larger, max_devices=None)


def more_nodes_of_each(request: PlanRequest) -> Changes:
    """Yield clusters of as many times the nodes of each kind."""
    for times in _TIMES_OF_EACH:
        nodes = tuple(replace(group, count=group.count * times) for group in request.cluster.nodes)
        yield f"{times} times as many nodes", replace(request, cluster=replace(request.cluster, nodes=nodes))


def any_number_of_devices(request: PlanRequest) -> Changes:
    """Yield the request without its limit on devices."""
    if request.max_devices is not None:
        yield "no --max-devices", replace(request, max_devices=None)


def half_precision(request: PlanRequest) -> Changes:
    """Yield the request in fp16 where that lets more devices of a vendor train together."""
    nodes = request.cluster.nodes
    able = [group.device.supports(request.precision) for group in nodes]
    vendors = {group.device.vendor for group, is_able in zip(nodes, able, strict=True) if is_able}
    joined = [group.device.supports("fp16") and group.device.vendor in vendors for group in nodes]
    if request.precision != "fp16" and sum(joined) > sum(able):
        yield "--dtype fp16, which all of them have", replace(request, precision="fp16")


def fix_of(found: list[str]) -> str | None:
    """Return the changes that fit as advice, None where there are none."""
    return f"It fits with {', or '.join(found)}" if found else None
