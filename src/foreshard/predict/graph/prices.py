"""Single tasks of every stage of a plan, priced once: what the graph engine lines up.

Every duration comes from `predict.tasks`; this file only picks, per stage and chunk, the rows of the
batch, and keeps each op's seconds by part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from foreshard.graph.pipeline_schedules import ZERO_BUBBLE, Op
from foreshard.predict.batch import PLACED, Batch, PlannedRun, short_samples
from foreshard.predict.graph.ops import OpSeconds, op_parts
from foreshard.predict.machine import Machine
from foreshard.predict.placement import crosses_node, first_of_equals, link_domains
from foreshard.predict.tasks.collectives import (
    ShardTimes,
    accumulates_whole,
    across_groups_s,
    every_reduce_s,
    has_replicas,
    held_copies_s,
    message_s,
    shard_times,
    slowed_s,
    tied_sync_s,
)
from foreshard.predict.tasks.formula import LayerTimes, end_times, layer_times
from foreshard.predict.tasks.host import optimizer_s
from foreshard.predict.tasks.orthogonal import orthogonal_s
from foreshard.spec.model import Model
from foreshard.spec.plan import TURNING, Group

T = TypeVar("T")
EMBEDDING, HEAD = -2, -1  # units of a chunk that are no block; blocks carry the index of their kind
_ENDS = ("embedding", "head")
_LAYER_FIELDS = tuple(f.name for f in fields(LayerTimes))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerUnits:
    """The units of one chunk in model order: what FSDP gathers at once and buckets are cut from.

    Arrays have shape (units,). `forward_s` and `backward_s` are the seconds of each unit by part, `forward`
    and `backward` its shares of the chunk's op, which sum to 1.
    """

    forward_s: dict[str, np.ndarray]
    backward_s: dict[str, np.ndarray]
    params: np.ndarray  # trained, dense
    expert_params: np.ndarray
    gather_s: np.ndarray
    counting_s: np.ndarray  # of the forward of the unit before, until the gather leaves
    regather_s: np.ndarray  # before backward; 0 where weights stay gathered
    scatter_s: np.ndarray
    copy_weights_s: np.ndarray
    copy_again_s: np.ndarray  # of weights before backward; 0 where they stay gathered
    copy_gradients_s: np.ndarray
    add_gradients_s: np.ndarray  # to whole ones of other micro-batches

    forward: np.ndarray = field(init=False)
    backward: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        for name, seconds in (("forward", self.forward_s), ("backward", self.backward_s)):
            object.__setattr__(self, name, _shares(sum(seconds.values(), np.zeros(len(self.params)))))

    def passes(self, machine: Machine) -> tuple[LayerUnits, LayerUnits]:
        """Return the units of any micro-batch, and of the last one, which may reduce the gradients of all."""
        if not accumulates_whole(machine):
            return self, self
        whole = replace(self, scatter_s=0.0 * self.scatter_s, copy_gradients_s=self.add_gradients_s)
        return whole, self


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPrices:
    """Durations of one group's tasks."""

    # the group of the plan that stands for all groups like it
    index: int
    group: Group
    schedule: str
    num_chunks: int
    ops: OpSeconds
    # seconds of each op by part; last axis: any micro-batch, the last (perhaps short) one; shape (4, stages,
    # chunks, 2)
    parts: dict[str, np.ndarray]
    # [stage][chunk]
    units: list[list[LayerUnits]]
    spans: list[list[tuple[int, int]]]
    machines: list[Machine]  # per stage, every field a number
    send_s: np.ndarray  # of a message over each boundary, one way
    crosses: np.ndarray  # per boundary, the last joins the ends: whether messages leave a link domain
    optimizer_s: np.ndarray
    # per stage, once a step: summing sharded gradients over the groups, copying units that a pipeline holds
    across_s: np.ndarray
    tied_s: float
    data_speed: float = 1.0  # of gradient and weight collectives, for what-if questions
    # seconds that a thread of the host takes to launch each op, beside it; None: they are parts of the op;
    # shape (4, stages, chunks)
    launch_s: np.ndarray | None = None

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.machines)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.group.num_micro_batches

    @property
    def num_tasks(self) -> int:
        """About how many tasks the group has."""
        sharded = [float(machine.rank.zero) >= 3 for machine in self.machines]
        pieces = sum(
            5 * sum(len(units.params) for units in row) if cut else 4 * self.num_chunks
            for cut, row in zip(sharded, self.units, strict=True)
        )
        return self.num_micro_batches * pieces

    @property
    def overlap_p2p(self) -> bool:
        """Whether messages run beside the work."""
        beside = float(self.machines[0].traits.p2p_overlap) > 0
        return self.schedule in ZERO_BUBBLE or (self.schedule == "interleaved" and beside)

    def without(self, rounds: int) -> GroupPrices:
        """Return the group with fewer micro-batches: so many times its stages less."""
        group = self.group
        share = group.share - rounds * self.num_stages * group.micro_batch
        return replace(self, group=replace(group, share=share))

    def on_host_thread(self) -> GroupPrices:
        """Return the group with launches on a thread of the host, beside the ops."""
        ops = replace(self.ops, host=0.0 * self.ops.host)
        return replace(self, ops=ops, parts=ops.parts(), launch_s=self.ops.host)

    def sharding_part(self, stage: int) -> str:
        """Return the part of a step that sharded weights of a stage belong to.

        On one rank they are cast and copied: nothing is sent.
        """
        sends = self.tied_s > 0.0 or bool(has_replicas(self.machines[stage].rank))
        return "data_comm" if sends else "compute"

    @property
    def device_s(self) -> np.ndarray:
        """Seconds of each op on the device without its host and what sharding adds: (4, stages, chunks)."""
        return np.sum(list(self.ops.device.values()), axis=0)

    @property
    def op_s(self) -> np.ndarray:
        """Seconds of each op, shape (4, stages, chunks, 2)."""
        return np.sum(list(self.parts.values()), axis=0)


