"""Many plans of one model on one cluster, as columns: no Plan object, no loop over plans.

A plan from degree flags has few distinct stages, so they follow from arithmetic on the degrees. The result
is what `build_batch` and `plan_memory` find for the same plans one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from foreshard.catalog.kernels import kernel_model
from foreshard.catalog.training import TrainingConstants
from foreshard.comm.fabric import Fabric, fabric_of
from foreshard.cost.kernels import KernelModel
from foreshard.cost.memory import StageLoad, optimizer_state_bytes, stage_peak_bytes
from foreshard.cost.memory_activations import Recompute
from foreshard.errors import SpecError
from foreshard.graph.shapes import LayerShape, RankShape, layer_shape
from foreshard.predict.analytical.engine import step_times
from foreshard.predict.batch import Batch, Pipeline
from foreshard.predict.machine import Machine
from foreshard.predict.memory import nccl_channels
from foreshard.predict.plan_table import Column, PlanTable
from foreshard.predict.stage_rows import StageRows, recompute_columns, stage_rows_of
from foreshard.predict.traits import traits_of
from foreshard.spec.checks import MODELLED_SCHEDULES
from foreshard.spec.cluster import Cluster, NodeGroup
from foreshard.spec.framework import Framework
from foreshard.spec.model import Block, Model

_GPIPE, _ZERO_BUBBLE = MODELLED_SCHEDULES.index("gpipe"), MODELLED_SCHEDULES.index("zb-h1")
_WIDE = ("fp32", "tf32")


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
    rule = _rule(table, rows)
    batch = table_batch(
        model,
        cluster,
        table,
        framework,
        constants,
        precision=precision,
        seq_len=seq_len,
        optimizer=optimizer,
        fidelity=fidelity,
        comm=comm,
        rows=rows,
        rule=rule,
    )
    step = step_times(batch)
    memory = table_memory(
        model,
        cluster,
        table,
        framework,
        precision=precision,
        seq_len=seq_len,
        optimizer=optimizer,
        rows=rows,
        rule=rule,
    )
    return TableResult(
        step_time_s=step.total, parts=step.parts, peak_bytes=memory.peak_bytes, fits=memory.fits
    )


def equal_nodes(cluster: Cluster) -> NodeGroup:
    """Return the node group that describes every node, or raise SpecError."""
    if len(cluster.nodes) > 1:
        raise SpecError(
            f"{cluster.name} has {len(cluster.nodes)} kinds of nodes",
            key="cluster",
            value=cluster.name,
            rule="A table of plans is priced on equal nodes",
            fix="Price such plans one by one",
        )
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
    over = cluster.network.oversubscription
    kernels, fabric = _device_numbers(node, framework, precision, fidelity, over)
    machine = Machine(
        kernels=kernels,
        fabric=fabric,
        sync=fabric,
        link=fabric,
        traits=traits_of(framework, node.device, optimizer=optimizer, comm=comm, precision=precision),
        rank=_rank(table, precision, seq_len),
        constants=constants,
    )
    return Batch(
        kinds=tuple(_shape(block) for block in rows.blocks),
        counts=rows.counts,
        machine=machine,
        recompute=rule or _rule(table, rows),
        has_embedding=rows.has_embedding,
        has_head=rows.has_head,
        multiplicity=rows.multiplicity,
        pipeline=_pipeline(model, node, table),
        plan_index=np.arange(len(table)),
    )


@lru_cache(maxsize=64)
def _device_numbers(
    node: NodeGroup, framework: Framework, precision: str, fidelity: str, oversubscription: float
) -> tuple[KernelModel, Fabric]:
    attention = framework.attention if framework.attention != "unfused" else "fa2"
    nccl = "old" if framework.nccl == "old" else "2.2x"
    kernels = kernel_model(node.device, precision, attention=attention, fidelity=fidelity)
    return kernels, fabric_of(node, nccl=nccl, fidelity=fidelity, oversubscription=oversubscription)


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
        copies=1.0,
        sp=(table.sp * (tp > 1)) * 1.0,
        zero=_real(table.zero),
        shard=_shard(table)[None],
        micro_batch=_real(table.micro_batch),
        seq_len=float(seq_len),
        low=float(low),
        four_bit=float(four),
        matrix_bytes=0.5 if four else 1.0 if low else 4.0 if precision in _WIDE else 2.0,
        element_bytes=4.0 if precision in _WIDE else 2.0,
        offload_optimizer=(table.offload & 1) * 1.0 if np.count_nonzero(table.offload) else 0.0,
        offload_activations=(table.offload >= 2) * 1.0 if np.count_nonzero(table.offload) else 0.0,
        tp_stride=1.0,
        cp_stride=tp,
        ep_stride=_real(table.etp),
        etp_stride=1.0,
        sync_stride=tp,
        expert_stride=_real(table.ep) * _real(table.etp),
        own_stride=tp,
        own_expert_stride=_real(table.ep) * _real(table.etp),
    )


def _rule(table: PlanTable, rows: StageRows) -> Recompute:
    return recompute_columns(table.rules, table.recompute, rows, table.vpp)


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
        crosses_node=((table.pp > 1) & (width * table.pp > max(node.per_node, node.nvlink_domain)))[None]
        * 1.0,
        num_devices=_real(width * table.pp),
        hidden=one(model.hidden),
        vocab=one(model.vocab),
        head_rows=one(model.head_rows),
        head_frozen=one(model.head_frozen),
        heads=one(1.0 + model.num_next_token * (1.0 + 2.0 * model.hidden / max(1, model.vocab))),
        tied=one(model.tied_embeddings),
        num_layers=one(model.num_layers),
    )


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
    load = table_loads(
        model,
        cluster,
        table,
        framework,
        precision=precision,
        seq_len=seq_len,
        optimizer=optimizer,
        rows=rows,
        rule=rule,
    )
    peak = (stage_peak_bytes(load, framework) * (rows.multiplicity > 0)).max(0)
    capacity = equal_nodes(cluster).device.capacity_bytes
    return TableMemory(peak_bytes=peak, fits=peak <= capacity, capacity_bytes=float(capacity))


def table_loads(
    model: Model,
    cluster: Cluster,
    table: PlanTable,
    framework: Framework,
    *,
    precision: str,
    seq_len: int,
    optimizer: str = "adamw",
    rows: StageRows,
    rule: Recompute | None = None,
) -> StageLoad:
    """Return what a rank of each distinct stage holds: of equal stages the first, the fullest of them."""
    tp, cp, dp = _real(table.tp), _real(table.cp), _real(table.dp)
    ep, etp = _real(table.ep), _real(table.etp)
    unit = framework.vocab_multiple * tp
    offload = table.offload[None]
    return StageLoad(
        kinds=tuple(zip(rows.blocks, rows.counts, strict=True)),
        has_embedding=rows.has_embedding,
        has_head=rows.has_head,
        hidden=model.hidden,
        vocab=np.ceil(model.vocab / unit) * unit,
        tied=float(model.tied_embeddings),
        in_flight=_in_flight(table, rows.first_stage),
        num_micro_batches=_real(table.num_micro_batches),
        num_stages=_real(table.pp),
        channels=float(nccl_channels(equal_nodes(cluster).device)),
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
        recompute=rule or _rule(table, rows),
        offload_optimizer=(offload & 1) * 1.0 if np.count_nonzero(offload) else 0.0,
        offload_activations=(offload >= 2) * 1.0 if np.count_nonzero(offload) else 0.0,
        state_bytes=optimizer_state_bytes(optimizer, framework.moment_bytes),
        outer_params=float(model.learned_positions * model.hidden),
        embedding_trainable=float(not model.embedding_frozen),
        head_trainable=float(not model.head_frozen),
    )


def _in_flight(table: PlanTable, stage: np.ndarray) -> np.ndarray:
    """Return the micro-batches whose activations a stage holds, as `predict.memory.in_flight` does."""
    p, m, v = (column.astype(np.float64) for column in (table.pp, table.num_micro_batches, table.vpp))
    behind = p - stage
    chunks = np.where((v > 1.0) & (p > 1.0), 2.0 * behind - 1.0 + (v - 1.0) * p, behind * v)
    return np.where(table.schedule == _GPIPE, m, np.minimum(m * v, chunks) / v)
