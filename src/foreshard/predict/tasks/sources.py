"""Which cost source each kernel's time comes from, and the share of a step that is.

Sources are asked in a fixed order for every kernel: a measured table that covers its size, learned where the
request and the device allow it, else the formula. Collectives and the host have formulas only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from foreshard.catalog.kernels import Tables
from foreshard.cost.tables import tabled
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


def source_shares(batch: Batch, parts: Mapping[str, float]) -> dict[str, float]:
    """Return the share of a step's time that each source gave, in the order they are asked; they sum to 1.

    Computation is split by the seconds of its kernels over all stages. Waiting counts as what is waited for
    does: in the proportion of the rest of the step.
    """
    if not _has_others(batch.machine):
        return {"formula": 1.0}
    table, learned = other_shares_of_kernels(batch)
    work = {name: value for name, value in parts.items() if name not in _WAITING}
    kernels = sum(work[name] for name in _KERNELS) / sum(work.values())
    shares = {"table": table * kernels, "learned": learned * kernels}
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
