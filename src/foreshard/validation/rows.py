"""Published training runs as cases: model, cluster, plan, framework, and what was measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from foreshard.catalog.devices import device_assumption, resolve_device
from foreshard.errors import SpecError
from foreshard.spec.cluster import Cluster
from foreshard.spec.framework import Framework
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan
from foreshard.validation.cells import INPUTS, cleaned
from foreshard.validation.facts import number, precision_of, stated, widest
from foreshard.validation.families import Family, families, family_of, framework_of, with_recipe
from foreshard.validation.row_cluster import RowReading, row_cluster
from foreshard.validation.row_model import resolve_row_model
from foreshard.validation.row_plan import device_count, row_plan
from foreshard.validation.scoring import RowOutcome
from foreshard.validation.tables import MeasuredTable


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One published run, ready to be predicted from its inputs alone.

    framework : with the row's own in_* facts applied over the release's capabilities
    measured_s, measured_peak_bytes : None where the source states none
    memory_kind : '' | allocated | reserved | device | unknown
    oom : the run did not fit
    config_key : rows of a family with equal keys are repeats of one configuration
    rank_key : rows with equal keys compete in Kendall's tau and in regret
    assumptions : every blank that was filled, and with what
    remark : why a row that ran states no time, empty else
    """

    id: str
    family: str
    table: str
    quality: str
    raw: Mapping[str, str]
    model: Model
    cluster: Cluster
    plan: Plan
    framework: Framework
    measured_s: float | None
    measured_peak_bytes: float | None
    memory_kind: str
    oom: bool
    config_key: tuple[str, ...]
    rank_key: tuple[str, ...]
    assumptions: tuple[str, ...]
    remark: str = ""

    def measured(self) -> RowOutcome:
        """Return the outcome of this row before anything is predicted: what was measured, and its labels."""
        return RowOutcome(
            id=self.id,
            family=self.family,
            measured_s=self.measured_s,
            measured_peak_bytes=self.measured_peak_bytes,
            config_key=self.config_key,
            rank_key=self.rank_key,
            oom=self.oom,
            reason=self.remark or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row that cannot be predicted, and why."""

    id: str
    family: str
    measured_s: float | None
    reason: str


def measured_step_s(
    raw: Mapping[str, str], convention: str, model: Model | None, seq_len: int, plan: Plan | None = None
) -> float | None:
    """Return the measured step time: printed, else from tokens/s, else from TFLOP/s, else None.

    Parameters
    ----------
    convention : str
        How the source counts FLOPs: ``causal`` (6LHs attention), ``full`` (12LHs), ``hardware`` (full plus a
        second forward when everything is recomputed).
    plan : Plan or None
        Where the row leaves batch or devices blank, those it was read with.
    """
    step = number(raw, "metric_step_time_s")
    if step is not None and step > 0:
        return step
    batch, gpus = number(raw, "global_batch"), number(raw, "gpus")
    if plan is not None:
        batch, gpus = batch or plan.global_batch, gpus or len(plan.ranks)
    if batch is None or gpus is None or not seq_len:
        return None
    tokens = batch * seq_len
    rate = number(raw, "metric_tokens_per_s_per_gpu")
    if rate is not None and rate > 0:
        return tokens / (rate * gpus)
    tflops = number(raw, "metric_tflops_per_gpu")
    if tflops is None or tflops <= 0 or model is None:
        return None
    passes = 4 if convention == "hardware" and raw["act_recompute"].lower().startswith("full") else 3
    work = passes * model.forward_flops_per_token(seq_len, convention == "causal") * tokens
    return work / (tflops * 1e12 * gpus)


def measured_memory(raw: Mapping[str, str], family: Family) -> tuple[float | None, str]:
    """Return the measured peak in bytes and what it counts: '' | allocated | reserved | device | unknown."""
    value = number(raw, "metric_peak_memory_gb")
    if value is None or value <= 0:
        return None, ""
    notes = raw["notes"].lower()
    kind = (
        "allocated" if re.search(r"max allocated|peak allocated|max_memory_allocated", notes) else "unknown"
    )
    if kind == "unknown" and "reserved" in notes and "allocated vs reserved not stated" not in notes:
        kind = "reserved"
    if kind == "unknown":
        kind = family.memory or kind
    unit = 1e9 if "GiB*1.0737" in raw["notes"] else family.gigabyte
    return value * unit, kind


def config_key(raw: Mapping[str, str], family: str, framework: Framework) -> tuple[str, ...]:
    """Return the inputs of a row: columns model to flash_attention and in_*, framework with release."""
    facts = sorted(key for key in raw if key.startswith("in_"))
    release = framework.label
    return (family, *(raw.get(key, "") for key in INPUTS), *(raw[key] for key in facts), release)


def rank_key(raw: Mapping[str, str], family: str) -> tuple[str, ...]:
    """Return what rows must share to be compared by rank: only the plan may differ."""
    return (family, *(raw[key] for key in ("n_layers", "hidden", "gpu", "gpus", "seq_len", "global_batch")))


def read_row(raw: Mapping[str, str], table: str) -> TrainingRow:
    """Return one training row as a case."""
    raw = cleaned(raw)
    name = family_of(raw["id"], raw["source"])
    family = families().get(name, Family())
    device = resolve_device(raw["gpu"])
    row = RowReading(raw=raw, device=device, name=name, family=family)
    guess, model = device_assumption(raw["gpu"]), resolve_row_model(raw)
    row.note(*([guess] if guess else ()), *model.assumptions)
    dtype = raw["dtype"]
    if not dtype:
        dtype = family.dtype if device.supports(family.dtype) else widest(device)
        why = family.dtype_why if dtype == family.dtype else f"{device.name} has no {family.dtype}"
        row.note(f"dtype not stated: {dtype}, {why}")
    precision, more = precision_of(dtype, device)
    release, also = framework_of(name, raw, precision)
    recipe, set_there = with_recipe(family, release, raw)
    row.note(*more, *also, *set_there)
    if "muon" in raw["notes"].lower():
        row.note("Muon optimizer read as AdamW")
    cluster = row_cluster(row, device_count(raw))
    plan, framework = row_plan(row, model, stated(recipe, raw), precision)
    peak, kind = measured_memory(raw, family)
    oom = raw["notes"].startswith("OOM:")
    return TrainingRow(
        id=raw["id"],
        family=name,
        table=table,
        quality=raw["quality"],
        raw=raw,
        model=model,
        cluster=cluster,
        plan=plan,
        framework=framework,
        measured_s=None if oom else measured_step_s(raw, family.flops, model, plan.seq_len, plan),
        measured_peak_bytes=None if oom else peak,
        memory_kind="" if oom else kind,
        oom=oom,
        config_key=config_key(raw, name, release),
        rank_key=rank_key(raw, name),
        assumptions=tuple(row.lines),
    )


def table_rows(table: MeasuredTable) -> tuple[list[TrainingRow], list[Skipped]]:
    """Return the cases of one training table, and the rows that are none."""
    rows, skipped = [], []
    for row_id, cells in zip(table.ids, table.rows, strict=True):
        try:
            rows.append(read_row({**cells, "id": row_id}, table.stem))
        except SpecError as error:
            raw = cleaned(cells)
            name = family_of(row_id, raw["source"])
            try:
                family = families().get(name, Family())
                measured = measured_step_s(
                    raw, family.flops, None, int(number(raw, "seq_len") or family.seq_len)
                )
            except SpecError:
                measured = None
            if raw["notes"].startswith("OOM:"):
                measured = None
            skipped.append(Skipped(id=row_id, family=name, measured_s=measured, reason=str(error)))
    return rows, skipped
