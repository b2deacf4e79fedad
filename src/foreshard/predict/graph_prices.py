"""Single tasks of every stage of a plan, priced once: what the graph engine lines up.

Every duration comes from `predict.formula`; this file only picks, per stage and chunk, the rows of the
batch, and keeps each op's seconds by part.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

from foreshard.comm.fabric import Fabric, slowest
from foreshard.graph.schedules import Op
from foreshard.predict.batch import Batch, Case, stage_rows
from foreshard.predict.formula import (
    LayerTimes,
    Machine,
    ShardTimes,
    end_times,
    expert_replicas,
    layer_times,
    message_s,
    optimizer_s,
    shard_times,
    sync_times,
    tied_sync_s,
)
from foreshard.spec.model import Model
from foreshard.spec.plan import Group
from foreshard.spec.prediction import TIME_PARTS

T = TypeVar("T")
EMBEDDING, HEAD = -2, -1  # units of a chunk that are no block; blocks carry the index of their kind
_LAYER_FIELDS = tuple(f.name for f in fields(LayerTimes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The units of one chunk in model order: what FSDP gathers at once and buckets are cut from.

    Arrays have shape (units,). `forward` and `backward` are shares of the chunk's op and sum to 1.
    """

    forward: np.ndarray
    backward: np.ndarray
    params: np.ndarray  # trained, dense
    expert_params: np.ndarray
    gather_s: np.ndarray
    regather_s: np.ndarray  # before backward; 0 where weights stay gathered
    scatter_s: np.ndarray
    copy_weights_s: np.ndarray
    copy_gradients_s: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPrices:
    """Durations of one group's tasks.

    Attributes
    ----------
    index : int
        The group of the plan that stands for all groups like it.
    parts : dict of ndarray, shape (4, stages, chunks, 2)
        Seconds of each op by part; last axis: any micro-batch, the last (perhaps short) one.
    units : list of list of Units
        [stage][chunk].
    machines : list of Machine
        Per stage, every field a number; the fabric of gradient collectives is that of the slowest group.
    """

    index: int
    group: Group
    schedule: str
    num_chunks: int
    parts: dict[str, np.ndarray]
    units: list[list[Units]]
    spans: list[list[tuple[int, int]]]
    machines: list[Machine]
    send_forward_s: np.ndarray
    send_backward_s: np.ndarray
    optimizer_s: np.ndarray
    tied_s: float

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.machines)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.group.num_micro_batches

    @property
    def op_s(self) -> np.ndarray:
        """Seconds of each op, shape (4, stages, chunks, 2)."""
        return sum(self.parts.values())


def group_prices(case: Case, batch: Batch) -> list[GroupPrices]:
    """Return the prices of every distinct group of the plan; equal groups appear once."""
    row_of = _rows_of_stages(case)
    layers = [layer_times(kind, batch.machine, batch.recompute) for kind in batch.kinds]
    kinds = {block: i for i, (block, _) in enumerate(case.model.block_kinds())}
    shape = batch.multiplicity.shape
    table = {
        name: np.stack([np.broadcast_to(getattr(times, name), shape) for times in layers], axis=-1)
        for name in _LAYER_FIELDS
    }
    distinct: dict[Any, int] = {}
    for g, group in enumerate(case.plan.groups):
        distinct.setdefault(_identity(case, group), g)
    fabric = _common_fabric(batch)
    return [_GroupPricer(case, batch, g, row_of[g], table, kinds, fabric).prices() for g in distinct.values()]


def _rows_of_stages(case: Case) -> list[list[int]]:
    """Row of the batch on which each stage of each group lies."""
    rows: list[list[int]] = [[0] * len(group.stages) for group in case.plan.groups]
    seen = [0] * len(case.plan.groups)
    for row in stage_rows(case):
        for stage in row.stages:
            rows[row.group][stage] = seen[row.group]
        seen[row.group] += 1
    return rows


def _identity(case: Case, group: Group) -> Any:
    """What makes two groups the same but for the numbers of their ranks."""
    cluster = case.cluster
    stages = []
    for i, stage in enumerate(group.stages):
        where = tuple(dict.fromkeys(id(cluster.node_group_of(r)) for r in stage.ranks)) if len(cluster.nodes) > 1 else ()
        following = group.stages[(i + 1) % len(group.stages)]
        stages.append((replace(stage, ranks=()), len(stage.ranks), where, _crosses(case, stage, following)))
    return group.share, group.micro_batch, group.schedule, group.sp, tuple(stages)


