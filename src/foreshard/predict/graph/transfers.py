"""A lowered step whose transfers share ports: its tasks as phases, and what sharing adds to each collective.

An op holds layers, and each layer its computation and then its collectives; hidden ones run beside the
computation. Alone, every phase takes what the closed form says: latency first, then bytes at the rate that
the closed form reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from foreshard.errors import SpecError
from foreshard.graph.program import Kind
from foreshard.predict.batch import Batch, PlannedRun
from foreshard.predict.graph.lowering import LoweredGroup, Step
from foreshard.predict.graph.occupancy import INLINE_PARTS, Occupancy, PartialPrices, partial_prices
from foreshard.predict.graph.ports import PortTransfer, StepNetwork
from foreshard.sim import contention
from foreshard.sim.contention import MAX_PHASES, ContendedRun, Phases, SharedNetwork
from foreshard.spec.prediction import CollectiveTimes

COLLECTIVES = (
    "tensor_comm",
    "context_comm",
    "expert_comm",
    "gradient_reduce",
    "parameter_gather",
    "pipeline_comm",
)
"""Classes of transfers that are reported; the first are those inside ops, in the order of `INLINE_PARTS`."""
_OF_KIND = {
    Kind.GRADIENT_REDUCE: COLLECTIVES.index("gradient_reduce"),
    Kind.PARAMETER_GATHER: COLLECTIVES.index("parameter_gather"),
    Kind.SEND_FORWARD: COLLECTIVES.index("pipeline_comm"),
    Kind.SEND_BACKWARD: COLLECTIVES.index("pipeline_comm"),
}
_NONE = -1

_Row = tuple[float, float, int, bool, int, float, float]
"""Of a phase: delay, bytes, route, whether it is beside, class of transfer, its seconds of transfer alone,
and what of the delay is computation."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedStep:
    """A step whose transfers shared the network."""

    run: ContendedRun
    phases: Phases
    label: np.ndarray  # place of each phase's transfer in `COLLECTIVES`, -1 for none; shape (phases,)
    transfer_s: np.ndarray  # of each transfer by the closed form; shape (phases,)
    network: SharedNetwork

    @property
    def resources(self) -> tuple[str, ...]:
        """Names of the resources."""
        return tuple(self.network.names)

    def added_s(self, tasks: np.ndarray) -> dict[str, float]:
        """Return what sharing adds to the ops of a stream, by part of the step."""
        is_on = np.zeros(len(self.run.times.start_s), dtype=bool)
        is_on[tasks] = True
        longer_s = np.where(self.phases.beside, 0.0, self.run.longer_s) + self.run.waited_s
        here = is_on[self.phases.task]
        return {
            name: float(longer_s[here & (self.label == label)].sum())
            for label, name in enumerate(INLINE_PARTS)
        }

    def totals(self, step: Step, group: int, stage: int) -> TransferTotals:
        """Return seconds of the transfers of a stage by class, and how busy resources are."""
        program, phase = step.program, self.phases.task
        here = (program.group[phase] == group) & (program.stage[phase] == stage)
        alone_s, shared_s = np.zeros((2, len(COLLECTIVES)))
        passes = np.zeros((len(COLLECTIVES), len(self.resources)), dtype=bool)
        flows = self.run.program
        for label in range(len(COLLECTIVES)):
            own = here & (self.label == label)
            alone_s[label] = self.transfer_s[own].sum()
            shared_s[label] = alone_s[label] + self.run.longer_s[own].sum()
            for route in np.unique(self.phases.route[own]).tolist():
                if route >= 0:
                    ends = flows.route_indptr[route : route + 2]
                    passes[label, flows.route_resources[ends[0] : ends[1]]] = True
        return TransferTotals(
            alone_s=alone_s,
            shared_s=shared_s,
            passes=passes,
            busy_s=flows.resource_s,
            resources=self.resources,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferTotals:
    """Seconds of the transfers of one rank by class of `COLLECTIVES`, and of all resources."""

    alone_s: np.ndarray  # shape (classes,)
    shared_s: np.ndarray
    passes: np.ndarray  # whether a class passes a resource; shape (classes, resources)
    busy_s: np.ndarray  # that each resource carries its bytes of a step at full capacity; shape (resources,)
    resources: tuple[str, ...]

    def beyond(self, before: TransferTotals, times: float) -> TransferTotals:
        """Return the totals of so many times the difference to a shorter step more."""
        further = {
            name: getattr(self, name) + times * (getattr(self, name) - getattr(before, name))
            for name in ("alone_s", "shared_s", "busy_s")
        }
        return replace(self, **further)

    def by_class(self, step_s: float) -> tuple[CollectiveTimes, ...]:
        """Return the classes that move anything in a step of so many seconds."""
        found = []
        for label in np.flatnonzero(self.alone_s).tolist():
            busy_s = np.where(self.passes[label], self.busy_s, -1.0)
            busiest = int(busy_s.argmax())
            if busy_s[busiest] < 0.0:
                continue
            times = CollectiveTimes(
                collective=COLLECTIVES[label],
                closed_form_s=float(self.alone_s[label]),
                flow_s=float(self.shared_s[label]),
                busiest_resource=self.resources[busiest],
                utilisation=float(busy_s[busiest] / step_s),
            )
            found.append(times)
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPorts:
    """Executes lowered steps of one plan on a network that their transfers share."""

    case: PlannedRun
    prices: PartialPrices
    slow_link: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, case: PlannedRun, batch: Batch, slow_link: Mapping[int, float] | None = None) -> SharedPorts:
        """Return the executor of a plan; links and NIC of ranks of `slow_link` carry so many times less."""
        return cls(case=case, prices=partial_prices(case, batch), slow_link=slow_link or {})

    def run(self, step: Step, *, compiled: bool | None = None) -> SharedStep:
        """Return when the tasks of a step run."""
        network = StepNetwork(self.case, [lowered.prices for lowered in step.groups], self.slow_link)
        phases, label, transfer_s = _phases(step, self.prices.occupancy(step), network)
        return SharedStep(
            run=contention.run(step.program, phases, network.network, compiled=compiled),
            phases=phases,
            label=label,
            transfer_s=transfer_s,
            network=network.network,
        )


