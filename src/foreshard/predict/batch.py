"""A batch of pipelines as arrays: stages with equal work are one row with a multiplicity.

Axis 0 is the distinct stages of a pipeline, axis 1 the pipelines. What all stages of a pipeline share has
length 1 on axis 0, so a homogeneous plan prices its layers once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from foreshard.catalog.kernels import kernel_model
from foreshard.catalog.training import TrainingConstants
from foreshard.comm.fabric import Fabric, fabric_between, fabric_of
from foreshard.cost.kernels import KernelModel
from foreshard.cost.memory_activations import Recompute, recompute_of
from foreshard.graph.shapes import (
    NO_LAYER,
    LayerShape,
    RankShape,
    layer_shape,
)
from foreshard.predict.machine import Machine
from foreshard.predict.traits import Traits, traits_of
from foreshard.spec.cluster import Cluster, NodeGroup
from foreshard.spec.framework import Framework
from foreshard.spec.model import Block, Model
from foreshard.spec.plan import Group, Plan, Stage

T = TypeVar("T")
_LOW = ("fp8", "mxfp8", "nvfp4")


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
    sync: Fabric
    link: Fabric
    traits: Traits
    recompute: Recompute
    has_embedding: float
    has_head: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Numbers of one group of a plan: how many micro-batches, stages, chunks."""

    num_micro_batches: Any  # a short last one counts as a fraction
    num_stages: Any
    num_chunks: Any
    gpipe: Any
    zero_bubble: Any
    crosses_node: Any  # 1 when any neighbouring stages are on different nodes
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Ranks of a stage that are alike: same node group, same samples of each micro-batch."""

    node_group: int
    share: float
    rank: int  # the first of them


def stage_workers(cluster: Cluster, group: Group, stage: Stage) -> tuple[Worker, ...]:
    """Return the kinds of ranks of a stage that take samples, in rank order.

    A micro-batch is split over the inner data-parallel ranks by `rank_shares`, else evenly; ranks that
    cannot split it evenly are all priced at the larger part.
    """
    # A group with fewer samples than a micro-batch has one short micro-batch.
    shares = stage.rank_shares or (-(-min(group.share, group.micro_batch) // stage.inner_dp),)
    if len(cluster.nodes) == 1:
        biggest = max(range(len(shares)), key=shares.__getitem__)
        return (
            Worker(
                node_group=0, share=float(shares[biggest]), rank=stage.ranks[biggest * stage.tp * stage.cp]
            ),
        )
    ends = np.cumsum([nodes.num_devices for nodes in cluster.nodes])
    where = np.searchsorted(ends, stage.ranks, side="right").tolist()
    split = stage.tp * stage.cp
    found: dict[tuple[int, float], int] = {}
    for i, (rank, node_group) in enumerate(zip(stage.ranks, where, strict=True)):
        share = float(shares[(i // split) % len(shares)])
        if share > 0.0:
            found.setdefault((node_group, share), rank)
    return tuple(Worker(node_group=key[0], share=key[1], rank=rank) for key, rank in found.items())


def _pace(case: Case, workers: Sequence[Worker]) -> Worker:
    """Return the worker the others wait for: most samples over matrix rate."""
    if len(workers) == 1:
        return workers[0]
    nodes, precision = case.cluster.nodes, case.plan.precision
    return max(workers, key=lambda w: w.share / nodes[w.node_group].device.peak(precision))


def layer_replicas(plan: Plan, num_layers: int) -> np.ndarray:
    """Return the data-parallel ranks, over all groups, that hold each layer; shape (num_layers + 2,)."""
    change = np.zeros(num_layers + 3)
    for group in plan.groups:
        for stage in group.stages:
            for start, stop in stage.layers:
                change[start] += stage.inner_dp
                change[stop] -= stage.inner_dp
    return np.cumsum(change)[:-1]


def sync_width(stage: Stage, replicas: np.ndarray) -> float:
    """Return the data-parallel ranks that reduce the gradients of a stage: the most of any of its layers."""
    return float(max(replicas[start:stop].max() for start, stop in stage.layers))


def _nccl(case: Case) -> str:
    return "old" if case.framework.nccl == "old" else "2.2x"


def _rings(plan: Plan) -> int:
    """Return the gradient rings that run over all groups at once: one for each tensor rank of each stage."""
    return max(sum(stage.tp for stage in group.stages) for group in plan.groups)


def _fabric(case: Case, ranks: Sequence[int], fidelity: str, crossing: int = 1) -> Fabric:
    """Return the fabric that collectives over some ranks see.

    `crossing` of them share a link between racks.
    """
    cluster = case.cluster
    if len(cluster.nodes) > 1:
        # `fabric_between` already shares a link among the devices of one domain.
        devices = min(len(ranks), min(nodes.per_node for nodes in cluster.nodes))
        more = max(1, -(-crossing // devices))
        return fabric_between(cluster, ranks, nccl=_nccl(case), fidelity=fidelity, concurrent=more)
    over = cluster.network.oversubscription
    return fabric_of(cluster.nodes[0], nccl=_nccl(case), fidelity=fidelity, oversubscription=over)


def _fabrics(case: Case, where: tuple[int, int], fidelity: str) -> dict[str, Fabric]:
    """Return what a stage's own collectives, gradient collectives and messages see."""
    plan, stages = case.plan, case.plan.groups[where[0]].stages
    inside = _fabric(case, stages[where[1]].ranks, fidelity)
    if len(case.cluster.nodes) == 1:
        return {"fabric": inside, "sync": inside, "link": inside}
    near = stages[max(0, where[1] - 1) : where[1] + 2]
    return {
        "fabric": inside,
        "sync": _fabric(case, plan.ranks, fidelity, _rings(plan)) if len(plan.groups) > 1 else inside,
        "link": _fabric(case, [r for s in near for r in s.ranks], fidelity, len(stages[where[1]].ranks)),
    }