def group_prices(
    case: PlannedRun, batch: Batch, speeds: Mapping[str, float] | None = None
) -> list[GroupPrices]:
    """Return the prices of every distinct group of the plan; equal groups appear once.

    `speeds` makes classes of kernels so many times as fast (`tasks.kernels.KERNELS`).
    """
    layers = [layer_times(kind, batch.machine, batch.recompute, speeds=speeds) for kind in batch.kinds]
    kinds = {block: i for i, (block, _) in enumerate(case.model.block_kinds())}
    shape = batch.multiplicity.shape
    table = {
        name: np.stack([np.broadcast_to(getattr(times, name), shape) for times in layers], axis=-1)
        for name in _LAYER_FIELDS
    }
    distinct = dict.fromkeys(first_of_equals(case.cluster, case.plan))
    # Runs of equal stages follow each other, so their lengths tell the row of every stage.
    row_of = {
        g: np.repeat(np.arange(shape[0]), batch.multiplicity[:, g].astype(int)).tolist() for g in distinct
    }
    return [_GroupPricer(case, batch, g, row_of[g], table, kinds, speeds).prices() for g in distinct]


def _at(item: T, row: int, column: int, shape: tuple[int, int]) -> T:
    """One place of a dataclass of arrays, or of such dataclasses, as numbers."""
    values = {f.name: getattr(item, f.name) for f in fields(item)}  # type: ignore[arg-type]
    return type(item)(
        **{
            name: _at(value, row, column, shape)
            if is_dataclass(value)
            else np.broadcast_to(value, shape)[row, column]
            for name, value in values.items()
        }
    )


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

    def __init__(
        self,
        case: PlannedRun,
        batch: Batch,
        g: int,
        rows: list[int],
        table: dict[str, np.ndarray],
        kinds: dict[Any, int],
        speeds: Mapping[str, float] | None,
    ):
        self.case, self.g, self.kinds, self.rows, self.speeds = case, g, kinds, rows, speeds
        self.group, self.domains = case.plan.groups[g], link_domains(case.cluster)
        self.pipeline = {
            name: float(np.asarray(getattr(batch.pipeline, name))[0, g]) for name in batch.pipeline.__slots__
        }
        self.layers = {name: value[rows, g] for name, value in table.items()}  # (stages, kinds)
        shape, machine = batch.multiplicity.shape, batch.machine
        one = {
            row: replace(machine, **{name: _at(getattr(machine, name), row, g, shape) for name in PLACED})
            for row in dict.fromkeys(rows)
        }
        ends = {row: self._ends(machine) for row, machine in one.items()}
        self.machines = [one[row] for row in rows]
        self.ends = [ends[row] for row in rows]
        self.constants = batch.machine.constants
        iterations = orthogonal_s(batch.kinds, batch.counts, batch.machine)
        self.orthogonal = np.broadcast_to(iterations, batch.multiplicity.shape)[rows, g]
        frozen = np.array([float(np.max(kind.frozen)) for kind in batch.kinds])
        trained = np.array([max(0.0, float(np.asarray(kind.trainable)[0, g])) for kind in batch.kinds])
        self.trained, self.expert_trained = trained, 1.0 - frozen
        merged = len(self.group.stages) == 1 and self.group.num_chunks > 1
        stages = self.group.stages
        self.spans = [[(s.layers[0][0], s.layers[-1][1])] if merged else list(s.layers) for s in stages]
        self.num_chunks = len(self.spans[0])
        self.units = [[_chunk_units(case.model, span, kinds) for span in spans] for spans in self.spans]

    def _ends(self, machine: Machine) -> dict[str, float]:
        p = self.pipeline
        sizes = (p["hidden"], p["vocab"], p["head_rows"])
        times = end_times(*sizes, machine, frozen=p["head_frozen"], heads=p["heads"], speeds=self.speeds)
        return {name: float(getattr(times, name)) for name in times.__slots__}

    def prices(self) -> GroupPrices:
        """Return everything the lowering needs of this group."""
        known: dict[Any, LayerUnits] = {}
        units: list[list[LayerUnits]] = []
        for s, row in enumerate(self.units):
            units.append([])
            for c, names in enumerate(row):
                key = self.rows[s], tuple(names), self._tied_here(s)
                if key not in known:
                    known[key] = self._unit_prices(s, c)
                units[s].append(known[key])
        crosses, send_s = self._sends()
        once_s, across_s = self._once_s(units)
        schedule = self.group.schedule
        if schedule in ("interleaved", *TURNING) and self.num_chunks == 1:
            schedule = "1f1b"
        if len(self.units) == 1 and schedule in ("zb-h1", "zb-h2"):  # there is no bubble to fill
            schedule = "1f1b"
        ops = self._ops(units)
        return GroupPrices(
            index=self.g,
            group=self.group,
            schedule=schedule,
            num_chunks=self.num_chunks,
            ops=ops,
            parts=ops.parts(),
            units=units,
            spans=self.spans,
            machines=self.machines,
            send_s=send_s,
            crosses=crosses,
            optimizer_s=once_s,
            across_s=across_s,
            tied_s=self._tied_s(),
        )

    def _ops(self, priced: list[list[LayerUnits]]) -> OpSeconds:
        """Seconds of each op by part, and of the host that launches it."""
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
        ends |= self._table_reduces()
        launched = np.array([float(machine.traits.graphs) < 1.0 for machine in self.machines])
        between = self.constants.host_micro_batch * launched[:, None]  # the host's seconds outside the layers
        device, host = op_parts(sums, ends, first, last, between)
        return OpSeconds(
            device=device,
            host=host,
            outside=outside_s(priced, self.machines, device),
            short=np.array([short_samples(self.group, stage) for stage in self.group.stages])[:, None],
            sharpness=self.constants.host_sharpness,
        )

    def _tables(self, s: int) -> tuple[float, float]:
        """Parameters of the embedding and of the head on a rank of a stage that holds them."""
        table = self.pipeline["hidden"] * self.pipeline["vocab"] / float(self.machines[s].rank.tp)
        return table, 0.0 if self._tied_here(s) else table

    def _table_reduces(self) -> dict[str, np.ndarray]:
        """Seconds of reducing the gradients of a table every micro-batch (ZeRO 2), shape (stages, 1)."""
        trained = 1.0 - self.pipeline["head_frozen"]
        rows = []
        for s, (machine, end) in enumerate(zip(self.machines, self.ends, strict=True)):
            embedding, head = (trained * params for params in self._tables(s))
            beside = end["head_backward"]
            rows.append(
                [every_reduce_s(embedding, 0.0, machine, 0.0), every_reduce_s(head, 0.0, machine, beside)]
            )
        reduces = np.array(rows, dtype=float)
        return {f"{end}_reduce": reduces[:, i, None] for i, end in enumerate(_ENDS)}

    def _table_again(self, s: int) -> float:
        """Return whether the embedding is gathered again before its backward; one that is the head stays.

        Source
        ------
        torch 2.13 distributed/fsdp/_fully_shard/_fsdp_state.py _pre_backward (every unit whose output has a
        gradient); torchtitan b5bcd76 distributed/fsdp.py and accelerate fsdp_utils.py (norm and head alone
        stay gathered); DeepSpeed edaa722 runtime/zero/parameter_offload.py PreBackwardFunctionForModule.
        """
        return float(self.machines[s].traits.regathers_table) * (self.pipeline["tied"] <= 0)

    def _tied_here(self, s: int) -> bool:
        """Whether the head of this stage shares the embedding's table on it."""
        return self.pipeline["tied"] > 0 and any(EMBEDDING in names for names in self.units[s])

    def _unit_prices(self, s: int, c: int) -> LayerUnits:
        """Prices of the units of one chunk."""
        units, machine, end, p = np.array(self.units[s][c]), self.machines[s], self.ends[s], self.pipeline
        table, head_table = self._tables(s)
        at = {name: value[s] for name, value in self.layers.items()}
        half = [end[f"{name}_tensor"] / 2 for name in _ENDS]
        is_end = units < 0

        def column(blocks: np.ndarray, embedding: float, head: float) -> np.ndarray:
            return np.append(blocks, [embedding, head])[units]  # EMBEDDING is -2, HEAD is -1

        starts = unit_starts(is_end, int(machine.traits.wrap))

        def joined(modules: np.ndarray) -> np.ndarray:
            return np.add.reduceat(modules, starts)

        ends_trained = 1.0 - p["head_frozen"]
        dense = joined(column(at["dense_params"], table, head_table))
        expert = joined(column(at["expert_params"], 0.0, 0.0))
        trained = joined(
            column(at["dense_params"] * self.trained, table * ends_trained, head_table * ends_trained)
        )
        expert_trained = joined(column(at["expert_params"] * self.expert_trained, 0.0, 0.0))
        moved = trained, expert_trained
        whole = _shard_sums(dense, expert, moved, machine)
        part = _shard_sums(*moved, moved, machine)
        behind = (dense + expert)[::-1].cumsum()[::-1] - dense - expert
        again = (
            float(machine.traits.regathers)
            * (behind >= float(machine.traits.kept_elements))
            * np.where(is_end, (units == EMBEDDING) * self._table_again(s), 1.0)[starts]
        )
        forward_s = {
            "compute": column(at["forward"], *(end[f"{name}_forward"] for name in _ENDS)),
            "tensor_comm": column(at["tensor_forward"], *half),
            "context_comm": column(at["context_forward"], 0.0, 0.0),
            "expert_comm": column(at["expert_forward"], 0.0, 0.0),
        }
        backward_s = {
            "compute": column(
                at["backward_input"] + at["backward_weight"], *(end[f"{name}_backward"] for name in _ENDS)
            ),
            "recompute": column(at["recompute"], 0.0, 0.0),
            "tensor_comm": column(at["tensor_backward"] + at["tensor_recompute"], *half),
            "context_comm": column(at["context_backward"], 0.0, 0.0),
            "expert_comm": column(at["expert_backward"] + at["expert_recompute"], 0.0, 0.0),
        }
        counting = column(at["counting"], 0.0, 0.0)
        return LayerUnits(
            forward_s={name: joined(seconds) for name, seconds in forward_s.items()},
            backward_s={name: joined(seconds) for name, seconds in backward_s.items()},
            params=trained,
            expert_params=expert_trained,
            gather_s=whole["gather"],
            counting_s=np.append(
                0.0, _counted_s(counting, np.sum(list(forward_s.values()), axis=0), starts)[:-1]
            ),
            regather_s=again * whole["gather"],
            scatter_s=part["scatter"],
            copy_weights_s=whole["copy_weights"],
            copy_again_s=again * whole["copy_weights"],
            copy_gradients_s=part["copy_gradients"],
            add_gradients_s=part["add_gradients"],
        )

    def _sends(self) -> tuple[np.ndarray, np.ndarray]:
        """Whether messages over each boundary leave a link domain (the last joins the ends), and seconds."""
        stages = self.group.stages
        count = len(stages)
        crosses, send_s = np.zeros(count, dtype=bool), np.zeros(count)
        for i in range(count if count > 1 else 0):
            j = (i + 1) % count
            crosses[i] = crosses_node(stages[i], stages[j], self.domains)
            hidden = self.pipeline["hidden"]
            send_s[i] = max(float(message_s(hidden, crosses[i], self.machines[k])) for k in (i, j))
        return crosses, send_s

    def _once_s(self, units: list[list[LayerUnits]]) -> tuple[np.ndarray, np.ndarray]:
        """Seconds on each stage of the optimizer, and of what is summed or copied once a step."""
        optimizer, across = np.zeros((2, len(units)))
        for s, row in enumerate(units):
            machine = self.machines[s]
            params, experts = sum(u.params.sum() for u in row), sum(u.expert_params.sum() for u in row)
            num_blocks = sum(sum(unit >= 0 for unit in names) for names in self.units[s])
            update = optimizer_s(params, experts, num_blocks, machine, self.pipeline["num_devices"])
            optimizer[s] = float(update) + self.orthogonal[s]
            across[s] = float(
                across_groups_s(params, experts, machine) + held_copies_s(params, experts, machine)
            )
        return optimizer, across

    def _tied_s(self) -> float:
        p = self.pipeline
        if not p["tied"] or len(self.group.stages) == 1:
            return 0.0
        ends = self.group.stages[0], self.group.stages[-1]
        crosses = crosses_node(*ends, self.domains)
        return max(float(tied_sync_s(p["hidden"], p["vocab"], crosses, self.machines[i])) for i in (0, -1))