def _phases(step: Step, occupancy: Occupancy, network: StepNetwork) -> tuple[Phases, np.ndarray, np.ndarray]:
    """Return the phases of all tasks, the class of each one's transfer and its seconds."""
    alike, first_of = _alike(step, occupancy)
    lowered = {one.prices.index: one for one in step.groups}
    templates = [_rows(step, task, lowered, occupancy, network) for task in first_of.tolist()]
    length = np.array([len(rows) for rows in templates], dtype=np.int64)
    begin = np.cumsum(length) - length
    table = np.array([row for rows in templates for row in rows], dtype=np.float64).reshape(-1, 7)
    count = length[alike]
    if count.sum() > MAX_PHASES:
        raise SpecError(
            f"{count.sum():,} phases of computation and communication in one step",
            key="--network",
            value="flow",
            rule=f"The flow simulation takes on at most {MAX_PHASES:,}",
            fix="Use --network closed-form, or a larger --micro-batch",
        )
    task = np.repeat(np.arange(len(alike)), count)
    row = begin[alike][task] + np.arange(len(task)) - np.repeat(np.cumsum(count) - count, count)
    delay_s, num_bytes, route, beside, label, transfer_s, computed_s = table[row].T
    phases = Phases(
        task=task,
        delay_s=delay_s,
        num_bytes=num_bytes,
        route=route.astype(np.int64),
        beside=beside > 0.0,
        computed_s=computed_s,
    )
    return phases, label.astype(np.int64), transfer_s


def _alike(step: Step, occupancy: Occupancy) -> tuple[np.ndarray, np.ndarray]:
    """Return a number for each task, equal for tasks that do the same, and one task of each number."""
    program = step.program
    last_of = np.array([0] * (int(program.group.max(initial=0)) + 1))
    for lowered in step.groups:
        last_of[lowered.prices.index] = lowered.prices.num_micro_batches - 1
    columns = [program.kind, program.group, program.stage, program.chunk]
    columns.append(program.micro_batch == last_of[program.group])
    columns += [program.duration_s, step.data_s, *occupancy.transfer_s]
    number = np.zeros(program.num_tasks, dtype=np.int64)
    for column in columns:
        values, place = np.unique(column, return_inverse=True)
        number = np.unique(number * len(values) + place, return_inverse=True)[1]
    first_of = np.unique(number, return_index=True)[1]
    return number, first_of


