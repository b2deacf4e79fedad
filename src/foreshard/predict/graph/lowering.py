"""Lowering of a whole step: pipelines of all distinct groups, sharded weights, gradient sync, optimizer.

A pipeline comes from `graph.pipeline`; where a collective starts or ends inside an op, the op is cut
into pieces. A collective beside compute slows it: the pieces carry that time as `data_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from foreshard.graph.pipeline import PipelineShape, pipeline_durations, pipeline_shape
from foreshard.graph.pipeline_schedules import Op
from foreshard.graph.program import Kind, Program, ProgramBuilder
from foreshard.predict.graph.buckets import Buckets, chunk_buckets, slowdown_s
from foreshard.predict.graph.launches import with_launches
from foreshard.predict.graph.prices import GroupPrices, LayerUnits, piece_times

_LAST_GRADIENT = (Op.BACKWARD, Op.BACKWARD_WEIGHT)


@dataclass(slots=True, kw_only=True, eq=False)
class LoweredGroup:
    """Where the tasks of one group lie in the program."""

    prices: GroupPrices
    shape: PipelineShape
    # first and last piece of each task of `shape`; shape (tasks of the shape,)
    first: np.ndarray
    last: np.ndarray
    data: list[list[int]] = field(default_factory=list)  # per stage its tasks on the data stream
    ends: list[list[int]] = field(default_factory=list)  # per stage: tasks that the optimizer waits for
    optimizer: list[int] = field(default_factory=list)
    # per stage its pieces and their launches on the thread of the host, where that is a stream of its own
    launches: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def op(self, op: int, stage: int, chunk: int, micro_batch: int) -> int:
        """Return the task of the shape, -1 where the schedule has no such op."""
        return int(self.shape.ops[op, stage, chunk, micro_batch])

    def first_forward(self, stage: int, chunk: int) -> int:
        """Return the task of the shape that needs the weights of a chunk first."""
        tasks = self.shape.ops[Op.FORWARD, stage, chunk]
        return int(tasks[tasks >= 0].min())

    def last_gradient(self, stage: int, chunk: int) -> int:
        """Return the task of the shape whose end completes the gradients of a chunk."""
        return int(self.shape.ops[list(_LAST_GRADIENT), stage, chunk].max())

    def repeats(self, stage: int) -> np.ndarray:
        """Return how often a stage runs each op of each chunk: but for the last micro-batch, and for it.

        Shape (4, chunks, 2).
        """
        runs = self.shape.ops[:, stage] >= 0
        return np.stack([runs[..., :-1].sum(-1), runs[..., -1]], axis=-1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """The program of a step."""

    program: Program
    groups: list[LoweredGroup]
    # what gradient and weight collectives add to each task of a compute stream: slowdown and copies; shape
    # (tasks,)
    data_s: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Cut:
    """How some tasks of a pipeline are cut: equal pieces of every task in `tasks`."""

    tasks: np.ndarray
    shares: np.ndarray
    data_s: np.ndarray


def lower(prices: list[GroupPrices], contention: float) -> Step:
    """Return the program of one step of all distinct groups.

    A second of overlapped collective adds `contention` seconds to compute.
    """
    builder = ProgramBuilder()
    lowerings = [_GroupLowering(builder, price, contention) for price in prices]
    for lowering in lowerings:
        lowering.add_pipeline()
    for lowering in lowerings:
        lowering.add_data([other for other in lowerings if other is not lowering])
    _add_across(lowerings)
    for lowering in lowerings:
        lowering.add_tied()
    _add_end(builder, lowerings)
    program = _launched(builder.build(), lowerings)
    data_s = np.zeros(program.num_tasks)
    for lowering in lowerings:
        data_s[lowering.first_task : lowering.first_task + len(lowering.data_s)] = lowering.data_s
    return Step(program=program, groups=[lowering.lowered for lowering in lowerings], data_s=data_s)


def _launched(program: Program, lowerings: list[_GroupLowering]) -> Program:
    """Return the program with the launches of the groups whose host is a stream of its own."""
    streams: list[tuple[str, np.ndarray, np.ndarray]] = []
    for lowering in lowerings:
        streams += lowering.launch_streams(program)
    if not streams:
        return program
    program, added = with_launches(program, streams)
    of_stages = iter([(tasks, own) for (_, tasks, _), own in zip(streams, added, strict=True)])
    for lowering in lowerings:
        if lowering.prices.launch_s is not None:
            lowering.lowered.launches = [next(of_stages) for _ in range(lowering.prices.num_stages)]
    return program


def _add_across(lowerings: list[_GroupLowering]) -> None:
    """Sum sharded gradients over groups when all groups have them, once a step."""
    ready = [[list(tasks) for tasks in lowering.lowered.ends] for lowering in lowerings]
    for lowering in lowerings:
        for s, seconds in enumerate(lowering.prices.across_s.tolist()):
            if seconds <= 0.0:
                continue
            held = lowering.prices.spans[s]
            after = [
                task
                for other, ends in zip(lowerings, ready, strict=True)
                for t, spans in enumerate(other.prices.spans)
                if any(start < high and low < stop for start, stop in spans for low, high in held)
                for task in ends[t]
            ]
            lowering.lowered.ends[s].append(lowering.add_transfer(s, seconds, after, Kind.GRADIENT_REDUCE))


def _add_end(builder: ProgramBuilder, lowerings: list[_GroupLowering]) -> None:
    """Let every rank wait for all gradients (their norm), then run the optimizer and gather weights."""
    joined = builder.add("join", 0.0)
    for lowering in lowerings:
        lowered = lowering.lowered
        for tasks in lowered.ends:
            builder.depend(np.full(len(tasks), joined), np.array(tasks, dtype=np.int64))
        for s, seconds in enumerate(lowered.prices.optimizer_s):
            task = builder.add(
                lowering.compute(s),
                float(seconds),
                [joined],
                kind=Kind.OPTIMIZER,
                group=lowering.index,
                stage=s,
            )
            lowered.optimizer.append(task)
            late = lowering.late_gather_s(s)
            if late > 0.0:
                lowering.add_transfer(s, late, [task], Kind.PARAMETER_GATHER)


class _GroupLowering:
    """Adds one group to a program."""

    def __init__(self, builder: ProgramBuilder, prices: GroupPrices, contention: float):
        self.builder, self.prices, self.contention = builder, prices, contention
        self.index = prices.index
        self.traits = [machine.traits for machine in prices.machines]
        self.sharded = [float(m.rank.zero) >= 3 for m in prices.machines]
        known: dict[tuple[int, int, bool], Buckets] = {}
        self.buckets: list[list[Buckets]] = []
        for s, (row, machine) in enumerate(zip(prices.units, prices.machines, strict=True)):
            self.buckets.append([])
            for c, units in enumerate(row):
                first = s == 0 and c == 0 and float(machine.traits.grad_overlap) > 0
                key = id(units), id(machine), first
                if key not in known:
                    known[key] = chunk_buckets(units, machine, first=key[2]).sped_up(prices.data_speed)
                self.buckets[s].append(known[key])
        self.first_task = 0
        self.data_s = np.zeros(0)

    def compute(self, stage: int) -> str:
        """Return the name of a stage's compute stream."""
        return f"group{self.index}.stage{stage}.compute"

    def add_pipeline(self) -> None:
        """Append ops, cut where needed, and transfers."""
        price = self.prices
        shape = shape_of(price)
        seconds = durations_of(shape, price)
        cuts = self._cuts(shape)
        pieces = np.ones(len(seconds), dtype=np.int64)
        for cut in cuts:
            pieces[cut.tasks] = len(cut.shares)
        last = np.cumsum(pieces) - 1
        first = last - pieces + 1
        owner = np.repeat(np.arange(len(seconds)), pieces)
        durations, self.data_s = seconds[owner], np.zeros(len(owner))
        for cut in cuts:
            place = first[cut.tasks][:, None] + np.arange(len(cut.shares))
            durations[place] *= cut.shares
            self.data_s[place] = cut.data_s
        names = np.array([self.builder.resource(name) for name in self._resources(shape)])
        tasks = self.builder.add_many(
            names[shape.resource[owner]],
            durations + self.data_s,
            kind=shape.kind[owner],
            group=self.index,
            stage=shape.stage[owner],
            chunk=shape.chunk[owner],
            micro_batch=shape.micro_batch[owner],
        )
        self.first_task = int(tasks[0])
        first, last = first + self.first_task, last + self.first_task
        self.builder.depend(first[shape.edge_task], last[shape.edge_before])
        self.lowered = LoweredGroup(prices=price, shape=shape, first=first, last=last)
        self.lowered.data = [[] for _ in range(price.num_stages)]

    def _resources(self, shape: PipelineShape) -> list[str]:
        """Return the resource of every stream of the pipeline.

        Messages of a rank to both neighbours share its port to the network, or to its link domain.
        """
        names = [f"group{self.index}.{name}" for name in shape.resource_names]
        count = self.prices.num_stages
        for stage in range(count):
            for stream, boundary in ((1, stage), (2, stage - 1)):
                port = "network" if self.prices.crosses[boundary] else "link"
                names[stream * count + stage] = f"group{self.index}.stage{stage}.send_{port}"
        return names

    def _cuts(self, shape: PipelineShape) -> list[_Cut]:
        """Cut ops whose layers meet collectives: all of them when sharded, else the first and the last."""
        cuts: list[_Cut] = []
        for s in range(self.prices.num_stages):
            for c in range(self.prices.num_chunks):
                if self.sharded[s]:
                    cuts += self._sharded_cuts(shape, s, c)
                else:
                    cuts += self._bucket_cuts(shape, s, c)
        return cuts

    def _sharded_cuts(self, shape: PipelineShape, s: int, c: int) -> list[_Cut]:
        """One piece per unit, with the copies and the slowdown of its gather and scatter."""
        machine, cuts = self.prices.machines[s], []
        busy_s = self.prices.device_s[:, s, c]
        any_pass, last_pass = self.prices.units[s][c].passes(machine)
        for op in Op:
            tasks = shape.ops[op, s, c][shape.ops[op, s, c] >= 0]
            for some, units in ((tasks[:-1], any_pass), (tasks[-1:], last_pass)):
                if len(some):
                    shares, copies, slowed = piece_times(op, units, machine, float(busy_s[op]))
                    cuts.append(_Cut(tasks=some, shares=shares, data_s=copies + slowed))
        return cuts

    def _bucket_cuts(self, shape: PipelineShape, s: int, c: int) -> list[_Cut]:
        """Cut the first forward and the last backward at the buckets that overlap them."""
        units, buckets, cuts = self.prices.units[s][c], self.buckets[s][c], []
        if float(self.traits[s].param_gather_overlap) > 0 and buckets.gather_s.any():
            shares = np.array([units.forward[::-1][a:b].sum() for a, b in buckets.bounds])[::-1]
            seconds = self.prices.op_s[Op.FORWARD, s, c, int(self.prices.num_micro_batches == 1)] * shares
            tax = self.contention * np.minimum(np.append(buckets.gather_s[::-1][1:], 0.0), seconds)
            first = shape.ops[Op.FORWARD, s, c]
            cuts.append(_Cut(tasks=first[first >= 0][:1], shares=shares, data_s=tax))
        if float(self.traits[s].grad_overlap) > 0 and buckets.reduce_s.any():
            last = shape.ops[list(_LAST_GRADIENT), s, c].max(-1)  # the last task of either op
            op = _LAST_GRADIENT[int(last.argmax())]
            shares = np.array([units.backward[::-1][a:b].sum() for a, b in buckets.bounds])
            seconds = self.prices.op_s[op, s, c, 1] * shares
            tax = slowdown_s(seconds, buckets.reduce_s, self.contention)
            cuts.append(_Cut(tasks=last.max(keepdims=True), shares=shares, data_s=tax))
        return cuts

    def launch_streams(self, program: Program) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """Return for each stage the thread of its host, the pieces that it launches, and its seconds."""
        launch_s, shape, lowered = self.prices.launch_s, self.lowered.shape, self.lowered
        if launch_s is None:
            return []
        found = []
        pieces = lowered.last - lowered.first + 1
        for s in range(self.prices.num_stages):
            ops = np.flatnonzero((shape.stage == s) & (shape.kind <= Kind.BACKWARD_WEIGHT))
            owner = np.repeat(ops, pieces[ops])
            tasks = lowered.first[owner] + np.arange(len(owner))
            tasks -= np.repeat(np.cumsum(pieces[ops]) - pieces[ops], pieces[ops])
            # A piece has the part of its op's layers, about its part of the seconds.
            whole_s = np.bincount(owner, program.duration_s[tasks], minlength=len(shape.kind))[owner]
            part = np.divide(program.duration_s[tasks], whole_s, out=1.0 / pieces[owner], where=whole_s > 0.0)
            seconds = launch_s[shape.kind[owner], s, shape.chunk[owner]] * part
            found.append((f"group{self.index}.stage{s}.host", tasks, seconds))
        return found

    def add_transfer(
        self, stage: int, seconds: float, after: list[int], kind: Kind, micro_batch: int = -1, chunk: int = -1
    ) -> int:
        """Append one collective to the data stream of a stage."""
        task = self.builder.add(
            f"group{self.index}.stage{stage}.data",
            seconds,
            after,
            kind=kind,
            group=self.index,
            stage=stage,
            chunk=chunk,
            micro_batch=micro_batch,
        )
        self.lowered.data[stage].append(task)
        return task

    def add_data(self, others: list[_GroupLowering]) -> None:
        """Append the collectives of weights and gradients of every stage."""
        for s in range(self.prices.num_stages):
            ends = self.last_pieces(s)
            if self.sharded[s]:
                ends += self._add_sharded(s)
            else:
                self._add_gathers(s)
                ends += self._add_reduces(s, others)
            self.lowered.ends.append(ends)

    def add_tied(self) -> None:
        """Append the sum of a tied table's gradient over the ends of the pipeline."""
        if self.prices.tied_s > 0.0:
            lowered_ends = self.lowered.ends
            both = [*lowered_ends[0], *lowered_ends[-1]]
            for s in {0, self.prices.num_stages - 1}:
                task = self.add_transfer(s, self.prices.tied_s, both, Kind.GRADIENT_REDUCE)
                lowered_ends[s].append(task)

    def _add_gathers(self, s: int) -> None:
        """Gather updated weights before the first forward: one bucket ahead of the one in use."""
        if not float(self.traits[s].param_gather_overlap) > 0:
            return
        before_use = -1
        for c in sorted(range(self.prices.num_chunks), key=lambda c: self.lowered.first_forward(s, c)):
            gather_s = self.buckets[s][c].gather_s[::-1]
            if not gather_s.any():
                continue
            pieces = self.lowered.first[self.lowered.first_forward(s, c)] + np.arange(len(gather_s))
            for seconds, piece in zip(gather_s.tolist(), pieces.tolist(), strict=True):
                after = [before_use] if before_use >= 0 else []
                task = self.add_transfer(s, seconds, after, Kind.PARAMETER_GATHER, 0, c)
                self.builder.depend(piece, task)
                # The next bucket leaves when this one is first used, at the end of the piece before it.
                before_use = piece - 1 if piece > pieces[0] else -1

    def _add_reduces(self, s: int, others: list[_GroupLowering]) -> list[int]:
        """Reduce gradients: each bucket when its last gradient is there, or all after the last backward."""
        overlap = float(self.traits[s].grad_overlap) > 0
        ends: list[int] = []
        total = 0.0
        for c in sorted(range(self.prices.num_chunks), key=lambda c: self.lowered.last_gradient(s, c)):
            buckets = self.buckets[s][c]
            if not buckets.reduce_s.any():
                continue
            if not overlap:
                total += float(buckets.reduce_s.sum())
                continue
            first = int(self.lowered.first[self.lowered.last_gradient(s, c)])
            for b, seconds in enumerate(buckets.reduce_s.tolist()):
                start, stop = self.prices.spans[s][c]
                layer = max(start, stop - buckets.bounds[b][1])  # next-token modules are no layers
                ready = [first + b, *(task for other in others for task in other.ready(layer))]
                ends.append(self.add_transfer(s, seconds, ready, Kind.GRADIENT_REDUCE, chunk=c))
        if total > 0.0:
            lowest = [span[0] for span in self.prices.spans[s]]
            ready = self.last_pieces(s)
            ready += [task for other in others for layer in lowest for task in other.ready(layer)]
            ends.append(self.add_transfer(s, total, ready, Kind.GRADIENT_REDUCE))
        return ends

    def last_pieces(self, s: int) -> list[int]:
        """Return the tasks that complete the gradients of each chunk of a stage."""
        lowered = self.lowered
        return [int(lowered.last[lowered.last_gradient(s, c)]) for c in range(self.prices.num_chunks)]

    def ready(self, layer: int) -> list[int]:
        """Return the tasks after which this group has the gradient of a layer."""
        for s, spans in enumerate(self.prices.spans):
            for c, (start, stop) in enumerate(spans):
                if start <= layer < stop:
                    task = self.lowered.last_gradient(s, c)
                    first, last = int(self.lowered.first[task]), int(self.lowered.last[task])
                    if first == last or self.sharded[s]:
                        return [last]
                    bounds = self.buckets[s][c].bounds
                    return [first + next(b for b, (_, high) in enumerate(bounds) if stop - high <= layer)]
        return []

    def late_gather_s(self, s: int) -> float:
        """Return seconds of gathering updated weights after the optimizer, where nothing hides it."""
        if self.sharded[s] or float(self.traits[s].param_gather_overlap) > 0:
            return 0.0
        return float(sum(buckets.gather_s.sum() for buckets in self.buckets[s]))

    def _add_sharded(self, s: int) -> list[int]:
        """Gather each unit before use, some units ahead, and scatter its gradients after it.

        Gradients of a unit wait in the input of their reduction until the next unit has gone back.
        """
        shape, builder = self.lowered.shape, self.builder
        ops = np.flatnonzero((shape.stage == s) & (shape.kind <= Kind.BACKWARD_WEIGHT))
        first_piece = int(self.lowered.first[ops[0]])  # the pieces of a stage follow each other
        beside = float(self.traits[s].grad_overlap) > 0
        waits = 1 + beside
        ahead = 1 + int(self.traits[s].prefetch) if beside else 1
        # In turn with the ops, a gather waits for the whole of the one before it anyway.
        longer = beside * self.prices.op_s[..., 0] / np.maximum(self.prices.device_s, 1e-12)
        moves = {
            (op, c, i): _moves(op, units, float(longer[Op.FORWARD, s, c]))
            for op in Op
            for c, each in enumerate(self.prices.units[s])
            for i, units in enumerate(each.passes(self.prices.machines[s]))
        }
        is_last = ops == shape.ops[:, s].max(-1)[shape.kind[ops], shape.chunk[ops]]
        places = zip(shape.kind[ops].tolist(), shape.chunk[ops].tolist(), is_last.tolist(), strict=True)
        gather_s, scatter_s = np.concatenate([moves[place] for place in places], axis=1)
        owner = ops.repeat(self.lowered.last[ops] - self.lowered.first[ops] + 1)
        gathers, scatters = np.flatnonzero(gather_s), np.flatnonzero(scatter_s)
        leaves = gathers - ahead
        if ahead > 2:
            every = _behind_last_use(
                self._unit_of(owner, s), shape.kind[owner] == Kind.FORWARD, np.arange(len(owner)) - ahead
            )
            leaves = np.maximum.accumulate(every[gathers])
        # When piece i ends, its gradients leave before the weights of piece i + ahead come.
        after, waiting = np.append(leaves, scatters), np.append(gathers, scatters + waits)
        order = np.argsort(np.append(2 * leaves + 1, 2 * scatters), kind="stable")
        piece = np.append(gathers, scatters)[order]
        is_gather = (np.arange(len(order)) < len(gathers))[order]
        tasks = builder.add_many(
            builder.resource(f"group{self.index}.stage{s}.data"),
            np.append(gather_s[gathers], scatter_s[scatters])[order],
            kind=np.where(is_gather, Kind.PARAMETER_GATHER, Kind.GRADIENT_REDUCE),
            group=self.index,
            stage=s,
            chunk=shape.chunk[owner[piece]],
            micro_batch=shape.micro_batch[owner[piece]],
        )
        after, waiting = after[order], waiting[order]
        builder.depend(tasks[after >= 0], first_piece + after[after >= 0])
        used = waiting < len(gather_s)
        builder.depend(first_piece + waiting[used], tasks[used])
        if not beside:
            self._in_turn(first_piece, len(gather_s), tasks, piece, is_gather)
        self.lowered.data[s] += tasks.tolist()
        return tasks[~is_gather][-1:].tolist()

    def _unit_of(self, owner: np.ndarray, s: int) -> np.ndarray:
        """Return the place of each piece's unit in its chunk."""
        shape = self.lowered.shape
        ends = np.flatnonzero(np.append(np.diff(owner), 1)) + 1
        place = np.arange(len(owner)) - np.repeat(np.append(0, ends[:-1]), np.diff(ends, prepend=0))
        count = np.array([len(units.params) for units in self.prices.units[s]])[shape.chunk[owner]]
        return np.where(shape.kind[owner] == Kind.FORWARD, place, count - 1 - place)

    def _in_turn(
        self, first_piece: int, num_pieces: int, tasks: np.ndarray, piece: np.ndarray, is_gather: np.ndarray
    ) -> None:
        """Let gathers of a stage wait for the input of their op, and its output for their scatters."""
        shape, lowered = self.lowered.shape, self.lowered
        gather, scatter = np.full(num_pieces, -1), np.full(num_pieces, -1)
        gather[piece[is_gather]], scatter[piece[~is_gather]] = tasks[is_gather], tasks[~is_gather]
        task, before = lowered.first[shape.edge_task], lowered.last[shape.edge_before]
        for moved, end, waits in ((gather, task, False), (scatter, before, True)):
            place = end - first_piece
            here = (place >= 0) & (place < num_pieces)
            edges = np.flatnonzero(here)[moved[place[here]] >= 0]
            own = moved[place[edges]]
            self.builder.depend(*((task[edges], own) if waits else (own, before[edges])))