def domain_block(nodes: NodeGroup) -> int:
    """Return the devices a job takes from each link domain: the most that divide it into equal blocks.

    A job of 256 on racks of 72 gets 64 from each of four, as block scheduling places it.
    """
    whole = min(nodes.num_devices, max(nodes.per_node, nodes.nvlink_domain))
    fits = range(whole - whole % nodes.per_node, 0, -nodes.per_node)
    return next((size for size in fits if nodes.num_devices % size == 0), nodes.per_node)


def link_domains(cluster: Cluster) -> np.ndarray:
    """Return, per rank, the number of the node or NVLink domain it shares device links in."""
    parts, before = [], 0
    for nodes in cluster.nodes:
        domains = np.arange(nodes.num_devices) // domain_block(nodes)
        parts.append(before + domains)
        before += int(domains[-1]) + 1
    return np.concatenate(parts)


def _domain_size(cluster: Cluster, node_group: int) -> float:
    """Return the devices of a full link domain of a node group."""
    return float(domain_block(cluster.nodes[node_group]))


def crosses_node(here: Stage, there: Stage, domains: np.ndarray) -> bool:
    """Return whether any rank of a stage and its neighbour in another stage share no device links."""
    one, other = domains[np.array(here.ranks)], domains[np.array(there.ranks)]
    wide = max(len(one), len(other))
    place = np.arange(wide)
    return bool(np.any(one[place * len(one) // wide] != other[place * len(other) // wide]))


def layer_counts(model: Model, stage: Stage, kinds: dict[Block, int]) -> tuple[float, ...]:
    """Return how many layers of each kind of block a stage holds, next-token modules included."""
    counts = [0.0] * len(kinds)
    last = model.num_layers
    for start, stop in stage.layers:
        for layer in range(max(1, start), min(last + 1, stop)):
            counts[kinds[model.blocks[layer - 1]]] += 1.0
        if stop == last + 2 and model.num_next_token:
            counts[kinds[model.blocks[-1]]] += model.num_next_token
    return tuple(counts)


def spread_stride(members: np.ndarray, domain: float) -> float:
    """Return the stride at which a communicator has as many members in a link domain as it really has.

    Parameters
    ----------
    members : ndarray of int, shape (communicators, ranks)
        Link domain of each member; the communicator that spreads widest counts.
    domain : float
        Devices of a full domain.
    """
    count = members.shape[1]
    if count == 1:
        return 1.0
    ordered = np.sort(members, axis=1)
    widest = int((np.diff(ordered, axis=1) != 0).sum(1).max()) + 1
    inside = -(-count // widest)
    return domain / inside * (1.0 - 1e-9)


def stage_strides(plan: Plan, stage: Stage, domains: np.ndarray, domain: float) -> dict[str, float]:
    """Return the strides of every communicator a stage takes part in, from where its ranks are."""
    places = domains[np.array(stage.ranks)]
    dense = places.reshape(-1, stage.cp, stage.tp)  # tp fastest, then cp, then inner dp
    experts = places.reshape(-1, stage.ep, stage.etp)
    own, own_experts = dense.reshape(-1, stage.tp).T, experts.reshape(len(experts), -1).T
    alike, alike_experts = own, own_experts
    if len(plan.groups) > 1:
        first = stage.layers[0][0]
        others = [
            other
            for group in plan.groups
            for other in group.stages
            if any(start <= first < stop for start, stop in other.layers)
        ]
        alike = np.concatenate([domains[np.array(o.ranks[:: o.tp])] for o in others])[None]
        alike_experts = np.concatenate([domains[np.array(o.ranks[:: o.ep * o.etp])] for o in others])[None]
    return {
        "tp_stride": spread_stride(dense.reshape(-1, stage.tp), domain),
        "cp_stride": spread_stride(dense.swapaxes(1, 2).reshape(-1, stage.cp), domain),
        "ep_stride": spread_stride(experts.swapaxes(1, 2).reshape(-1, stage.ep), domain),
        "etp_stride": spread_stride(experts.reshape(-1, stage.etp), domain),
        "sync_stride": spread_stride(alike, domain),
        "expert_stride": spread_stride(alike_experts, domain),
        "own_stride": spread_stride(own, domain),
        "own_expert_stride": spread_stride(own_experts, domain),
    }


def _rank_shape(
    plan: Plan, group: Group, stage: Stage, share: float, replicas: np.ndarray, strides: dict[str, float]
) -> RankShape:
    """Return how a rank that takes `share` samples of a micro-batch executes the layers of a stage."""
    low = plan.precision in _LOW
    four = plan.precision == "nvfp4"
    wide = 4.0 if plan.precision in ("fp32", "tf32") else 2.0
    return RankShape(
        tp=float(stage.tp),
        cp=float(stage.cp),
        ep=float(stage.ep),
        etp=float(stage.etp),
        dp=sync_width(stage, replicas),
        copies=sync_width(stage, replicas) / stage.inner_dp,
        sp=float(group.sp and stage.tp > 1),
        zero=float(stage.zero),
        # States are cut inside the group; groups hold whole copies.
        shard=float(stage.shard_size or stage.inner_dp * stage.cp),
        micro_batch=share,
        seq_len=float(plan.seq_len),
        low=float(low),
        four_bit=float(four),
        matrix_bytes=0.5 if four else 1.0 if low else wide,
        element_bytes=wide,
        offload_optimizer=float(stage.offload in ("optimizer", "all")),
        offload_activations=float(stage.offload in ("activations", "all")),
        **strides,
    )


def stage_rows(case: Case, *, fidelity: str = "zero-shot") -> list[StageRow]:
    """Return the distinct stages of a plan, group by group, in stage order."""
    model, plan = case.model, case.plan
    kinds = {block: i for i, (block, _) in enumerate(model.block_kinds())}
    replicas = layer_replicas(plan, model.num_layers)
    domains = link_domains(case.cluster)
    rows: dict[Any, StageRow] = {}
    for g, group in enumerate(plan.groups):
        for s, stage in enumerate(group.stages):
            counts = layer_counts(model, stage, kinds)
            embedding = float(any(start == 0 for start, _ in stage.layers))
            head = float(any(stop == model.num_layers + 2 for _, stop in stage.layers))
            workers = stage_workers(case.cluster, group, stage)
            pace = _pace(case, workers)
            strides = stage_strides(plan, stage, domains, _domain_size(case.cluster, pace.node_group))
            rank = _rank_shape(plan, group, stage, pace.share, replicas, strides)
            places = tuple(dict.fromkeys(worker.node_group for worker in workers))
            alone = len(case.cluster.nodes) == 1
            key = (g, counts, embedding, head, places, pace.node_group, rank, stage.recompute, alone or s)
            if key in rows:
                rows[key] = replace(rows[key], stages=(*rows[key].stages, s))
                continue
            ends = embedding, head
            rows[key] = _stage_row(case, (g, s), counts, ends, rank, pace.node_group, fidelity)
    return list(rows.values())


def _stage_row(
    case: Case,
    where: tuple[int, int],
    counts: tuple[float, ...],
    ends: tuple[float, float],
    rank: RankShape,
    node_group: int,
    fidelity: str,
) -> StageRow:
    plan, framework = case.plan, case.framework
    stage = plan.groups[where[0]].stages[where[1]]
    device = case.cluster.nodes[node_group].device
    attention = framework.attention if framework.attention != "unfused" else "fa2"
    return StageRow(
        group=where[0],
        stages=(where[1],),
        counts=counts,
        rank=rank,
        kernels=kernel_model(device, plan.precision, attention=attention, fidelity=fidelity),
        **_fabrics(case, where, fidelity),
        traits=traits_of(
            framework,
            device,
            optimizer=plan.optimizer,
            comm=plan.comm,
            precision=plan.precision,
        ),
        recompute=recompute_of(stage.recompute, max(1, round(sum(counts) / len(stage.layers)))),
        has_embedding=ends[0],
        has_head=ends[1],
    )


def boundaries(group: Group) -> list[tuple[Stage, Stage]]:
    """Return the pairs of stages that exchange messages; with virtual stages the last feeds the first."""
    stages = group.stages
    pairs = list(pairwise(stages))
    return [*pairs, (stages[-1], stages[0])] if len(stages) > 1 and group.num_chunks > 1 else pairs


def _micro_batches(group: Group) -> float:
    """Return the micro-batches of a step, a short last one as a fraction of the others."""
    rest = group.share - (group.num_micro_batches - 1) * group.micro_batch
    if rest == group.micro_batch:
        return float(group.num_micro_batches)
    short = max(
        rest / group.micro_batch
        if stage.rank_shares
        else -(-rest // stage.inner_dp) / -(-min(group.share, group.micro_batch) // stage.inner_dp)
        for stage in group.stages
    )
    return group.num_micro_batches - 1 + short


def _pipeline(case: Case, g: int, domains: np.ndarray) -> Pipeline:
    plan, model = case.plan, case.model
    group = plan.groups[g]
    return Pipeline(
        num_micro_batches=_micro_batches(group),
        num_stages=float(len(group.stages)),
        num_chunks=float(group.num_chunks),
        gpipe=float(group.schedule == "gpipe"),
        zero_bubble=float(group.schedule == "zb-h1"),
        crosses_node=float(any(crosses_node(*pair, domains) for pair in boundaries(group))),
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


def build_batch(cases: Sequence[Case], constants: TrainingConstants, *, fidelity: str = "zero-shot") -> Batch:
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
        domains = link_domains(case.cluster)
        case_kinds = [_shape(block) for block, _ in case.model.block_kinds()]
        for g in range(len(case.plan.groups)):
            pipelines.append(_pipeline(case, g, domains))
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
        (row[0].rank, row[0].kernels, row[0].fabric, row[0].sync, row[0].link, row[0].traits)
        == (other.rank, other.kernels, other.fabric, other.sync, other.link, other.traits)
        for row in stages
        for other in row[1:]
    )
    shared = [row[:1] for row in padded] if equal else padded
    machine = Machine(
        kernels=_stack([[r.kernels for r in row] for row in shared], KernelModel),
        fabric=_stack([[r.fabric for r in row] for row in shared], Fabric),
        sync=_stack([[r.sync for r in row] for row in shared], Fabric),
        link=_stack([[r.link for r in row] for row in shared], Fabric),
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
