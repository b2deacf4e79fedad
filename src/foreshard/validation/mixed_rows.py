"""Published runs on mixed clusters as cases: Sailor's full plans and AMP's trials.

Both print stages and their layers; what they leave unsaid is in ``data/mixed_runs.toml`` and listed in every
row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.devices import resolve_device
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.instances import usual_node_size
from foreshard.catalog.models import load_model
from foreshard.catalog.shipped import shipped
from foreshard.errors import SpecError
from foreshard.spec.cluster import Cluster
from foreshard.spec.framework import Overrides
from foreshard.spec.model import Model
from foreshard.spec.plan import Group, Plan, Stage
from foreshard.validation.collective_cases import NOT_MODELLED
from foreshard.validation.facts import integer
from foreshard.validation.row_model import resolve_row_model
from foreshard.validation.rows import Skipped, TrainingRow, table_rows
from foreshard.validation.tables import TRAINING, MeasuredTable

_AMP_ENTRIES_BEFORE = 3  # cast, embedding, transpose
_AMP_ENTRIES_AFTER = 3  # transpose back, norm, head


def _layouts() -> Mapping[str, Any]:
    layouts: Mapping[str, Any] = shipped("mixed_runs.toml", "foreshard.validation")
    return layouts


def _joined(shorthands: Sequence[str], name: str) -> Cluster:
    """Return one cluster of several shorthands, each with its own NIC rate."""
    clusters = [load_cluster(text) for text in shorthands]
    nodes = tuple(group for cluster in clusters for group in cluster.nodes)
    notes = tuple(dict.fromkeys(line for cluster in clusters for line in cluster.assumptions))
    return Cluster(name=name, nodes=nodes, assumptions=notes)


def _stages(
    spans: Sequence[tuple[int, int]], widths: Sequence[int], tps: Sequence[int], recompute: str
) -> tuple[Stage, ...]:
    """Return stages on consecutive ranks, replicated inside."""
    stages, first = [], 0
    for span, width, tp in zip(spans, widths, tps, strict=True):
        ranks = tuple(range(first, first + width))
        stages.append(Stage(ranks=ranks, layers=(span,), tp=tp, zero=0, recompute=recompute))
        first += width
    return tuple(stages)


def _sailor_parts(raw: Mapping[str, str], model: Model) -> tuple[Cluster, tuple[Stage, ...]]:
    mix = re.findall(r"(\d+)[xX]([A-Za-z0-9-]+)", raw["gpu_mix"])
    if not mix:
        raise SpecError("no devices are stated", key="gpu_mix", value=raw["gpu_mix"])
    parts = []
    for count, gpu in mix:
        device = resolve_device(gpu)
        per_node = min(int(count), usual_node_size(device))
        parts.append(f"{int(count) // per_node}x{per_node}x{device.name}")
    dp, tp, layers = (json.loads(raw[key])[0] for key in ("dp_per_stage", "tp_per_stage", "layers_per_stage"))
    if sum(layers) != model.num_layers + 2:
        what = f"{sum(layers)} layers are cut, the model has {model.num_layers} and two ends"
        raise SpecError(what, key="layers_per_stage", value=raw["layers_per_stage"])
    starts = [sum(layers[:i]) for i in range(len(layers) + 1)]
    spans = list(pairwise(starts))
    degrees = [max(replicas) for replicas in tp]
    widths = [replicas * degree for replicas, degree in zip(dp, degrees, strict=True)]
    return _joined(parts, raw["gpu_mix"]), _stages(spans, widths, degrees, "none")


def _sailor(raw: Mapping[str, str]) -> tuple[Model, Cluster, Plan]:
    model = load_model(raw["model"])
    cluster, stages = _sailor_parts(raw, model)
    batch, micro = integer(raw, "global_batch") or 0, integer(raw, "micro_batch") or 1
    group = Group(share=batch, stages=stages, micro_batch=micro * stages[0].inner_dp, sp=False)
    precision = "tf32" if all(device.supports("tf32") for device in cluster.devices) else "fp32"
    plan = _plan(batch, 2048, group, precision, "megatron-deepspeed@sailor")
    return model, cluster, plan


def _plan(batch: int, seq_len: int, group: Group, precision: str, label: str) -> Plan:
    return Plan(global_batch=batch, seq_len=seq_len, precision=precision, framework=label, groups=(group,))


def _amp_model(raw: Mapping[str, str]) -> tuple[Model, int]:
    found = re.fullmatch(r"gpt2 (\d+)L h(\d+) s(\d+) v(\d+)", raw["model"])
    if found is None:
        raise SpecError(NOT_MODELLED, key="model", value=raw["model"])
    layers, hidden, seq_len, vocab = (int(part) for part in found.groups())
    cells: dict[str, Any] = dict.fromkeys(("n_experts", "topk", "notes", "in_other", "source"), "")
    cells |= {"model": "GPT", "n_layers": str(layers), "hidden": str(hidden), "ffn_hidden": str(4 * hidden)}
    heads = str(hidden // 64)
    cells |= {"n_heads": heads, "n_kv_heads": heads, "vocab": str(vocab), "seq_len": str(seq_len)}
    return resolve_row_model(cells | {"gated_mlp": "False"}), seq_len


def _amp(raw: Mapping[str, str]) -> tuple[Model, Cluster, Plan]:
    model, seq_len = _amp_model(raw)
    clusters = _layouts()["amp-trials"]["clusters"]
    if raw["experiment"] not in clusters:
        raise SpecError(NOT_MODELLED, key="experiment", value=raw["experiment"])
    cluster = _joined(clusters[raw["experiment"]], raw["experiment"])
    tp, dp, pp = (integer(raw, key) or 1 for key in ("tp", "dp", "pp"))
    cuts = json.loads(raw["partition"])
    last = model.num_layers + _AMP_ENTRIES_BEFORE + _AMP_ENTRIES_AFTER
    if len(cuts) != pp + 1 or cuts[-1] != last:
        raise SpecError("the partition does not cut the model", key="partition", value=raw["partition"])
    # Entry e holds layer e - 2 (blocks are 1..L); the embedding is layer 0 and the head L + 1.
    edges = [min(max(cut - 2, 0), model.num_layers + 1) for cut in cuts]
    edges[-1] = model.num_layers + 2
    spans = list(pairwise(edges))
    if any(start >= stop for start, stop in spans):
        raise SpecError("a stage without layers is not modelled", key="partition", value=raw["partition"])
    batch, micro = integer(raw, "global_batch") or 0, integer(raw, "micro_batch") or 1
    stages = _stages(spans, [tp * dp] * pp, [tp] * pp, "none")
    group = Group(share=batch, stages=stages, micro_batch=micro * dp, sp=False)
    plan = _plan(batch, seq_len, group, "fp16", "megatron-deepspeed@2020")
    return model, cluster, replace(plan, collectives="ring", overrides=Overrides(grad_reduce_bytes=4))


_READERS = {"sailor-runs": _sailor, "amp-trials": _amp}


def _case(table: MeasuredTable, index: int) -> TrainingRow:
    raw = table.rows[index]
    layout = _layouts()[table.layout]
    column = layout["time"]
    measured = float(raw[column]) if raw[column] else None
    failed = measured == float("inf")
    model, cluster, plan = _READERS[table.layout](raw)
    if not plan.ranks or min(plan.global_batch, *(len(stage.ranks) for stage in plan.groups[0].stages)) < 1:
        raise SpecError("a plan without devices or samples", key=column, value=raw[column])
    peak = raw.get("measured_max_mem_bytes", "")
    inputs = tuple(value for key, value in raw.items() if not key.startswith(("measured", "predicted")))
    return TrainingRow(
        id=table.ids[index],
        family=table.families[index],
        table=table.stem,
        quality="B",
        raw=raw,
        model=model,
        cluster=cluster,
        plan=plan,
        framework=load_framework(plan.framework),
        measured_s=None if failed else measured,
        measured_peak_bytes=float(peak) if peak else None,
        memory_kind=layout.get("memory", "unknown") if peak else "",
        oom=False,
        config_key=(table.stem, *inputs),
        rank_key=(table.families[index], *(raw[key] for key in layout["compared"])),
        assumptions=(*layout["notes"], *cluster.assumptions, *model.assumptions),
        remark="failed trial, cause unknown" if failed else "",
    )


def training_rows(table: MeasuredTable) -> tuple[list[TrainingRow], list[Skipped]]:
    """Return the cases of a table of training runs, on mixed clusters too, and the rows that are none."""
    return table_rows(table) if table.kind == TRAINING else mixed_rows(table)


def mixed_rows(table: MeasuredTable) -> tuple[list[TrainingRow], list[Skipped]]:
    """Return the cases of a table of runs on mixed clusters, and the rows that are none.

    A trial that failed for an unknown cause states no time and labels no memory; its remark says so.
    """
    rows, skipped = [], []
    for index, (row_id, family, raw) in enumerate(zip(table.ids, table.families, table.rows, strict=True)):
        measured, reason = None, NOT_MODELLED
        if table.layout in _READERS:
            try:
                rows.append(_case(table, index))
                continue
            except (SpecError, ValueError, KeyError, IndexError, TypeError) as error:
                stated = raw[_layouts()[table.layout]["time"]]
                measured = float(stated) if re.fullmatch(r"[0-9.]+(?:e[+-]?\d+)?", stated) else None
                reason = error.what if isinstance(error, SpecError) else f"a cell does not parse: {error}"
        skipped.append(Skipped(id=row_id, family=family, measured_s=measured, reason=reason))
    return rows, skipped
