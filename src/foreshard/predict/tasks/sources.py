"""Which cost source each kernel's time comes from, and the share of a step that is.

Sources are asked in a fixed order for every kernel: a measured table that covers its size, learned where the
request and the device allow it, else the formula. Collectives have tables and formulas, the host formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from foreshard.catalog.kernels import Tables
from foreshard.cost.attention import whole_causal
from foreshard.cost.tables import COLLECTIVES, tabled
from foreshard.graph.shapes import LayerShape
from foreshard.predict.batch import Batch
from foreshard.predict.machine import Machine
from foreshard.predict.tasks.formula import end_times, head_sizes
from foreshard.predict.tasks.kernels import (
    adapter_times,
    all_products,
    attention_sizes,
    attention_times,
    cast_s,
    elementwise_times,
    expert_sizes,
    expert_times,
    linear_sizes,
    linear_times,
    norm_bytes,
    product_times,
    routing_imbalance,
    wide_products,
)

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
    kernels, fabric = batch.machine.kernels, batch.machine.fabric
    names = (f.name for f in fields(kernels) if f.name.endswith(("_learned", "_table")))
    moved = any(np.count_nonzero(getattr(fabric, name)) for name in _FABRIC_TABLES)
    if not moved and not any(np.count_nonzero(getattr(kernels, name)) for name in names):
        return {"formula": 1.0}
    table, learned = other_shares_of_kernels(batch)
    work = {name: value for name, value in parts.items() if name not in _WAITING}
    computed = sum(work[name] for name in _KERNELS) / sum(work.values())
    shares = {"table": table * computed, "learned": learned * computed}
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
    return np.frompyfunc(lambda table: known.get(id(table), 0.0), 1, 1)(np.asarray(tables, dtype=object))


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
        weight = count * batch.multiplicity
        attention_s, experts_s = sum(attention_times(layer, machine)), sum(expert_times(layer, machine))
        found += _parted(products, _tabled_products(layer, machine), kernels.gemm_learned, weight)
        found += _parted(sum(adapter_times(layer, machine)), 0.0, kernels.gemm16_learned, weight)
        found += _parted(attention_s, _tabled_attention(layer, machine), wide, weight)
        found += _parted(experts_s, _tabled_experts(layer, machine), experts, weight)
        forward, backward, _, _ = elementwise_times(layer, machine)
        streams_s = forward + backward + 2.0 * cast_s(layer, machine)
        streamed = 1.0 * tabled(kernels.stream_table, (norm_bytes(layer, machine),))
        found += _parted(streams_s, streamed, 0.0, weight)
    pipe = batch.pipeline
    ends = end_times(pipe.hidden, pipe.vocab, pipe.head_rows, machine, heads=pipe.heads)
    head = (*head_sizes(pipe.vocab, pipe.head_rows, machine), pipe.hidden)
    of_table = tabled(kernels.gemm16_table, head)
    found += _parted(ends.head_forward + ends.head_backward, of_table, kernels.gemm16_learned, batch.has_head)
    table, learned, _ = found
    return float(table / found.sum()), float(learned / found.sum())


def _parted(seconds: Any, of_table: Any, learned: Any, weight: Any) -> np.ndarray:
    """Return (table, learned, other) seconds of kernels of which `weight` run on each rank."""
    seconds, of_table, which, weight = np.broadcast_arrays(seconds, of_table, np.asarray(learned) > 0, weight)
    total = float((seconds * weight).sum())
    table = float((seconds * weight * of_table).sum())
    mine = float((seconds * weight * (1.0 - of_table) * which).sum())
    return np.array([table, mine, total - table - mine])


def _tabled_products(layer: LayerShape, machine: Machine) -> Any:
    """Return the share of a layer's products, all passes, that comes from tables, from 0 to 1."""
    sizes = linear_sizes(layer, machine)
    products = all_products(sizes)
    seconds = product_times(layer, sizes, machine)
    covered = np.broadcast_to(tabled(machine.kernels.gemm_table, products), seconds.shape).copy()
    for i, flag in wide_products(layer, sizes, machine).items():
        wide = tabled(machine.kernels.gemm16_table, tuple(size[:, i] for size in products))
        covered[:, i] = np.where(flag > 0, wide, covered[:, i])
    whole = seconds.sum((0, 1))
    return np.where(whole > 0, (seconds * covered).sum((0, 1)) / np.where(whole > 0, whole, 1.0), 0.0)


def _tabled_attention(layer: LayerShape, machine: Machine) -> Any:
    """Return the share of a fused attention; its backward counts as long as its work is, 2.5 forwards."""
    kernels, rank = machine.kernels, machine.rank
    covered: Any = 0.0
    # Over cp ranks half of the rounds run like the whole sequence, half like a rank's own tokens.
    for length in (rank.seq_len, rank.seq_len / rank.cp):
        (batch, heads, kv_heads, q_len, kv_len, dim, value_dim), mask = attention_sizes(
            layer, machine, length
        )
        form = whole_causal(q_len, kv_len, dim, value_dim, **mask)
        asked = (batch, heads, kv_heads, np.where(form, q_len, 0.0), dim)
        for table, weight in ((kernels.attn_table, 1.0), (kernels.attn_back_table, 2.5)):
            covered = covered + 0.5 * weight / 3.5 * tabled(table, asked)
    return covered * (np.asarray(machine.traits.flash) > 0)


def _tabled_experts(layer: LayerShape, machine: Machine) -> Any:
    """Return the share of the products of experts, each of the four counted alike."""
    table = machine.kernels.grouped_table
    if not np.count_nonzero(layer.num_experts) or not np.count_nonzero(table):
        return 0.0
    routed, local, wide, width = expert_sizes(layer, machine)
    tokens = routed * routing_imbalance(machine)
    active = np.minimum(local, np.ceil(tokens))
    rows, h = tokens / np.maximum(active, 1.0), layer.expert_hidden
    # The weight gradient counts as the forward.
    sizes = ((wide, h, 2.0), (h, width, 2.0), (h, wide, 1.0), (width, h, 1.0))
    covered = sum(weight / 6.0 * tabled(table, (active, rows, n, k)) for n, k, weight in sizes)
    return covered * (np.asarray(machine.traits.grouped) > 0)