def unit_starts(is_end: np.ndarray, wrap: int) -> np.ndarray:
    """Return the first module of each unit: an end, or so many blocks that follow each other; 0 for all.

    Examples
    --------
    >>> unit_starts(np.array([True, False, False, False, True]), 2).tolist()
    [0, 1, 3, 4]
    """
    if wrap == 0:
        return np.zeros(1, dtype=np.int64)
    blocks = np.cumsum(~is_end) - 1
    return np.flatnonzero(is_end | (blocks % wrap == 0))


def _counted_s(counting: np.ndarray, forward: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return seconds of each unit's forward until the host has counted the tokens of its last experts."""
    if len(starts) == len(counting):
        return counting
    found = np.zeros(len(starts))
    for unit, (start, stop) in enumerate(pairwise([*starts.tolist(), len(counting)])):
        stops = np.flatnonzero(counting[start:stop])
        if len(stops):
            last = start + int(stops[-1])
            found[unit] = forward[start:last].sum() + counting[last]
    return found


def piece_times(
    op: int, units: LayerUnits, machine: Machine, busy_s: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return of an op cut at its units, in the order of its pieces: shares, copies, and what slows them.

    `busy_s` are the device seconds of the op.
    """
    if op == Op.FORWARD:
        shares, moved, copies = units.forward, units.gather_s, units.copy_weights_s
    else:
        shares, moved, copies = units.backward[::-1], np.zeros(len(units.params)), np.zeros(len(units.params))
    if op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        moved = moved + units.regather_s[::-1]
        copies = copies + units.copy_again_s[::-1]
    if op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
        moved = moved + units.scatter_s[::-1]
        copies = copies + units.copy_gradients_s[::-1]
    busy = busy_s * shares
    if op == Op.FORWARD:
        busy = busy - np.append(units.counting_s[1:], 0.0)
    return shares, copies, slowed_s(moved, busy, machine)


def outside_s(
    units: list[list[LayerUnits]], machines: list[Machine], device: dict[str, np.ndarray]
) -> np.ndarray:
    """Return device seconds that sharded weights add to a forward and a backward: (stages, chunks, 2).

    The last axis are any micro-batch, and the last one. Copies, compute that collectives slow, and those
    that run in turn with it. `device` are the seconds of ops by part, shape (4, stages, chunks).
    """
    busy_s = np.sum(list(device.values()), axis=0)
    outside = np.zeros((len(units), len(units[0]), 2))
    for s, (row, machine) in enumerate(zip(units, machines, strict=True)):
        if float(machine.rank.zero) < 3:
            continue
        alone = float(machine.traits.grad_overlap) <= 0
        for c, each in enumerate(row):
            for i, u in enumerate(each.passes(machine)):
                for op in (Op.FORWARD, Op.BACKWARD):
                    _, copies, slowed = piece_times(op, u, machine, float(busy_s[op, s, c]))
                    outside[s, c, i] += copies.sum() + slowed.sum()
                outside[s, c, i] += alone * (u.gather_s + u.regather_s + u.scatter_s).sum()
    return outside


def _shard_sums(
    dense: np.ndarray, expert: np.ndarray, trained: tuple[np.ndarray, np.ndarray], machine: Machine
) -> dict[str, np.ndarray]:
    """Return the sharded tasks of all weights; experts are cut over the ranks that hold the same."""
    if machine.rank.zero < 3:
        return dict.fromkeys(ShardTimes.__slots__, np.zeros(dense.shape))
    times = shard_times(dense, expert, machine, trained=trained)
    return {name: np.broadcast_to(getattr(times, name), dense.shape) for name in times.__slots__}


def _shares(seconds: np.ndarray) -> np.ndarray:
    total = seconds.sum()
    return seconds / total if total > 0 else np.full(len(seconds), 1.0 / max(1, len(seconds)))
