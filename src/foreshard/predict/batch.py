"""A batch of pipelines as arrays: equal stages that follow each other are one row with a multiplicity.

Axis 0 is the runs of equal stages of a pipeline, axis 1 the pipelines. What all stages of a pipeline share
has length 1 on axis 0, so a homogeneous plan prices its layers once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from foreshard.catalog.kernels import KernelModel, Tables
from foreshard.catalog.offers import as_chosen, with_units
from foreshard.catalog.stacks import of_model, running, with_attention
from foreshard.catalog.training import TrainingConstants
from foreshard.comm.fabric import Fabric, crossed_links, fabric_between, fabric_of
from foreshard.comm.jobs.job import TrainingJob
from foreshard.cost.memory_activations import Recompute, recompute_of
from foreshard.graph.pipeline_schedules import BY_ORDER, PAIRED, ZERO_BUBBLE
from foreshard.graph.shapes import (
    NO_LAYER,
    LayerOrder,
    LayerShape,
    RankShape,
    layer_order,
    layer_shape,
    stacked_orders,
)
from foreshard.predict.machine import Machine
from foreshard.predict.placement import (
    Worker,
    boundaries,
    crosses_node,
    domain_block,
    first_of_equals,
    layer_replicas,
    link_domains,
    nic_senders,
    stage_strides,
    stage_workers,
    sync_width,
)
from foreshard.predict.run_setup import Pipeline, RunSetup, as_priced, stacked
from foreshard.predict.traits import Traits
from foreshard.spec.cluster import Cluster
from foreshard.spec.framework import Framework
from foreshard.spec.model import Block, Model
from foreshard.spec.plan import Group, Plan, Stage

PLACED = {
    "kernels": KernelModel,
    "fabric": Fabric,
    "sync": Fabric,
    "link": Fabric,
    "traits": Traits,
    "rank": RankShape,
}
"""Fields of `Machine` that stages differ in, and what they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run to predict.

    `plan` has the copies that schedules keep as virtual stages (`Group.held`); `stated` is the plan as given.
    `framework` has the attention kernel that runs on the devices, `declared` the one it names. `costs` is the
    source of kernel times, as `catalog.kernels.kernel_model` takes it. `other_jobs` are on the same cluster:
    a network that transfers share carries theirs too, evenly, or in `bursts` after each computation.
    """

    model: Model
    cluster: Cluster
    plan: Plan
    framework: Framework
    costs: str | Tables = "auto"
    other_jobs: tuple[TrainingJob, ...] = ()
    bursts: bool = False
    stated: Plan = field(init=False)
    declared: Framework = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stated", self.plan)
        chosen = self.plan.attention
        declared = of_model(self.framework, self.model)
        if chosen is not None:
            declared = with_attention(declared, chosen)
        declared = as_chosen(declared, self.plan, model=self.model, devices=self.cluster.devices)
        if self.plan.prefetch is not None or self.plan.wrap is not None:
            declared = with_units(declared, self.plan)
        object.__setattr__(self, "declared", declared)
        object.__setattr__(self, "model", as_priced(self.model, declared, self.plan.precision))
        object.__setattr__(self, "framework", running(declared, self.cluster.devices))
        groups = tuple(group.held for group in self.plan.groups)
        if groups != self.plan.groups:
            object.__setattr__(self, "plan", replace(self.plan, groups=groups))

    def setup(self, fidelity: str = "zero-shot") -> RunSetup:
        """Return what the plan shares with all others of the run."""
        plan, framework = self.plan, self.framework
        if plan.collectives != "auto":
            framework = replace(framework, collectives=plan.collectives)
        if plan.buckets is not None:
            framework = replace(framework, bucket_bytes=plan.buckets)
        return RunSetup(
            model=self.model,
            framework=framework,
            precision=plan.precision,
            seq_len=plan.seq_len,
            optimizer=plan.optimizer,
            comm=plan.comm,
            fidelity=fidelity,
            costs=self.costs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """Equal stages of one group that follow each other: what a rank of them runs."""

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
    num_micro_batches: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """Where the runs of equal stages lie in their pipeline, and which messages leave a link domain."""

    first: Any  # stages before the run
    far_inside: Any  # of the boundaries between stages of the run those that leave a link domain
    far_first: Any  # 1 where the boundary after the run's first stage does
    far_last: Any  # and that after its last stage
    far_each: Any  # most boundaries of one stage of the run that do: 0, 1 or 2

    @property
    def is_chain(self) -> bool:
        """Whether runs follow each other in a pipeline; stages that are priced alone have no place in one."""
        return np.ndim(self.first) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Arrays over (run of equal stages, pipeline), ready for an engine.

    `num_groups` has the pipelines of each plan, where they are those of plans.
    """

    kinds: tuple[LayerShape, ...]
    counts: tuple[np.ndarray, ...]
    order: LayerOrder
    machine: Machine
    recompute: Recompute
    has_embedding: np.ndarray
    has_head: np.ndarray
    multiplicity: np.ndarray
    boundaries: Boundaries
    pipeline: Pipeline
    num_groups: tuple[int, ...] = ()

    @property
    def own_head(self) -> np.ndarray:
        """1 where a stage holds a head whose table is not that of its embedding."""
        return self.has_head * (1.0 - self.pipeline.tied * (self.has_embedding > 0))