def _behind_last_use(place: np.ndarray, forward: np.ndarray, leaves: np.ndarray) -> np.ndarray:
    """Return the pieces at whose ends gathers of all pieces leave: no unit's while it is still gathered.

    `place` are the units of the pieces, `forward` the pieces of forwards. The gradients of a backward leave
    before the weights of the next forward come, as the host asks for them; only the first unit's come beside
    the last piece of the pass before, as with one unit ahead.
    """
    pieces = np.arange(len(place))
    before = np.full(len(place), -(2**30))
    last: dict[int, int] = {}
    for piece, unit in enumerate(place.tolist()):
        before[piece] = last.get(unit, before[piece])
        last[unit] = piece
    turn = np.flatnonzero(forward & ~np.append(False, forward[:-1]))  # first pieces of forwards
    passed = turn[np.maximum(np.searchsorted(turn, pieces, side="right") - 1, 0)] - 1
    before = np.where(forward, np.maximum(before, passed), before)
    return np.maximum(leaves, np.minimum(before, pieces - 2))


def _moves(op: int, units: LayerUnits, longer: float) -> np.ndarray:
    """Return seconds of gather and of scatter of each unit of an op, in the order of its pieces.

    The host makes a forward `longer` by this factor, and with it what a gather waits for.
    """
    none = np.zeros(len(units.params))
    if op == Op.FORWARD:
        before = longer * units.counting_s + np.append(0.0, units.copy_weights_s[:-1])
        waits = (units.counting_s > 0) & (units.gather_s > 0) & (longer > 0)
        return np.stack([units.gather_s + waits * before, none])
    gather, scatter = units.regather_s[::-1], units.scatter_s[::-1]
    return np.stack(
        [none if op == Op.BACKWARD_WEIGHT else gather, none if op == Op.BACKWARD_INPUT else scatter]
    )