def _rows(
    step: Step, task: int, lowered: dict[int, LoweredGroup], occupancy: Occupancy, network: StepNetwork
) -> list[_Row]:
    """Return the phases of a task."""
    program = step.program
    kind, group, stage = (int(column[task]) for column in (program.kind, program.group, program.stage))
    duration_s = float(program.duration_s[task])
    if kind <= Kind.BACKWARD_WEIGHT:
        place = kind, stage, int(program.chunk[task]), int(program.micro_batch[task])
        compute_s = duration_s - float(step.data_s[task])
        return _op_rows(lowered[group], occupancy, network, place, compute_s, float(step.data_s[task]))
    if kind not in _OF_KIND:
        return [(duration_s, 0.0, -1, False, _NONE, 0.0, duration_s)]
    link_s, nic_s = (float(row[task]) for row in occupancy.transfer_s)
    if kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
        moved = network.message(group, stage, kind, link_s, nic_s)
    else:
        moved = network.collective(group, stage, link_s, nic_s, whole=True)
    latency_s = max(duration_s - moved.alone_s, 0.0)
    return [(latency_s, moved.num_bytes, moved.route, False, _OF_KIND[Kind(kind)], duration_s, 0.0)]


def _op_rows(
    lowered: LoweredGroup,
    occupancy: Occupancy,
    network: StepNetwork,
    place: tuple[int, int, int, int],
    own_s: float,
    data_s: float,
) -> list[_Row]:
    """Return the phases of an op, or of a piece of one: layer by layer, computation and then collectives."""
    prices = lowered.prices
    op, stage, chunk, micro_batch = place
    at = op, stage, chunk, int(micro_batch == prices.num_micro_batches - 1)
    op_s = sum(float(part[at]) for part in prices.parts.values())
    share = own_s / op_s if op_s > 0.0 else 0.0
    layers = max(1, round(share * len(prices.units[stage][chunk].params)))
    exposed_s = [share / layers * float(prices.parts[name][at]) for name in INLINE_PARTS]
    occupied = occupancy.op_s[prices.index]
    moved = []
    for name in INLINE_PARTS:
        link_s, nic_s = (share / layers * float(part[at]) for part in occupied[name])
        moved.append(network.collective(prices.index, stage, link_s, nic_s, whole=name == "data_comm"))
    compute_s = max((own_s + data_s) / layers - sum(exposed_s), 0.0)
    if all(one.alone_s <= 1e-9 * compute_s for one in moved):
        return [(own_s + data_s, 0.0, -1, False, _NONE, 0.0, own_s + data_s)]
    return _layer_rows(compute_s, exposed_s, moved) * layers


def _layer_rows(compute_s: float, exposed_s: list[float], moved: list[PortTransfer]) -> list[_Row]:
    """Return the phases of one layer: hidden transfers beside its computation, then the exposed ones."""
    hidden: list[_Row] = []
    shown: list[_Row] = []
    free_s = compute_s
    for label, (time_s, one) in enumerate(zip(exposed_s, moved, strict=True)):
        flow_s = min(one.alone_s, time_s)
        beside_s = min(one.alone_s - flow_s, free_s)
        free_s -= beside_s
        for rows, seconds, delay_s in ((hidden, beside_s, 0.0), (shown, flow_s, time_s - flow_s)):
            if seconds + delay_s > 0.0:
                part = seconds / one.alone_s if one.alone_s > 0.0 else 0.0
                route = one.route if part > 0.0 else -1
                flow_bytes, took_s = part * one.num_bytes, seconds + delay_s
                rows.append((delay_s, flow_bytes, route, rows is hidden, label, took_s, 0.0))
    if not hidden and shown:
        delay_s, *rest, _ = shown[0]
        return [(compute_s + delay_s, *rest, compute_s), *shown[1:]]  # type: ignore[list-item]
    return [*hidden, (compute_s, 0.0, -1, False, _NONE, 0.0, compute_s), *shown]