def _pace(case: PlannedRun, workers: Sequence[Worker]) -> Worker:
    """Return the worker the others wait for: most samples over matrix rate."""
    if len(workers) == 1:
        return workers[0]
    nodes, precision = case.cluster.nodes, case.plan.precision
    return max(workers, key=lambda w: w.share / nodes[w.node_group].device.peak(precision))


def _fabric(
    setup: RunSetup, cluster: Cluster, ranks: Sequence[int], crossing: int = 1, senders: int | None = None
) -> Fabric:
    """Return the fabric that collectives over some ranks see, or messages if so many send from a node.

    `crossing` of them share a link between racks.
    """
    options = setup.fabric_options | {"senders": senders}
    if len(cluster.nodes) > 1:
        # `fabric_between` already shares a link among the devices of one domain.
        devices = min(len(ranks), min(nodes.per_node for nodes in cluster.nodes))
        return fabric_between(cluster, ranks, concurrent=max(1, -(-crossing // devices)), **options)
    return fabric_of(cluster.nodes[0], oversubscription=cluster.network.oversubscription, **options)


def _joined_fabric(case: PlannedRun, setup: RunSetup) -> Fabric | None:
    """Return what gradient collectives over several groups see; None where stages sum on their own."""
    if len(case.cluster.nodes) == 1 or len(case.plan.groups) == 1:
        return None
    # Gradient rings run over all groups at once: one for each tensor rank of each stage.
    rings = max(sum(stage.tp for stage in group.stages) for group in case.plan.groups)
    return _fabric(setup, case.cluster, case.plan.ranks, rings)


def _fabrics(
    case: PlannedRun, setup: RunSetup, where: tuple[int, int], joined: Fabric | None, senders: int | None
) -> dict[str, Fabric]:
    """Return what a stage's own collectives, gradient collectives and messages see.

    `senders` are the ranks of a node whose messages leave it at once.
    """
    cluster, stages = case.cluster, case.plan.groups[where[0]].stages
    own = stages[where[1]]
    inside = _fabric(setup, cluster, own.ranks)
    if len(cluster.nodes) == 1:
        link = inside if senders is None else _fabric(setup, cluster, own.ranks, senders=senders)
        return {"fabric": inside, "sync": inside, "link": link}
    near = [rank for stage in stages[max(0, where[1] - 1) : where[1] + 2] for rank in stage.ranks]
    return {
        "fabric": inside,
        "sync": joined or inside,
        "link": _fabric(setup, cluster, near, len(own.ranks), senders),
    }


def crossed_by(case: PlannedRun, where: tuple[int, int], to: int | None = None) -> dict[int, float]:
    """Return the links between racks that transfers of one stage cross: how many streams each carries.

    Those of its own collectives; with `to` those of messages to that stage. As in `_fabrics`, but of this
    stage alone: other stages add streams of their own.
    """
    cluster, stages = case.cluster, case.plan.groups[where[0]].stages
    own, smallest = stages[where[1]], min(nodes.per_node for nodes in cluster.nodes)
    if to is None:
        return crossed_links(cluster, own.ranks)
    pair = (*own.ranks, *stages[to].ranks)
    if _racks(cluster, own.ranks) == _racks(cluster, stages[to].ranks):
        return {}
    return crossed_links(cluster, pair, concurrent=-(-len(own.ranks) // min(len(pair), smallest)))


def crossed_by_gradients(case: PlannedRun, where: tuple[int, int]) -> dict[int, float]:
    """Return the same of gradient collectives, which may be over all groups."""
    cluster, own = case.cluster, case.plan.groups[where[0]].stages[where[1]]
    if len(case.plan.groups) == 1:
        return crossed_links(cluster, own.ranks)
    devices = min(len(case.plan.ranks), min(nodes.per_node for nodes in cluster.nodes))
    return crossed_links(cluster, case.plan.ranks, concurrent=-(-own.tp // devices))


def _racks(cluster: Cluster, ranks: Sequence[int]) -> set[str | None]:
    return {cluster.node_group_of(rank).rack for rank in ranks}


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


def stage_ends(model: Model, stage: Stage) -> tuple[float, float]:
    """Return whether a stage holds the embedding, and whether it holds the head."""
    last = model.num_layers + 2
    return (
        float(any(start == 0 for start, _ in stage.layers)),
        float(any(stop == last for _, stop in stage.layers)),
    )


def stage_recompute(stage: Stage, num_layers: float) -> Recompute:
    """Return the recompute rule of a stage with so many layers on its chunks."""
    return recompute_of(stage.recompute, max(1, round(num_layers / len(stage.layers))))


def rank_shape(
    setup: RunSetup,
    group: Group,
    stage: Stage,
    *,
    samples: float,
    replicas: float,
    strides: dict[str, float] | None = None,
) -> RankShape:
    """Return how a rank of a stage executes its layers, with so many samples of a micro-batch on it.

    `replicas` are the data-parallel ranks over all groups that reduce the stage's gradients.
    """
    return setup.rank(
        tp=float(stage.tp),
        cp=float(stage.cp),
        ep=float(stage.ep),
        etp=float(stage.etp),
        dp=replicas,
        copies=replicas / stage.inner_dp,
        sp=float(group.sp and stage.tp > 1),
        zero=float(stage.zero),
        # States are cut inside the group; groups hold whole copies.
        shard=float(stage.shard_size or stage.inner_dp * stage.cp),
        micro_batch=samples,
        offload_optimizer=float(stage.offload in ("optimizer", "all")),
        offload_activations=float(stage.offload in ("activations", "all")),
        paired=float(group.schedule in PAIRED),
        **(strides or {}),
    )


def stage_rows(
    case: PlannedRun, *, fidelity: str = "zero-shot", some: Collection[int] | None = None
) -> list[StageRow]:
    """Return the runs of equal stages of a plan, or of some of its groups, in stage order."""
    model, plan, nodes = case.model, case.plan, case.cluster.nodes
    setup = case.setup(fidelity)
    kinds = {block: i for i, (block, _) in enumerate(model.block_kinds())}
    replicas = layer_replicas(plan, model.num_layers)
    domains = link_domains(case.cluster)
    across: dict[tuple[int, float], tuple[float, float]] = {}
    joined, senders = _joined_fabric(case, setup), nic_senders(case.cluster, plan)
    rows: list[StageRow] = []
    last: Any = None
    for g in range(len(plan.groups)) if some is None else some:
        group = plan.groups[g]
        for s, stage in enumerate(group.stages):
            counts, ends = layer_counts(model, stage, kinds), stage_ends(model, stage)
            workers = stage_workers(case.cluster, group, stage)
            pace = _pace(case, workers)
            domain = float(domain_block(nodes[pace.node_group]))
            strides = stage_strides(plan, stage, domains, domain, across)
            width = sync_width(stage, replicas)
            rank = rank_shape(setup, group, stage, samples=pace.share, replicas=width, strides=strides)
            places = tuple(dict.fromkeys(worker.node_group for worker in workers))
            place = None if len(nodes) == 1 else s  # on unlike nodes links differ by place
            passes = _micro_batches(group, stage)
            key = (g, counts, ends, places, pace.node_group, rank, stage.recompute, place, passes)
            if key == last:
                rows[-1] = replace(rows[-1], stages=(*rows[-1].stages, s))
                continue
            last = key
            device = nodes[pace.node_group].device
            moved, traits = setup.as_moved(rank, setup.traits(device, stage.zero), len(group.stages))
            row = StageRow(
                group=g,
                stages=(s,),
                counts=counts,
                rank=moved,
                kernels=setup.kernels(device),
                **_fabrics(case, setup, (g, s), joined, senders[g][s] if senders else None),
                traits=traits,
                recompute=stage_recompute(stage, sum(counts)),
                has_embedding=ends[0],
                has_head=ends[1],
                num_micro_batches=passes,
            )
            rows.append(row)
    return rows


def short_samples(group: Group, stage: Stage) -> float:
    """Return the samples of the last micro-batch over those of the others, as a stage splits both."""
    rest = group.share - (group.num_micro_batches - 1) * group.micro_batch
    if stage.rank_shares:
        return rest / group.micro_batch
    priced = min(group.share, group.micro_batch)  # at which `stage_workers` prices an even split
    return -(-rest // stage.inner_dp) / -(-priced // stage.inner_dp)


def _micro_batches(group: Group, stage: Stage) -> float:
    """Return the micro-batches of a step on every chunk, a short last one as a fraction of the others.

    Under dualpipe each of the two chunks of a stage takes half of them.
    """
    whole, parts = group.num_micro_batches, 1 + (group.schedule == "dualpipe")
    if group.share == whole * group.micro_batch:
        return whole / parts
    return (whole - 1 + short_samples(group, stage)) / parts


def _boundaries(group: Group, rows: Sequence[StageRow], domains: np.ndarray) -> list[Boundaries]:
    """Return where the runs of a group lie; the boundary before the first stage is the one after the last."""
    far, count = [float(crosses_node(*pair, domains)) for pair in boundaries(group)], len(group.stages)
    far += [0.0] * (count - len(far))
    return [
        Boundaries(
            first=float(row.stages[0]),
            far_inside=sum(far[row.stages[0] : row.stages[-1]]),
            far_first=far[row.stages[0]],
            far_last=far[row.stages[-1]],
            far_each=max(far[stage - 1] + far[stage] for stage in row.stages),
        )
        for row in rows
    ]


def _pipeline(case: PlannedRun, setup: RunSetup, group: Group, domains: np.ndarray) -> Pipeline:
    return setup.pipeline(
        num_micro_batches=_micro_batches(group, group.stages[0]),
        num_stages=float(len(group.stages)),
        num_chunks=float(group.num_chunks) if len(group.stages) > 1 else 1.0,
        zero_bubble=float(group.schedule in ZERO_BUBBLE and len(group.stages) > 1),
        all_forward=float(group.schedule == "gpipe" and len(group.stages) > 1),
        by_order=float(BY_ORDER.index(group.schedule) + 1 if group.schedule in BY_ORDER else 0),
        ends_cross=float(crosses_node(group.stages[0], group.stages[-1], domains)),
        num_devices=float(sum(len(stage.ranks) for group in case.plan.groups for stage in group.stages)),
    )


def build_batch(
    cases: Sequence[PlannedRun],
    constants: TrainingConstants,
    *,
    fidelity: str = "zero-shot",
    distinct: bool = False,
) -> Batch:
    """Return the arrays of all pipelines of all cases, or of distinct ones of each, priced at a fidelity."""
    pipelines, stages, places, kinds, orders, num_groups = [], [], [], [], [], []
    for case in cases:
        own: Collection[int] = range(len(case.plan.groups))
        if distinct:
            own = dict.fromkeys(first_of_equals(case.cluster, case.plan))
        rows, setup = stage_rows(case, fidelity=fidelity, some=own), case.setup(fidelity)
        num_groups.append(len(own))
        domains = link_domains(case.cluster)
        case_kinds = [layer_shape(block) for block, _ in case.model.block_kinds()]
        case_order = layer_order(case.model.block_order())
        for g in own:
            group = case.plan.groups[g]
            pipelines.append(_pipeline(case, setup, group, domains))
            stages.append([row for row in rows if row.group == g])
            places.append(_boundaries(group, stages[-1], domains))
            kinds.append(case_kinds)
            orders.append(case_order)
    depth, num_kinds = max(map(len, stages)), max(map(len, kinds))
    padded = [row + row[-1:] * (depth - len(row)) for row in stages]
    equal = all(
        getattr(row[0], name) == getattr(other, name)
        for row in stages
        for other in row[1:]
        for name in PLACED
    )
    shared = [row[:1] for row in padded] if equal else padded
    pipeline = stacked([[one] for one in pipelines], Pipeline)
    passes = np.array([[stage.num_micro_batches for stage in row] for row in padded]).T
    if (passes != passes[0]).any():  # stages split a short micro-batch over different numbers of ranks
        pipeline = replace(pipeline, num_micro_batches=passes)
    parts: dict[str, Any] = {
        name: stacked([[getattr(stage, name) for stage in row] for row in shared], cls)
        for name, cls in PLACED.items()
    }
    full = [row + [NO_LAYER] * (num_kinds - len(row)) for row in kinds]
    counts = [[(*stage.counts, *(0.0,) * (num_kinds - len(stage.counts))) for stage in row] for row in padded]
    return Batch(
        kinds=tuple(stacked([[row[k]] for row in full], LayerShape) for k in range(num_kinds)),
        counts=tuple(np.array([[stage[k] for stage in row] for row in counts]).T for k in range(num_kinds)),
        order=stacked_orders(orders),
        machine=Machine(**parts, constants=constants),
        recompute=stacked([[stage.recompute for stage in row] for row in padded], Recompute),
        has_embedding=np.array([[stage.has_embedding for stage in row] for row in padded]).T,
        has_head=np.array([[stage.has_head for stage in row] for row in padded]).T,
        multiplicity=np.array(
            [[float(len(stage.stages)) for stage in row] + [0.0] * (depth - len(row)) for row in stages]
        ).T,
        boundaries=stacked([row + row[-1:] * (depth - len(row)) for row in places], Boundaries),
        pipeline=pipeline,
        num_groups=tuple(num_groups),
    )


def with_constants(batch: Batch, constants: TrainingConstants) -> Batch:
    """Return the batch priced with other constants (what a fit varies)."""
    return replace(batch, machine=replace(batch.machine, constants=constants))
