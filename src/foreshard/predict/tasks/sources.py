"""Which cost source each kernel's time comes from, and the share of a step that is.

Sources are asked in a fixed order for every kernel: a measured table that covers its size, learned where the
request and the device allow it, else the formula. Collectives have tables and formulas, the host formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from foreshard.catalog.kernels import Tables
from foreshard.cost.tables import COLLECTIVES, tabled
from foreshard.predict.batch import Batch
from foreshard.predict.machine import Machine
from foreshard.predict.tasks.formula import end_times, head_sizes
from foreshard.predict.tasks.kernels import (
    adapter_times,
    attention_times,
    expert_times,
    linear_times,
)
from foreshard.predict.tasks.tabled_shares import tabled_shares

ORDER = ("table", "learned", "formula")
"""Sources of kernel times, the first asked first."""
_KERNELS = ("compute", "recompute")
_WAITING = ("bubble", "straggler")
_COLLECTIVES = ("tensor_comm", "context_comm", "expert_comm", "data_comm")
_FABRIC_TABLES = tuple(f"{name}_table" for name in COLLECTIVES)
_LONGER = 1e-3


def source_shares(batch: Batch, parts: Mapping[str, float]) -> dict[str, float]:
    """Return the share of a step's time that each source gave, in the order they are asked; they sum to 1.

    Computation is split by the seconds of its kernels over all stages. Waiting counts as what is waited for
    does: in the proportion of the rest of the step.
    """
    moved = _has_tabled_collectives(batch.machine)
    if not _has_others(batch.machine) and not moved:
        return {"formula": 1.0}
    table, learned = other_shares_of_kernels(batch)
    work = {name: value for name, value in parts.items() if name not in _WAITING}
    kernels = sum(work[name] for name in _KERNELS) / sum(work.values())
    shares = {"table": table * kernels, "learned": learned * kernels}
    if moved:
        of_table = tabled_collectives(batch)
        shares["table"] += sum(work[name] * share for name, share in of_table.items()) / sum(work.values())
    shares = {name: share for name, share in shares.items() if share}
    return shares | {"formula": 1.0 - sum(shares.values())}


def sources_text(shares: Mapping[str, float], asked: str | Tables) -> str:
    """Return which share of a step each source gave, and why, in one sentence."""
    parts = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    order = {
        "formula": "formula",
        "learned": "learned where better on devices left out and the device is like those trained on, "
        "else formula",
        "auto": "learned on devices that the formula was never fitted on, where better on devices left out "
        "and the device is like those trained on, else formula",
    }
    known = order[asked] if isinstance(asked, str) else f"table within its sizes, else {order['auto']}"
    return f"{parts} of the step; asked in the order: {known} (docs/cost_sources.md)"


def _has_others(machine: Machine) -> bool:
    kernels = machine.kernels
    flags = (kernels.gemm_learned, kernels.gemm16_learned, kernels.attn_learned, kernels.grouped_learned)
    products = (kernels.gemm_table, kernels.gemm16_table, kernels.grouped_table)
    others = (kernels.attn_table, kernels.attn_back_table, kernels.stream_table)
    return any(np.count_nonzero(flag) for flag in (*flags, *products, *others))


def _has_tabled_collectives(machine: Machine) -> bool:
    return any(np.count_nonzero(getattr(machine.fabric, name)) for name in _FABRIC_TABLES)


def tabled_collectives(batch: Batch) -> dict[str, float]:
    """Return the share of each part that is exposed collectives that tables gave, from 0 to 1.

    By how much the part grows when all times of the tables do.
    """
    from foreshard.predict.analytical.engine import slowest_parts, step_times

    machine = batch.machine
    fabric, sync, link = (
        replace(one, **{table: _slower(getattr(one, table)) for table in _FABRIC_TABLES})
        for one in (machine.fabric, machine.sync, machine.link)
    )
    longer = replace(batch, machine=replace(machine, fabric=fabric, sync=sync, link=link))
    before, after = (slowest_parts(step_times(one, joined=True)) for one in (batch, longer))
    shares = {
        name: (after[name] / before[name] - 1.0) / _LONGER for name in _COLLECTIVES if before[name] > 0.0
    }
    return {name: min(max(share, 0.0), 1.0) for name, share in shares.items()}


def _slower(tables: Any) -> Any:
    """Return tables, or an array of them and of 0, with longer times."""
    known = {id(table): table.slower(1.0 + _LONGER) for table in np.asarray(tables, object).ravel() if table}
    made = np.frompyfunc(lambda table: known.get(id(table), 0.0), 1, 1)(np.asarray(tables, dtype=object))
    return made


def other_shares_of_kernels(batch: Batch) -> tuple[float, float]:
    """Return the shares of the seconds of kernels, all passes, that tables and that learned costs gave."""
    machine, kernels = batch.machine, batch.machine.kernels
    found = np.zeros(3)
    flash = np.asarray(machine.traits.flash) > 0
    is_grouped = np.asarray(machine.traits.grouped) > 0
    for layer, count in zip(batch.kinds, batch.counts, strict=True):
        linear = linear_times(layer, machine)
        products = linear.forward + linear.input_gradient + linear.weight_gradient
        wide = np.where(flash, kernels.attn_learned, kernels.gemm16_learned)
        experts = np.where(is_grouped, kernels.grouped_learned, kernels.gemm_learned)
        weight, tabled_parts = count * batch.multiplicity, tabled_shares(layer, machine)
        found += _parted(products, tabled_parts.products, kernels.gemm_learned, weight)
        found += _parted(sum(adapter_times(layer, machine)), 0.0, kernels.gemm16_learned, weight)
        found += _parted(sum(attention_times(layer, machine)), tabled_parts.attention, wide, weight)
        found += _parted(sum(expert_times(layer, machine)), tabled_parts.experts, experts, weight)
        found += _parted(_streams_s(layer, machine), tabled_parts.streams, 0.0, weight)
    pipe = batch.pipeline
    ends = end_times(pipe.hidden, pipe.vocab, pipe.head_rows, machine, heads=pipe.heads)
    head = (*head_sizes(pipe.vocab, pipe.head_rows, machine), pipe.hidden)
    of_table = tabled(kernels.gemm16_table, head)
    found += _parted(ends.head_forward + ends.head_backward, of_table, kernels.gemm16_learned, batch.has_head)
    table, learned, _ = found
    return float(table / found.sum()), float(learned / found.sum())


def _streams_s(layer: Any, machine: Machine) -> Any:
    from foreshard.predict.tasks.kernels import cast_s, elementwise_times

    forward, backward, _, _ = elementwise_times(layer, machine)
    return forward + backward + 2.0 * cast_s(layer, machine)


def _parted(seconds: Any, of_table: Any, learned: Any, weight: Any) -> np.ndarray:
    """Return (table, learned, other) seconds of kernels of which `weight` run on each rank."""
    seconds, of_table, which, weight = np.broadcast_arrays(seconds, of_table, np.asarray(learned) > 0, weight)
    total = float((seconds * weight).sum())
    table = float((seconds * weight * of_table).sum())
    mine = float((seconds * weight * (1.0 - of_table) * which).sum())
    return np.array([table, mine, total - table - mine])
