"""Many plans of one model on one cluster, as columns: no Plan object, no loop over plans.

A plan from degree flags has few distinct stages, so they follow from arithmetic on the degrees. The result
is what `build_batch` and `plan_memory` find for the same plans one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from foreshard.catalog.training import TrainingConstants
from foreshard.comm.fabric import Fabric, fabric_of
from foreshard.cost.memory import StageLoad, peaks_in_flight
from foreshard.errors import SpecError
from foreshard.graph.shapes import RankShape, layer_order, layer_shape
from foreshard.predict.analytical.engine import step_times
from foreshard.predict.batch import Batch, Boundaries
from foreshard.predict.machine import Machine
from foreshard.predict.placement import domain_block
from foreshard.predict.plan_table import Column, PlanTable
from foreshard.predict.run_setup import RunSetup
from foreshard.predict.stage_rows import StageRows, recompute_columns, stage_rows_of
from foreshard.spec.cluster import Cluster, NodeGroup
from foreshard.spec.framework import Framework
from foreshard.spec.model import Model
from foreshard.spec.plan import TABLED

_GPIPE, _ZERO_BUBBLE = TABLED.index("gpipe"), TABLED.index("zb-h1")


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
    """Return time and memory of every plan of a table on equal nodes, or raise SpecError where nodes differ.

    The plans are valid: the rules of `spec.checks` are not checked again here.
    """
    setup = RunSetup(
        model=model,
        framework=framework,
        precision=precision,
        seq_len=seq_len,
        optimizer=optimizer,
        comm=comm or {},
        fidelity=fidelity,
    )
    priced = TableStages(setup, cluster, table, stage_rows_of(model, table.pp, table.vpp))
    step, memory = step_times(priced.batch(constants)), priced.memory()
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


class TableStages:
    """The distinct stages of every plan of a table on equal nodes: what batch and memory are made from.

    `rows` are of the table's plans, as `stage_rows_of` has them.
    """

    def __init__(self, setup: RunSetup, cluster: Cluster, table: PlanTable, rows: StageRows):
        self._setup, self._cluster, self._table, self.rows = setup, cluster, table, rows
        self._node = equal_nodes(cluster)
        self._rank = _rank(setup, table)
        self._rule = recompute_columns(table.rules, table.recompute, rows, table.vpp)

    def batch(self, constants: TrainingConstants, *, aligned: bool = False) -> Batch:
        """Return the arrays of all plans; axis 0 is their distinct stages, axis 1 the plans.

        What one model, device or framework fixes is a float; what stages of a plan share has length 1 on
        axis 0. With `aligned` every communicator begins where a link domain does, at its best.
        """
        setup, rows, table, node = self._setup, self.rows, self._table, self._node
        over = self._cluster.network.oversubscription
        options = tuple(setup.fabric_options.items())
        # Each rank of a stage sends over the boundary of two nodes, no other does.
        fabric, alone = _fabric(node, over, options), _fabric(node, over, (*options, ("senders", 1)))
        width = table.tp * table.cp * table.dp
        domain = domain_block(node)
        leaves = (table.pp > 1) & (width * table.pp > domain)
        traits, rule = setup.traits(node.device, table.zero[None]), self._rule
        if aligned:
            strides = _strides(table, domain)
        else:
            rows, strides = _placed(table, rows, domain)
        if rows is not self.rows:
            rule = recompute_columns(table.rules, table.recompute, rows, table.vpp)
        rank, traits = setup.as_moved(replace(self._rank, **strides), traits, table.pp[None])
        return Batch(
            kinds=tuple(layer_shape(block) for block in rows.blocks),
            counts=rows.counts,
            order=layer_order(setup.model.block_order()),
            machine=Machine(
                kernels=setup.kernels(node.device),
                fabric=fabric,
                sync=fabric,
                link=replace(
                    fabric, nic_sharers=np.clip(width, alone.nic_sharers, node.per_node)[None] * 1.0
                ),
                traits=traits,
                rank=rank,
                constants=constants,
            ),
            recompute=rule,
            has_embedding=rows.has_embedding,
            has_head=rows.has_head,
            multiplicity=rows.multiplicity,
            boundaries=_boundaries(table, rows, width, domain),
            pipeline=setup.pipeline(
                num_micro_batches=_real(table.num_micro_batches),
                num_stages=_real(table.pp),
                num_chunks=_real(table.vpp),
                zero_bubble=((table.schedule == _ZERO_BUBBLE) & (table.pp > 1))[None] * 1.0,
                all_forward=((table.schedule == _GPIPE) & (table.pp > 1))[None] * 1.0,
                ends_cross=leaves[None] * 1.0,
                num_devices=_real(width * table.pp),
            ),
        )

    def load(self) -> StageLoad:
        """Return what a rank of each distinct stage holds: of equal stages the first, the fullest of them."""
        table, rows, setup = self._table, self.rows, self._setup
        return setup.load(
            self._rank,
            counts=rows.counts,
            has_embedding=rows.has_embedding,
            has_head=rows.has_head,
            in_flight=_in_flight(table, rows.first_stage, expert_overlap=setup.hides("expert_overlap")),
            num_micro_batches=_real(table.num_micro_batches),
            num_stages=_real(table.pp),
            devices=[self._node.device],
            recompute=self._rule,
        )

    def memory(self) -> TableMemory:
        """Return the peak bytes of the fullest rank of each plan."""
        load = self.load()
        peak = next(peaks_in_flight(load, self._setup.framework, [load.in_flight]))
        fullest = (peak * (self.rows.multiplicity > 0)).max(0)
        capacity = float(self._node.device.capacity_bytes)
        return TableMemory(peak_bytes=fullest, fits=fullest <= capacity, capacity_bytes=capacity)


def _rank(setup: RunSetup, table: PlanTable) -> RankShape:
    """Return how ranks execute layers, wherever they are."""
    tp, cp, dp = _real(table.tp), _real(table.cp), _real(table.dp)
    replicas = table.dp * table.cp
    shard = np.where(table.shard > 0, np.minimum(table.shard, replicas), replicas)
    offloads = np.count_nonzero(table.offload) > 0
    return setup.rank(
        tp=tp,
        cp=cp,
        ep=_real(table.ep),
        etp=_real(table.etp),
        dp=dp,
        shard=_real(shard),
        zero=_real(table.zero),
        sp=(table.sp * (tp > 1)) * 1.0,
        micro_batch=_real(table.micro_batch),
        offload_optimizer=(table.offload[None] & 1) * 1.0 if offloads else 0.0,
        offload_activations=(table.offload[None] >= 2) * 1.0 if offloads else 0.0,
    )


def _placed(table: PlanTable, rows: StageRows, domain: int) -> tuple[StageRows, dict[str, np.ndarray]]:
    """Return rows whose stages lie alike on link domains of so many devices, and the strides on them.

    Stages do where they divide a domain or fill whole ones. Elsewhere communicators of some stages leave a
    domain that those of others stay in: such stages are rows of their own, as in `predict.batch`.
    """
    width = table.tp * table.cp * table.dp
    if not np.count_nonzero((width % domain != 0) & (domain % width != 0)):
        return rows, _strides(table, domain, np.zeros((1, len(table)), dtype=np.int64))
    degrees = [table.pp, table.vpp, table.tp, table.cp, table.dp, table.ep, table.etp]
    _, some, of = np.unique(np.stack(degrees), axis=1, return_index=True, return_inverse=True)
    plans, stage = table.take(some), np.arange(int(table.pp.max()))[:, None]
    present, strides = stage < plans.pp, _strides(plans, domain, stage * width[some])
    ends = rows.multiplicity[:, some].cumsum(0)
    row = np.minimum((stage[None] >= ends[:, None]).sum(0), len(ends) - 1)
    columns = {
        f"{i}": np.take_along_axis(values[:, some], row, 0)
        for i, values in enumerate((*rows.counts, rows.has_embedding, rows.has_head))
    } | strides
    first = np.logical_or.reduce([np.diff(column, axis=0) != 0 for column in columns.values()])
    first = np.insert(first, 0, True, axis=0) & present
    run, plan = first.cumsum(0) - 1, np.broadcast_to(np.arange(len(some)), first.shape)
    at = run[first], plan[first]
    shape = int(run.max()) + 1, len(some)

    def of_runs(values: np.ndarray) -> np.ndarray:
        """Return what the first stages of runs have; runs that a plan lacks have what its last one has."""
        found = np.zeros(shape)
        found[at] = values[first]
        ends = np.minimum(np.arange(shape[0])[:, None], run[-1])
        return np.take_along_axis(found, ends, 0)[:, np.ravel(of)]

    *counts, has_embedding, has_head = (of_runs(columns.pop(name)) for name in list(columns)[: -len(strides)])
    multiplicity = np.zeros(shape)
    np.add.at(multiplicity, (run[present], plan[present]), 1.0)
    placed = StageRows(
        blocks=rows.blocks,
        counts=tuple(counts),
        first_stage=of_runs(np.broadcast_to(stage, first.shape)),
        multiplicity=multiplicity[:, np.ravel(of)],
        has_embedding=has_embedding,
        has_head=has_head,
    )
    return placed, {name: of_runs(values) for name, values in strides.items()}


def _strides(table: PlanTable, domain: int, start: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Return the strides of the communicators of a rank on link domains of so many devices.

    As `predict.placement.stage_strides` finds them, of stages whose first ranks are `start`, shape (stages,
    plans); of a communicator that begins where a domain does if there are none.
    """
    experts, width = table.ep * table.etp, table.tp * table.cp * table.dp

    def stride(members: Column, apart: Column) -> np.ndarray:
        """Return that at which as many members share a domain as in the communicator that spreads widest."""
        block = members * apart  # communicators follow each other, `apart` of them interwoven
        if start is None:
            place = np.zeros((1, len(table)), dtype=np.int64)
        else:
            place = _last_place(start, block, np.maximum(width // block, 1), domain)
        last = np.minimum(place + apart, domain) - 1 + (members - 1) * apart
        inside = -(-members // np.where(apart < domain, last // domain + 1, members))
        return np.where(members > 1, domain / inside * (1.0 - 1e-9), 1.0)

    one = np.ones_like(width)
    dense = stride(table.cp * table.dp, table.tp)
    own_experts = stride(np.maximum(width // experts, 1), experts)
    return {
        "tp_stride": stride(table.tp, one),
        "cp_stride": stride(table.cp, table.tp),
        "ep_stride": stride(table.ep, table.etp),
        "etp_stride": stride(table.etp, one),
        "sync_stride": dense,
        "own_stride": dense,
        "expert_stride": own_experts,
        "own_expert_stride": own_experts,
    }


def _last_place(start: np.ndarray, block: Column, number: Column, domain: int) -> np.ndarray:
    """Return the last place in a link domain where one of so many blocks begins that follow each other."""
    place = start % domain + (number - 1) * block
    wraps = place >= domain
    if not np.count_nonzero(wraps):
        return place
    step = np.gcd(block, domain)
    place = np.where(wraps, domain - step + start % step, place)
    partly = wraps & (number * step < domain)  # not all places that blocks may begin at
    if np.count_nonzero(partly):
        some = start % domain
        for i in range(1, int((number * partly).max())):
            some = np.maximum(some, (start + np.minimum(i, number - 1) * block) % domain)
        place = np.where(partly, some, place)
    return place


@lru_cache(maxsize=64)
def _fabric(node: NodeGroup, oversubscription: float, options: tuple[tuple[str, Any], ...]) -> Fabric:
    return fabric_of(node, oversubscription=oversubscription, **dict(options))


def _boundaries(table: PlanTable, rows: StageRows, width: Column, domain: int) -> Boundaries:
    """Return where the runs of stages lie, and which messages leave link domains of so many devices.

    A message leaves where any rank and the one `width` further lie in different domains: over the boundary
    after stage j where a domain ends after rank j * width and before rank (j + 2) * width.
    """

    def far_before(stage: np.ndarray) -> np.ndarray:
        """Return how many boundaries before a stage are left."""
        ends = np.maximum(stage * width, 0) // domain  # domains that end up to the stage's first rank
        at_rank = ends // (width // np.gcd(width, domain))  # where a stage begins: one boundary, else two
        partly = np.maximum((stage + 1) * width - 1, 0) // domain - ends
        return np.minimum(2 * ends - at_rank + partly, np.maximum(stage, 0))

    first = rows.first_stage.astype(np.int64)
    last = first + np.maximum(rows.multiplicity.astype(np.int64) - 1, 0)
    end = table.pp - 1
    wraps = (table.vpp > 1) & (table.pp > 1) & (width * table.pp > domain)

    def far(stage: np.ndarray) -> np.ndarray:
        """Return whether the boundary after a stage is left; that after the last joins the ends."""
        inside = np.minimum(stage, end - 1)
        inner = far_before(inside + 1) - far_before(inside)
        return np.where(stage >= end, wraps, np.where(stage < 0, wraps, inner)) * 1.0

    # Both boundaries of a stage are left where stages are wide, or domains end inside of them.
    both = np.where((width >= domain) | (domain % np.minimum(width, domain) != 0), 2.0, 1.0)
    far_in, far_out = far(first - 1), far(last)
    is_run = last > first
    far_inside, far_first = np.zeros(first.shape), far_out
    if is_run.any():
        far_inside, far_first = (far_before(last) - far_before(first)) * 1.0, far(first)
    each = np.where(
        far_inside > 0,
        np.maximum(both, far_in),
        np.where(is_run, np.maximum(far_in, far_out), far_in + far_out),
    )
    return Boundaries(
        first=first * 1.0, far_inside=far_inside, far_first=far_first, far_last=far_out, far_each=each
    )


def _in_flight(table: PlanTable, stage: np.ndarray, *, expert_overlap: bool) -> np.ndarray:
    """Return the micro-batches whose activations a stage holds, as `predict.memory.in_flight` does."""
    p, m, v = (column.astype(np.float64) for column in (table.pp, table.num_micro_batches, table.vpp))
    behind = p - stage
    ahead = expert_overlap * (table.ep > 1)
    chunks = np.where((v > 1.0) & (p > 1.0), 2.0 * behind - 1.0 + (v - 1.0) * p + ahead, behind * v)
    return np.where((table.schedule == _GPIPE) & (p > 1.0), m, np.minimum(m * v, chunks) / v)
