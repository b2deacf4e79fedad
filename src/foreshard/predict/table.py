"""Many plans of one model on one cluster, as columns: no Plan object, no loop over plans.

A plan from degree flags has few distinct stages, so they follow from arithmetic on the degrees. The result
is what `build_batch` and `plan_memory` find for the same plans one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshard.catalog.kernels import kernel_model
from foreshard.catalog.training import TrainingConstants
from foreshard.comm.fabric import Fabric, fabric_of
from foreshard.cost.kernels import KernelModel
from foreshard.cost.memory import MemoryParts, StageLoad, optimizer_state_bytes, stage_memory
from foreshard.cost.memory_activations import Recompute, recompute_of
from foreshard.errors import SpecError
from foreshard.graph.shapes import LayerShape, RankShape, layer_shape
from foreshard.predict.analytical import step_times
from foreshard.predict.batch import Batch, Pipeline
from foreshard.predict.formula import Machine
from foreshard.predict.stage_rows import StageRows, stage_rows_of
from foreshard.predict.traits import traits_of
from foreshard.spec.checks import MODELLED_SCHEDULES
from foreshard.spec.cluster import Cluster, NodeGroup
from foreshard.spec.framework import Framework
from foreshard.spec.layout import plan_from_degrees
from foreshard.spec.model import Block, Model
from foreshard.spec.plan import Plan

OFFLOADS = ("none", "optimizer", "activations", "all")
_GPIPE, _ZERO_BUBBLE = MODELLED_SCHEDULES.index("gpipe"), MODELLED_SCHEDULES.index("zb-h1")
_WIDE = ("fp32", "tf32")

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable:
    """Degrees and options of plans, one integer column each, shape (plans,).

    micro_batch : samples per data-parallel rank and micro-batch
    num_micro_batches : of a step; the global batch is micro_batch * num_micro_batches * dp
    shard : ranks that share one copy of sharded states, 0 for all data-parallel ranks
    recompute : index into `rules`; schedule : into `spec.checks.MODELLED_SCHEDULES`; offload : into `OFFLOADS`
    """

    dp: Column
    tp: Column
    pp: Column
    cp: Column
    ep: Column
    etp: Column
    vpp: Column
    micro_batch: Column
    num_micro_batches: Column
    zero: Column
    shard: Column
    sp: Column
    recompute: Column
    schedule: Column
    offload: Column
    rules: tuple[str, ...] = ("none",)

    @staticmethod
    def from_columns(columns: Mapping[str, Any], rules: tuple[str, ...] = ("none",)) -> PlanTable:
        """Return a table; degrees and sizes left out are 1, options left out are off, `schedule` 1f1b."""
        size = max(np.size(values) for values in columns.values())
        start = dict.fromkeys(COLUMNS, 1) | dict.fromkeys(("shard", "sp", "recompute", "offload"), 0)
        start["schedule"] = MODELLED_SCHEDULES.index("1f1b")
        whole = {
            name: np.broadcast_to(np.asarray(value, dtype=np.int64), (size,))
            for name, value in (start | dict(columns)).items()
        }
        return PlanTable(**whole, rules=tuple(rules))

    def __len__(self) -> int:
        return len(self.dp)

    @property
    def global_batch(self) -> Column:
        """Samples of a step."""
        return self.micro_batch * self.num_micro_batches * self.dp

    def take(self, index: Any) -> PlanTable:
        """Return the plans at `index` (slice, mask or integers)."""
        return PlanTable(**{name: getattr(self, name)[index] for name in COLUMNS}, rules=self.rules)

    def plan(self, index: int, model: Model, *, seq_len: int, **options: Any) -> Plan:
        """Return one plan as an object; `options` are precision, optimizer and framework."""
        row = {name: int(getattr(self, name)[index]) for name in COLUMNS}
        degrees = {name: row[name] for name in ("dp", "tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch", "zero")}
        return plan_from_degrees(
            model.num_layers,
            row["dp"] * row["tp"] * row["pp"] * row["cp"],
            **degrees,
            global_batch=int(self.global_batch[index]),
            seq_len=seq_len,
            sp=bool(row["sp"]),
            shard_size=row["shard"] or None,
            recompute=self.rules[row["recompute"]],
            schedule=MODELLED_SCHEDULES[row["schedule"]],
            offload=OFFLOADS[row["offload"]],
            **options,
        )


COLUMNS = tuple(f.name for f in fields(PlanTable) if f.name != "rules")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMemory:
    """Peak bytes of the fullest rank of each plan, and whether that is within capacity, shape (plans,)."""

    peak_bytes: np.ndarray
    fits: np.ndarray
    capacity_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TableResult:
    """Step seconds, their parts (which sum to them) and peak bytes of each plan, shape (plans,)."""

    step_time_s: np.ndarray
    parts: dict[str, np.ndarray]
    peak_bytes: np.ndarray
    fits: np.ndarray


def evaluate(
    model: Model,
    cluster: Cluster,
    table: PlanTable,
    *,
    framework: Framework,
    constants: TrainingConstants,
    seq_len: int,
    precision: str = "bf16",
    optimizer: str = "adamw",
    fidelity: str = "zero-shot",
    comm: Mapping[str, bool] | None = None,
) -> TableResult:
    """Return time and memory of every plan of a table.

    Parameters
    ----------
    model : Model
    cluster : Cluster
        Equal nodes.
    table : PlanTable
        Valid plans: the rules of `spec.checks` are not checked again here.
    framework, constants, seq_len, precision, optimizer, fidelity, comm
        As in :func:`foreshard.predict.step.predict_timeline` and a Plan; the same for every plan.

    Returns
    -------
    TableResult

    Raises
    ------
    SpecError
        When the nodes of the cluster differ.
    """
    rows = stage_rows_of(model, table.pp, table.vpp)
    rule = recompute_columns(table, rows)
    batch = table_batch(
        model, cluster, table, framework, constants, precision=precision, seq_len=seq_len, optimizer=optimizer,
        fidelity=fidelity, comm=comm, rows=rows, rule=rule,
    )  # fmt: skip
    step = step_times(batch)
    memory = table_memory(
        model, cluster, table, framework, precision=precision, seq_len=seq_len, optimizer=optimizer,
        rows=rows, rule=rule,
    )  # fmt: skip
    return TableResult(step_time_s=step.total, parts=step.parts, peak_bytes=memory.peak_bytes, fits=memory.fits)


def equal_nodes(cluster: Cluster) -> NodeGroup:
    """Return the node group that describes every node, or raise SpecError."""
    if len(cluster.nodes) > 1:
        raise SpecError(
            f"{cluster.name} has {len(cluster.nodes)} kinds of nodes", key="cluster", value=cluster.name,
            rule="a table of plans is priced on equal nodes", fix="price such plans one by one",
        )  # fmt: skip
    return cluster.nodes[0]


def _real(values: Column) -> np.ndarray:
    return values[None].astype(np.float64)


def table_batch(
    model: Model,
    cluster: Cluster,
    table: PlanTable,
    framework: Framework,
    constants: TrainingConstants,
    *,
    precision: str,
    seq_len: int,
    optimizer: str = "adamw",
    fidelity: str = "zero-shot",
    comm: Mapping[str, bool] | None = None,
    rows: StageRows | None = None,
    rule: Recompute | None = None,
) -> Batch:
    """Return the arrays of all plans; axis 0 is their distinct stages, axis 1 the plans.

    What one model, device or framework fixes is a float; what stages of a plan share has length 1 on axis 0.
    """
    node = equal_nodes(cluster)
    rows = rows or stage_rows_of(model, table.pp, table.vpp)
    kernels, fabric = _device_numbers(node, framework, precision, fidelity)
    machine = Machine(
        kernels=kernels,
        fabric=fabric,
        traits=traits_of(framework, node.device, optimizer=optimizer, comm=comm, precision=precision),
        rank=_rank(table, precision, seq_len),
        constants=constants,
    )
    return Batch(
        kinds=tuple(_shape(block) for block in rows.blocks),
        counts=rows.counts,
        machine=machine,
        recompute=rule or recompute_columns(table, rows),
        has_embedding=rows.has_embedding,
        has_head=rows.has_head,
        multiplicity=rows.multiplicity,
        pipeline=_pipeline(model, node, table),
        plan_index=np.arange(len(table)),
    )


@lru_cache(maxsize=64)
def _device_numbers(
    node: NodeGroup, framework: Framework, precision: str, fidelity: str
) -> tuple[KernelModel, Fabric]:
    attention = framework.attention if framework.attention != "unfused" else "fa2"
    nccl = "old" if framework.nccl == "old" else "2.2x"
    kernels = kernel_model(node.device, precision, attention=attention, fidelity=fidelity)
    return kernels, fabric_of(node, nccl=nccl, fidelity=fidelity)


@lru_cache(maxsize=64)
def _shape(block: Block) -> LayerShape:
    shape = layer_shape(block)
    return LayerShape(**{f.name: float(getattr(shape, f.name)) for f in fields(LayerShape)})


def _rank(table: PlanTable, precision: str, seq_len: int) -> RankShape:
    low, four = precision in ("fp8", "mxfp8", "nvfp4"), precision == "nvfp4"
    tp, dp, cp = _real(table.tp), _real(table.dp), _real(table.cp)
    return RankShape(
        tp=tp,
        cp=cp,
        ep=_real(table.ep),
        etp=_real(table.etp),
        dp=dp,
        sp=(table.sp * (tp > 1)) * 1.0,
        zero=_real(table.zero),
        shard=_shard(table)[None],
        micro_batch=_real(table.micro_batch),
        seq_len=float(seq_len),
        low=float(low),
        four_bit=float(four),
        matrix_bytes=0.5 if four else 1.0 if low else 4.0 if precision in _WIDE else 2.0,
        sync_stride=tp,
    )


def _shard(table: PlanTable) -> np.ndarray:
    replicas = table.dp * table.cp
    return np.where(table.shard > 0, np.minimum(table.shard, replicas), replicas).astype(np.float64)


def _pipeline(model: Model, node: NodeGroup, table: PlanTable) -> Pipeline:
    def one(value: float) -> np.ndarray:
        return np.array([[float(value)]])

    width = table.tp * table.cp * table.dp
    return Pipeline(
        num_micro_batches=_real(table.num_micro_batches),
        num_stages=_real(table.pp),
        num_chunks=_real(table.vpp),
        gpipe=(table.schedule[None] == _GPIPE) * 1.0,
        zero_bubble=(table.schedule[None] == _ZERO_BUBBLE) * 1.0,
        crosses_node=((table.pp > 1) & (width >= node.per_node))[None] * 1.0,
        num_devices=_real(width * table.pp),
        hidden=one(model.hidden),
        vocab=one(model.vocab),
        head_rows=one(model.head_rows),
        head_frozen=one(model.head_frozen),
        heads=one(1.0 + model.num_next_token * (1.0 + 2.0 * model.hidden / max(1, model.vocab))),
        tied=one(model.tied_embeddings),
        num_layers=one(model.num_layers),
    )


def recompute_columns(table: PlanTable, rows: StageRows) -> Recompute:
    """Return the recompute rules of the plans as numbers, one row where no stage differs.

    As `recompute_of` of each plan's rule, whose `block`, `uniform` and `every` count the blocks of a chunk.
    """
    values, counting = _rule_values(table.rules)
    columns = {name: value if isinstance(value, float) else value[table.recompute][None] for name, value in values}
    if counting:
        layers = np.maximum(np.rint(sum(rows.counts) / table.vpp), 1.0)
        for i, text in counting:
            here = table.recompute == i
            name, value = _counted(text, layers)
            columns[name] = np.where(here, value, columns[name])
    return Recompute(**columns)


@lru_cache(maxsize=64)
def _rule_values(rules: tuple[str, ...]) -> tuple[list[tuple[str, Any]], list[tuple[int, str]]]:
    """Return each number of the rules, one value where they agree, and the rules that count blocks."""
    fixed = [recompute_of(text, 1) for text in rules]
    columns = {name: [float(getattr(rule, name)) for rule in fixed] for name in Recompute.__slots__}
    values = [(name, np.array(column) if len(set(column)) > 1 else column[0]) for name, column in columns.items()]
    return values, [(i, text) for i, text in enumerate(rules) if text.startswith("every-") or text.count(":") == 2]


def _counted(text: str, layers: np.ndarray) -> tuple[str, np.ndarray]:
    """Return which number of a rule depends on the blocks of a chunk, and its value."""
    if text.startswith("every-"):
        return "full", (layers // int(text[6:])) / layers
    count = float(text.rpartition(":")[2])
    if text.startswith("full:block:"):
        return "full", np.minimum(count, layers) / layers
    return "unit", np.minimum(count, layers)


def table_memory(
    model: Model,
    cluster: Cluster,
    table: PlanTable,
    framework: Framework,
    *,
    precision: str,
    seq_len: int,
    optimizer: str = "adamw",
    rows: StageRows | None = None,
    rule: Recompute | None = None,
) -> TableMemory:
    """Return the peak bytes of the fullest rank of each plan."""
    rows = rows or stage_rows_of(model, table.pp, table.vpp)
    parts = table_memory_parts(
        model, table, framework, precision=precision, seq_len=seq_len, optimizer=optimizer, rows=rows, rule=rule
    )
    peak = np.where(rows.multiplicity > 0, parts.peak, 0.0).max(0)
    capacity = equal_nodes(cluster).device.capacity_bytes
    return TableMemory(peak_bytes=peak, fits=peak <= capacity, capacity_bytes=float(capacity))


def table_memory_parts(
    model: Model,
    table: PlanTable,
    framework: Framework,
    *,
    precision: str,
    seq_len: int,
    optimizer: str = "adamw",
    rows: StageRows,
    rule: Recompute | None = None,
) -> MemoryParts:
    """Return the bytes of a rank of each distinct stage, of the first such stage of the pipeline."""
    tp, cp, dp = _real(table.tp), _real(table.cp), _real(table.dp)
    ep, etp = _real(table.ep), _real(table.etp)
    unit = framework.vocab_multiple * tp
    offload = table.offload[None]
    load = StageLoad(
        kinds=tuple(zip(rows.blocks, rows.counts, strict=True)),
        has_embedding=rows.has_embedding,
        has_head=rows.has_head,
        hidden=model.hidden,
        vocab=np.ceil(model.vocab / unit) * unit,
        tied=float(model.tied_embeddings),
        in_flight=_in_flight(table, rows.first_stage),
        num_micro_batches=_real(table.num_micro_batches),
        micro_batch=_real(table.micro_batch),
        seq_len=float(seq_len),
        tp=tp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp * cp,
        expert_dp=np.maximum(1.0, dp * cp * tp / (ep * etp)),
        shard_size=_shard(table)[None],
        zero=_real(table.zero),
        sp=(table.sp * (tp > 1)) * 1.0,
        activation_bytes_per_element=4.0 if precision in _WIDE else 2.0,
        fp8=float(precision in ("fp8", "mxfp8")),
        fp4=float(precision == "nvfp4"),
        recompute=rule or recompute_columns(table, rows),
        offload_optimizer=(offload & 1) * 1.0 if np.count_nonzero(offload) else 0.0,
        offload_activations=(offload >= 2) * 1.0 if np.count_nonzero(offload) else 0.0,
        state_bytes=optimizer_state_bytes(optimizer, framework.moment_bytes),
        outer_params=float(model.learned_positions * model.hidden),
        embedding_trainable=float(not model.embedding_frozen),
        head_trainable=float(not model.head_frozen),
    )
    return stage_memory(load, framework)


def _in_flight(table: PlanTable, stage: np.ndarray) -> np.ndarray:
    """Return the micro-batches whose activations a stage holds, as `predict.memory.in_flight` does."""
    p, m, v = (column.astype(np.float64) for column in (table.pp, table.num_micro_batches, table.vpp))
    behind = p - stage
    chunks = np.where((v > 1.0) & (p > 1.0), 2.0 * behind - 1.0 + (v - 1.0) * p, behind * v)
    return np.where(table.schedule == _GPIPE, m, np.minimum(m * v, chunks) / v)