def _crosses(case: Case, here: Any, there: Any) -> float:
    """1 when a stage and the next do not share device links."""
    cluster = case.cluster
    one, other = here.ranks[0], there.ranks[0]
    nodes = cluster.node_group_of(one)
    if cluster.node_of(one) == cluster.node_of(other):
        return 0.0
    before = sum(g.num_devices for g in cluster.nodes[: [id(g) for g in cluster.nodes].index(id(nodes))])
    same = cluster.node_group_of(other) is nodes
    return float(not same or (one - before) // nodes.nvlink_domain != (other - before) // nodes.nvlink_domain)


def _at(item: T, row: int, column: int, shape: tuple[int, int]) -> T:
    """One place of a dataclass of arrays, as numbers."""
    values = {f.name: np.broadcast_to(getattr(item, f.name), shape)[row, column] for f in fields(item)}  # type: ignore[arg-type]
    return type(item)(**values)


def _machine_at(batch: Batch, row: int, column: int) -> Machine:
    shape, machine = batch.multiplicity.shape, batch.machine
    places = {
        name: _at(getattr(machine, name), row, column, shape) for name in ("kernels", "fabric", "traits", "rank")
    }
    return replace(machine, **places)


def _common_fabric(batch: Batch) -> Fabric | None:
    """The fabric that gradient collectives over all groups see; None when all stages share one."""
    shape = batch.multiplicity.shape
    places = [(r, g) for g in range(shape[1]) for r in range(shape[0]) if batch.multiplicity[r, g] > 0]
    fabric = batch.machine.fabric
    if all(np.ptp(getattr(fabric, f.name)) == 0.0 for f in fields(Fabric)):
        return None
    return slowest([_at(fabric, r, g, shape) for r, g in places])


def _chunk_units(model: Model, span: tuple[int, int], kinds: dict[Any, int]) -> list[int]:
    """Units of the layers [start, stop): kinds of blocks, and the ends."""
    last = model.num_layers
    units = [EMBEDDING] if span[0] == 0 else []
    units += [kinds[model.blocks[layer - 1]] for layer in range(max(1, span[0]), min(last + 1, span[1]))]
    if span[1] == last + 2:
        units += [kinds[model.blocks[-1]]] * model.num_next_token + [HEAD]
    return units


class _GroupPricer:
    """Prices one group: tables of the batch in, arrays by op, stage and chunk out."""

    def __init__(self, case: Case, batch: Batch, g: int, rows: list[int], table: dict[str, np.ndarray],
                 kinds: dict[Any, int], fabric: Fabric | None):  # fmt: skip
        self.case, self.g, self.kinds, self.rows = case, g, kinds, rows
        self.group = case.plan.groups[g]
        self.pipeline = {
            name: float(np.asarray(getattr(batch.pipeline, name))[0, g]) for name in batch.pipeline.__slots__
        }
        self.layers = {name: value[rows, g] for name, value in table.items()}  # (stages, kinds)
        one = {row: _machine_at(batch, row, g) for row in dict.fromkeys(rows)}
        ends = {row: self._ends(machine) for row, machine in one.items()}
        self.local = [one[row] for row in rows]
        self.machines = [machine if fabric is None else replace(machine, fabric=fabric) for machine in self.local]
        self.ends = [ends[row] for row in rows]
        self.constants = batch.machine.constants
        frozen = np.array([float(np.max(kind.frozen)) for kind in batch.kinds])
        trained = np.array([max(0.0, float(np.asarray(kind.trainable)[0, g])) for kind in batch.kinds])
        self.trained, self.expert_trained = trained, 1.0 - frozen
        merged = len(self.group.stages) == 1 and self.group.num_chunks > 1
        self.spans = [[(s.layers[0][0], s.layers[-1][1])] if merged else list(s.layers) for s in self.group.stages]
        self.num_chunks = len(self.spans[0])
        self.units = [[_chunk_units(case.model, span, kinds) for span in spans] for spans in self.spans]

    def _ends(self, machine: Machine) -> dict[str, float]:
        p = self.pipeline
        times = end_times(p["hidden"], p["vocab"], p["head_rows"], machine, frozen=p["head_frozen"], heads=p["heads"])
        return {name: float(getattr(times, name)) for name in times.__slots__}

    def prices(self) -> GroupPrices:
        """Return everything the lowering needs of this group."""
        parts = self._parts()
        known: dict[Any, Units] = {}
        units = []
        for s, row in enumerate(self.units):
            units.append([])
            for c, names in enumerate(row):
                key = self.rows[s], tuple(names), self._tied_here(s)
                if key not in known:
                    known[key] = self._unit_prices(s, c)
                units[s].append(known[key])
        forward_s, backward_s = self._sends()
        schedule = self.group.schedule
        if schedule == "interleaved" and self.num_chunks == 1:
            schedule = "1f1b"
        return GroupPrices(
            index=self.g,
            group=self.group,
            schedule=schedule,
            num_chunks=self.num_chunks,
            parts=parts,
            units=units,
            spans=self.spans,
            machines=self.machines,
            send_forward_s=forward_s,
            send_backward_s=backward_s,
            optimizer_s=self._optimizers(units),
            tied_s=self._tied_s(),
        )

    def _parts(self) -> dict[str, np.ndarray]:
        """Seconds of each op by part, host time included."""
        stages, chunks = len(self.units), self.num_chunks
        counts = np.zeros((stages, chunks, len(self.kinds)))
        first, last = np.zeros((stages, chunks)), np.zeros((stages, chunks))
        for s, row in enumerate(self.units):
            for c, units in enumerate(row):
                for unit in units:
                    if unit >= 0:
                        counts[s, c, unit] += 1.0
                first[s, c], last[s, c] = EMBEDDING in units, HEAD in units
        sums = {name: np.einsum("sck,sk->sc", counts, value) for name, value in self.layers.items()}
        ends = {name: np.array([end[name] for end in self.ends])[:, None] for name in self.ends[0]}
        device, host = _op_parts(sums, ends, first, last, self._host_between())
        return _with_host(device, host, self._short(), self.constants.host_sharpness)

    def _host_between(self) -> np.ndarray:
        """Host seconds of an op outside its layers, which only whole-step graphs remove; shape (stages, 1)."""
        launched = np.array([float(machine.traits.graphs) < 1.0 for machine in self.machines])
        return self.constants.host_micro_batch * launched[:, None]

    def _short(self) -> np.ndarray:
        """Samples of the last micro-batch over those of the others, shape (stages, 1)."""
        group = self.group
        rest = group.share - (group.num_micro_batches - 1) * group.micro_batch
        share = [
            -(-rest // stage.inner_dp) / -(-group.micro_batch // stage.inner_dp) if not stage.rank_shares
            else rest / group.micro_batch
            for stage in group.stages
        ]  # fmt: skip
        return np.array(share)[:, None]

    def _tied_here(self, s: int) -> bool:
        """Whether the head of this stage shares the embedding's table on it."""
        return self.pipeline["tied"] > 0 and any(EMBEDDING in names for names in self.units[s])

    def _unit_prices(self, s: int, c: int) -> Units:
        """Prices of the units of one chunk."""
        units, machine, end, p = np.array(self.units[s][c]), self.machines[s], self.ends[s], self.pipeline
        table = p["hidden"] * p["vocab"] / float(machine.rank.tp)
        at = {name: value[s] for name, value in self.layers.items()}
        forward = at["forward"] + at["tensor_forward"] + at["context_forward"] + at["expert_forward"]
        backward = (
            at["backward_input"] + at["backward_weight"] + at["recompute"] + at["tensor_backward"]
            + at["tensor_recompute"] + at["context_backward"] + at["expert_backward"] + at["expert_recompute"]
        )  # fmt: skip
        head_table = 0.0 if self._tied_here(s) else table
        is_end = units < 0

        def column(blocks: np.ndarray, embedding: float, head: float) -> np.ndarray:
            return np.append(blocks, [embedding, head])[units]  # EMBEDDING is -2, HEAD is -1

        ends_trained = 1.0 - p["head_frozen"]
        dense = column(at["dense_params"], table, head_table)
        expert = column(at["expert_params"], 0.0, 0.0)
        trained = column(at["dense_params"] * self.trained, table * ends_trained, head_table * ends_trained)
        expert_trained = column(at["expert_params"] * self.expert_trained, 0.0, 0.0)
        whole, part = (
            _shard_sums(*params, machine, units.shape) for params in ((dense, expert), (trained, expert_trained))
        )
        return Units(
            forward=_shares(
                column(forward, end["embedding_forward"] + end["embedding_tensor"] / 2,
                       end["head_forward"] + end["head_tensor"] / 2)
            ),  # fmt: skip
            backward=_shares(
                column(backward, end["embedding_backward"] + end["embedding_tensor"] / 2,
                       end["head_backward"] + end["head_tensor"] / 2)
            ),  # fmt: skip
            params=trained,
            expert_params=expert_trained,
            gather_s=whole["gather"],
            regather_s=np.where(is_end, 0.0, whole["gather"]),
            scatter_s=part["scatter"],
            copy_weights_s=whole["copy_weights"],
            copy_gradients_s=part["copy_gradients"],
        )

    def _sends(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a message over each boundary (the last joins the ends), forward and backward."""
        stages = self.group.stages
        count = len(stages)
        forward, backward = np.zeros(count), np.zeros(count)
        for i in range(count if count > 1 else 0):
            j = (i + 1) % count
            crosses = _crosses(self.case, stages[i], stages[j])
            here, there = (
                float(message_s(self.pipeline["hidden"], crosses, self.local[k])) for k in (i, j)
            )
            forward[i] = backward[i] = max(here, there)
        return forward, backward

    def _optimizers(self, units: list[list[Units]]) -> np.ndarray:
        """Seconds of the optimizer on each stage."""
        return np.array([
            float(optimizer_s(
                sum(u.params.sum() for u in row), sum(u.expert_params.sum() for u in row),
                sum(sum(unit >= 0 for unit in names) for names in self.units[s]), self.machines[s],
            ))
            for s, row in enumerate(units)
        ])  # fmt: skip

    def _tied_s(self) -> float:
        p = self.pipeline
        if not p["tied"] or len(self.group.stages) == 1:
            return 0.0
        ends = self.group.stages[0], self.group.stages[-1]
        crosses = _crosses(self.case, *ends)
        return max(float(tied_sync_s(p["hidden"], p["vocab"], crosses, self.machines[i])) for i in (0, -1))


def _shard_sums(dense: np.ndarray, expert: np.ndarray, machine: Machine, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Fully sharded tasks of dense and expert weights; experts are cut over the ranks that hold the same."""
    if machine.rank.zero < 3:
        return dict.fromkeys(ShardTimes.__slots__, np.zeros(shape))
    times = [shard_times(dense, machine)]
    if np.any(expert):
        rank = machine.rank
        alike = expert_replicas(rank)
        rank = replace(rank, dp=alike, cp=1.0, shard=alike, sync_stride=rank.ep * rank.etp)
        times.append(shard_times(expert, replace(machine, rank=rank)))
    return {name: np.broadcast_to(sum(getattr(t, name) for t in times), shape) for name in times[0].__slots__}


def _shares(seconds: np.ndarray) -> np.ndarray:
    total = seconds.sum()
    return seconds / total if total > 0 else np.full(len(seconds), 1.0 / max(1, len(seconds)))


def _op_parts(
    sums: dict[str, np.ndarray], ends: dict[str, np.ndarray], first: np.ndarray, last: np.ndarray, between: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Device seconds by part, shape (4, stages, chunks) each, and host seconds of every op."""
    device = {name: np.zeros((4, *first.shape)) for name in TIME_PARTS}
    edge = first * ends["embedding_tensor"] / 2 + last * ends["head_tensor"] / 2
    weight = sums["backward_weight"] + first * ends["embedding_backward"] + last * ends["head_backward"] / 2
    given = sums["backward_input"] + last * ends["head_backward"] / 2
    device["compute"][Op.FORWARD] = (
        sums["forward"] + first * ends["embedding_forward"] + last * ends["head_forward"]
    )
    device["compute"][Op.BACKWARD] = given + weight
    device["compute"][Op.BACKWARD_INPUT] = given
    device["compute"][Op.BACKWARD_WEIGHT] = weight
    device["tensor_comm"][Op.FORWARD] = sums["tensor_forward"] + edge
    device["context_comm"][Op.FORWARD] = sums["context_forward"]
    device["expert_comm"][Op.FORWARD] = sums["expert_forward"]
    for op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        device["recompute"][op] = sums["recompute"]
        device["tensor_comm"][op] = sums["tensor_backward"] + sums["tensor_recompute"] + edge
        device["context_comm"][op] = sums["context_backward"]
        device["expert_comm"][op] = sums["expert_backward"] + sums["expert_recompute"]
    back = sums["host_backward"] + between
    return device, np.stack([sums["host_forward"] + between, back, back / 2, back / 2])


def _with_host(
    device: dict[str, np.ndarray], host: np.ndarray, short: np.ndarray, sharpness: float
) -> dict[str, np.ndarray]:
    """Add the axis of the last micro-batch, scaled by its samples, and what the host adds to each op.

    The host runs ahead from op to op, so what counts is its time over the device's for a forward and
    its backward.
    """
    scale = np.stack([np.ones_like(short), short], axis=-1)  # (stages, 1, 2)
    parts = {name: value[..., None] * scale for name, value in device.items()}
    busy = sum(parts.values())
    pair = [Op.FORWARD, Op.BACKWARD]
    ratio = host[pair].sum(0)[..., None] / np.maximum(busy[pair].sum(0), 1e-12)
    parts["host"] = busy * ((1.0 + ratio**sharpness) ** (1.0 / sharpness) - 1.0)
    return parts


def bucket_sync_s(params: np.ndarray, expert_params: np.ndarray, machine: Machine) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds of reducing each bucket and of gathering its updated weights.

    Parameters
    ----------
    params, expert_params : ndarray, shape (buckets,)
        Trained parameters of this rank in each bucket.
    machine : Machine
        Of one stage, every field a number.
    """
    rank = machine.rank
    reduce, gather = sync_times(params, rank.dp * rank.cp, rank.sync_stride, machine)
    if np.any(expert_params):
        more = sync_times(expert_params, expert_replicas(rank), rank.ep * rank.etp, machine)
        reduce, gather = reduce + more[0], gather + more[1]
    return np.broadcast_to(reduce, params.shape), np.broadcast_to(gather, params.shape)
