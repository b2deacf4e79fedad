"""A batch of pipelines as arrays: stages with equal work are one row with a multiplicity.

Axis 0 is the distinct stages of a pipeline, axis 1 the pipelines. What all stages of a pipeline share has
length 1 on axis 0, so a homogeneous plan prices its layers once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from foreshard.catalog.kernels import kernel_model
from foreshard.catalog.training import TrainingConstants
from foreshard.comm.fabric import Fabric, fabric_of, slowest
from foreshard.cost.kernels import KernelModel
from foreshard.cost.memory_activations import Recompute, recompute_of
from foreshard.graph.shapes import (
    NO_LAYER,
    LayerShape,
    RankShape,
    layer_shape,
)
from foreshard.predict.formula import Machine
from foreshard.predict.traits import Traits, traits_of
from foreshard.spec.cluster import Cluster, NodeGroup
from foreshard.spec.framework import Framework
from foreshard.spec.model import Block, Model
from foreshard.spec.plan import Group, Plan, Stage

T = TypeVar("T")
_LOW = ("fp8", "mxfp8", "nvfp4")
_OLD_DEVICE_ATTENTION = ("pascal", "volta", "maxwell", "kepler")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run to predict."""

    model: Model
    cluster: Cluster
    plan: Plan
    framework: Framework


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One distinct stage of one group: what a rank of it runs."""

    group: int
    stages: tuple[int, ...]
    counts: tuple[float, ...]  # layers of each kind of the model
    rank: RankShape
    kernels: KernelModel
    fabric: Fabric
    traits: Traits
    recompute: Recompute
    has_embedding: float
    has_head: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Numbers of one group of a plan: how many micro-batches, stages, chunks."""

    num_micro_batches: Any
    num_stages: Any
    num_chunks: Any
    gpipe: Any
    zero_bubble: Any
    crosses_node: Any  # 1 when neighbouring stages are on different nodes
    num_devices: Any  # of the whole plan
    hidden: Any
    vocab: Any
    head_rows: Any
    head_frozen: Any
    heads: Any
    tied: Any
    num_layers: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Arrays over (stage, pipeline), ready for an engine."""

    kinds: tuple[LayerShape, ...]
    counts: tuple[np.ndarray, ...]
    machine: Machine
    recompute: Recompute
    has_embedding: np.ndarray
    has_head: np.ndarray
    multiplicity: np.ndarray
    pipeline: Pipeline
    plan_index: np.ndarray  # which plan each pipeline belongs to


@lru_cache(maxsize=1024)
def _shape(block: Block) -> LayerShape:
    return layer_shape(block)


def sync_width(plan: Plan, stage: Stage) -> int:
    """Data-parallel ranks, over all groups, that hold the layers of this stage."""
    first = stage.layers[0][0]
    total = 0
    for group in plan.groups:
        for other in group.stages:
            if any(start <= first < stop for start, stop in other.layers):
                total += other.inner_dp
    return total


def _stage_fabric(case: Case, stage: Stage, cluster_groups: Sequence[NodeGroup], fidelity: str) -> Fabric:
    nccl = "old" if case.framework.nccl == "old" else "2.2x"
    kinds = {_group_index(case.cluster, r) for r in (stage.ranks if len(case.cluster.nodes) > 1 else stage.ranks[:1])}
    fabrics = [fabric_of(cluster_groups[i], nccl=nccl, fidelity=fidelity) for i in sorted(kinds)]
    return fabrics[0] if len(fabrics) == 1 else slowest(fabrics)


def _group_index(cluster: Cluster, rank: int) -> int:
    start = 0
    for index, group in enumerate(cluster.nodes):
        start += group.count * group.per_node
        if rank < start:
            return index
    raise IndexError(rank)


def layer_counts(model: Model, stage: Stage, kinds: dict[Block, int]) -> tuple[float, ...]:
    counts = [0.0] * len(kinds)
    last = model.num_layers
    for start, stop in stage.layers:
        for layer in range(max(1, start), min(last + 1, stop)):
            counts[kinds[model.blocks[layer - 1]]] += 1.0
        if stop == last + 2 and model.num_next_token:
            counts[kinds[model.blocks[-1]]] += model.num_next_token
    return tuple(counts)


def rank_micro_batch(group: Group, stage: Stage) -> float:
    if stage.rank_shares:
        return float(max(stage.rank_shares))
    return float(-(-group.micro_batch // stage.inner_dp)) if group.micro_batch >= stage.inner_dp else 1.0


def rank_shape(plan: Plan, group: Group, stage: Stage) -> RankShape:
    """Return how a rank of this stage executes layers."""
    dp = sync_width(plan, stage)
    low = plan.precision in _LOW
    four = plan.precision == "nvfp4"
    wide = 4.0 if plan.precision in ("fp32", "tf32") else 2.0
    return RankShape(
        tp=float(stage.tp),
        cp=float(stage.cp),
        ep=float(stage.ep),
        etp=float(stage.etp),
        dp=float(dp),
        sp=float(group.sp and stage.tp > 1),
        zero=float(stage.zero),
        shard=float(min(stage.shard_size or dp * stage.cp, dp * stage.cp)),
        micro_batch=rank_micro_batch(group, stage),
        seq_len=float(plan.seq_len),
        low=float(low),
        four_bit=float(four),
        matrix_bytes=0.5 if four else 1.0 if low else wide,
        element_bytes=wide,
        sync_stride=float(stage.tp),
    )


def stage_rows(case: Case, *, fidelity: str = "zero-shot") -> list[StageRow]:
    """Return the distinct stages of a plan, group by group, in stage order."""
    model, cluster, plan = case.model, case.cluster, case.plan
    kinds = {block: i for i, (block, _) in enumerate(model.block_kinds())}
    rows: dict[tuple, StageRow] = {}
    cluster_groups = cluster.nodes
    for g, group in enumerate(plan.groups):
        for s, stage in enumerate(group.stages):
            counts = layer_counts(model, stage, kinds)
            embedding = float(any(start == 0 for start, _ in stage.layers))
            head = float(any(stop == model.num_layers + 2 for _, stop in stage.layers))
            device_groups = tuple(sorted({_group_index(cluster, r) for r in stage.ranks}))
            key = (g, counts, embedding, head, device_groups, stage.tp, stage.cp, stage.ep, stage.etp,
                   stage.inner_dp, stage.zero, stage.shard_size, stage.recompute, stage.rank_shares)  # fmt: skip
            if key in rows:
                rows[key] = replace(rows[key], stages=(*rows[key].stages, s))
                continue
            rows[key] = _stage_row(case, g, s, counts, embedding, head, device_groups, cluster_groups, fidelity)
    return list(rows.values())


def _stage_row(
    case: Case,
    g: int,
    s: int,
    counts: tuple[float, ...],
    embedding: float,
    head: float,
    device_groups: tuple[int, ...],
    cluster_groups: Sequence[NodeGroup],
    fidelity: str,
) -> StageRow:
    plan, framework = case.plan, case.framework
    group = plan.groups[g]
    stage = group.stages[s]
    devices = [cluster_groups[i].device for i in device_groups]
    # Ranks of one stage wait for each other, so the slowest device sets its pace.
    device = min(devices, key=lambda d: d.peak(plan.precision))
    attention = framework.attention if framework.attention != "unfused" else "fa2"
    return StageRow(
        group=g,
        stages=(s,),
        counts=counts,
        rank=rank_shape(plan, group, stage),
        kernels=kernel_model(device, plan.precision, attention=attention, fidelity=fidelity),
        fabric=_stage_fabric(case, stage, cluster_groups, fidelity),
        traits=traits_of(
            framework,
            device,
            optimizer=plan.optimizer,
            comm=plan.comm,
            precision=plan.precision,
        ),
        recompute=recompute_of(stage.recompute, max(1, round(sum(counts) / len(stage.layers)))),
        has_embedding=embedding,
        has_head=head,
    )


def _pipeline(case: Case, g: int, cluster: Cluster) -> Pipeline:
    plan, model = case.plan, case.model
    group = plan.groups[g]
    crosses = 0.0
    if len(group.stages) > 1:
        domain = cluster.nodes[0].per_node
        here, there = group.stages[0].ranks, group.stages[1].ranks
        crosses = float(cluster.node_of(here[0]) != cluster.node_of(there[0]) or len(here) >= domain)
    return Pipeline(
        num_micro_batches=float(group.num_micro_batches),
        num_stages=float(len(group.stages)),
        num_chunks=float(group.num_chunks),
        gpipe=float(group.schedule == "gpipe"),
        zero_bubble=float(group.schedule == "zb-h1"),
        crosses_node=crosses,
        num_devices=float(len(plan.ranks)),
        hidden=float(model.hidden),
        vocab=float(model.vocab),
        head_rows=float(model.head_rows),
        head_frozen=float(model.head_frozen),
        heads=1.0 + model.num_next_token * (1.0 + 2.0 * model.hidden / max(1, model.vocab)),
        tied=float(model.tied_embeddings),
        num_layers=float(model.num_layers),
    )


def _stack(grid: Sequence[Sequence[T]], cls: type[T]) -> T:
    """Return `cls` with fields of shape (stages, pipelines) from rows [pipeline][stage]."""
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    return cls(
        **{
            name: np.array([[getattr(item, name) for item in row] for row in grid], dtype=np.float64).T
            for name in names
        }
    )


def build_batch(
    cases: Sequence[Case], constants: TrainingConstants, *, fidelity: str = "zero-shot"
) -> Batch:
    """Return the arrays of all pipelines of all cases.

    Parameters
    ----------
    cases : sequence of Case
    constants : TrainingConstants
    fidelity : {'zero-shot', 'datasheet'}

    Returns
    -------
    Batch
    """
    pipelines, stages, kinds, index = [], [], [], []
    for plan_index, case in enumerate(cases):
        rows = stage_rows(case, fidelity=fidelity)
        case_kinds = [_shape(block) for block, _ in case.model.block_kinds()]
        for g in range(len(case.plan.groups)):
            pipelines.append(_pipeline(case, g, case.cluster))
            stages.append([row for row in rows if row.group == g])
            kinds.append(case_kinds)
            index.append(plan_index)
    depth = max(len(row) for row in stages)
    num_kinds = max(len(row) for row in kinds)
    padded = [row + [row[-1]] * (depth - len(row)) for row in stages]
    multiplicity = np.array(
        [[float(len(r.stages)) for r in row] + [0.0] * (depth - len(row)) for row in stages]
    ).T
    equal = all(
        (row[0].rank, row[0].kernels, row[0].fabric, row[0].traits)
        == (other.rank, other.kernels, other.fabric, other.traits)
        for row in stages
        for other in row[1:]
    )
    shared = [row[:1] for row in padded] if equal else padded
    machine = Machine(
        kernels=_stack([[r.kernels for r in row] for row in shared], KernelModel),
        fabric=_stack([[r.fabric for r in row] for row in shared], Fabric),
        traits=_stack([[r.traits for r in row] for row in shared], Traits),
        rank=_stack([[r.rank for r in row] for row in shared], RankShape),
        constants=constants,
    )
    full = [row + [NO_LAYER] * (num_kinds - len(row)) for row in kinds]
    counts = [
        np.array([[r.counts[k] if k < len(r.counts) else 0.0 for r in row] for row in padded]).T
        for k in range(num_kinds)
    ]
    return Batch(
        kinds=tuple(_stack([[row[k]] for row in full], LayerShape) for k in range(num_kinds)),
        counts=tuple(counts),
        machine=machine,
        recompute=_stack([[r.recompute for r in row] for row in padded], Recompute),
        has_embedding=np.array([[r.has_embedding for r in row] for row in padded]).T,
        has_head=np.array([[r.has_head for r in row] for row in padded]).T,
        multiplicity=multiplicity,
        pipeline=_stack([[p] for p in pipelines], Pipeline),
        plan_index=np.array(index),
    )


def with_constants(batch: Batch, constants: TrainingConstants) -> Batch:
    """Return the batch priced with other constants (what a fit varies)."""
    return replace(batch, machine=replace(batch.machine, constants=constants))