def shape_of(price: GroupPrices) -> PipelineShape:
    """Return the schedule of a group as tasks without durations."""
    return pipeline_shape(
        price.schedule,
        num_stages=price.num_stages,
        num_micro_batches=price.num_micro_batches,
        num_chunks=price.num_chunks,
        overlap_p2p=price.overlap_p2p,
    )


def durations_of(shape: PipelineShape, price: GroupPrices) -> np.ndarray:
    """Return the seconds of every task of the schedule; the last micro-batch may be short.

    In turn, a forward and a backward message that meet between two stages take the time of both.
    """
    table = price.op_s
    seconds = np.repeat(table[..., :1], price.num_micro_batches, axis=-1)
    seconds[..., -1] = table[..., 1]
    boundaries = max(price.num_stages - (price.num_chunks == 1), 1)
    times = pipeline_durations(
        shape,
        forward_s=seconds[Op.FORWARD],
        backward_s=seconds[Op.BACKWARD],
        backward_input_s=seconds[Op.BACKWARD_INPUT],
        backward_weight_s=seconds[Op.BACKWARD_WEIGHT],
        send_forward_s=price.send_s[:boundaries],
        send_backward_s=price.send_s[:boundaries],
    )
    if float(price.machines[0].traits.p2p_in_turn) > 0 and price.schedule == "1f1b":
        forward, backward = shape.kind == Kind.SEND_FORWARD, shape.kind == Kind.SEND_BACKWARD
        warm_up = price.num_stages - 1 - shape.stage + backward  # of the stage before the boundary
        meets = (forward & (shape.micro_batch >= warm_up)) | (
            backward & (shape.micro_batch < price.num_micro_batches - warm_up)
        )
        times[meets] *= 2.0
    return times
