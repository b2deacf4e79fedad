"""Laws of flows that share a network, and a slow simulation that shares no code with the fast one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshard.comm.flow.program import FlowProgram, FlowProgramBuilder
from foreshard.comm.flow.simulation import longest_path_s, simulate
from foreshard.comm.flow.symmetry import fold

seeds = st.integers(0, 2**32 - 1)
SAME = 1e-9


def random_routes(rng, num_flows, num_resources):
    return [
        rng.choice(num_resources, rng.integers(1, min(4, num_resources) + 1), replace=False).tolist()
        for _ in range(num_flows)
    ]


def random_program(rng, num_tasks: int) -> FlowProgram:
    """Computes and flows in and out of queues; few different numbers, so that events often coincide."""
    num_resources = int(rng.integers(1, 7))
    builder = FlowProgramBuilder(rng.choice([1.0, 2.0, 3.0, 7.5], num_resources))
    queues = builder.new_queue(3)
    for task, resources in enumerate(random_routes(rng, num_tasks, num_resources)):
        after = rng.choice(task, min(task, int(rng.integers(0, 3))), replace=False).tolist() if task else []
        common = {"queue": queues + int(rng.integers(-1, 3)) if rng.random() < 0.6 else -1, "after": after}
        common["release_s"] = float(rng.choice([0.0, 0.0, 1.0, rng.uniform(0, 3)]))
        if rng.random() < 0.3:
            builder.compute(float(rng.choice([0.0, 1.0, 1.7])), **common)
            continue
        usage = rng.choice([1.0, 0.5], len(resources)).tolist()
        builder.send(
            builder.route(resources, usage),
            float(rng.choice([1.0, 4.0, rng.uniform(0.1, 9)])),
            latency_s=float(rng.choice([0.0, 0.25])),
            weight=float(rng.choice([1.0, 1.0, 3.0])),
            priority=int(rng.choice([0, 0, 2])),
            **common,
        )
    return builder.build()


def symmetric_program(rng, copies: int) -> FlowProgram:
    """The same random tasks several times, each with own and with common resources, in a circle."""
    num_resources = int(rng.integers(2, 5))
    capacity = rng.choice([1.0, 2.0, 3.0], num_resources)
    capacity[0] *= copies
    builder = FlowProgramBuilder(np.concatenate([capacity[:1], *[capacity[1:]] * copies]))
    rows = [
        (
            resources,
            float(rng.choice([0.0, 1.0, 2.5])),
            float(rng.choice([0.0, 0.5])),
            int(rng.integers(-1, 2)),
        )
        for resources in random_routes(rng, 8, num_resources)
    ]
    afters = [rng.choice(task, min(task, 1), replace=False).tolist() if task else [] for task in range(8)]
    shift = int(rng.integers(0, 2))
    for task, (resources, size, latency_s, queue) in enumerate(rows):
        for copy in range(copies):
            own = [r if r == 0 else 1 + copy * (num_resources - 1) + r - 1 for r in resources]
            builder.send(
                builder.route(own),
                size,
                latency_s=latency_s,
                queue=-1 if queue < 0 else queue * copies + copy,
                after=[before * copies + (copy + shift) % copies for before in afters[task]],
            )
    return builder.build()


def slow_rates(program: FlowProgram, flows: list[int]) -> dict[int, float]:
    """Raise all rates together until a resource is full, one priority after another."""
    left = dict(enumerate(program.capacity_bytes_per_s.tolist()))
    rate = dict.fromkeys(flows, 0.0)

    def entries(flow):
        row = range(*program.route_indptr[program.route[flow] : program.route[flow] + 2])
        return [(int(program.route_resources[i]), float(program.route_usage[i])) for i in row]

    for priority in sorted({int(program.priority[flow]) for flow in flows}, reverse=True):
        rising = {flow for flow in flows if program.priority[flow] == priority}
        while rising:
            load = dict.fromkeys(left, 0.0)
            for flow in rising:
                for resource, usage in entries(flow):
                    load[resource] += usage * program.weight[flow]
            rise = min(max(left[r], 0.0) / load[r] for r in left if load[r] > 0.0)
            for flow in rising:
                rate[flow] += rise * program.weight[flow]
                for resource, usage in entries(flow):
                    left[resource] -= usage * rise * program.weight[flow]
            full = {r for r in left if left[r] <= 1e-12 * program.capacity_bytes_per_s[r]}
            rising = {flow for flow in rising if not full & {r for r, _ in entries(flow)}}
    return rate


def entries_of(program: FlowProgram):
    """Of each flow: its number, its resources and what it uses of them, entry by entry."""
    for flow in range(program.num_tasks):
        row = slice(*program.route_indptr[program.route[flow] : program.route[flow] + 2])
        resources = program.route_resources[row]
        yield np.full(len(resources), flow), resources, program.route_usage[row]


def first_rates(program: FlowProgram) -> np.ndarray:
    """The rates at which all flows start: of each, with so few bytes that it ends before any other.

    A flow that must wait for one of a higher priority starts at 0.
    """
    rates = []
    for flow in range(program.num_tasks):
        few = program.num_bytes.copy()
        few[flow] = 1e-18
        rates.append(1e-18 / simulate(replace(program, num_bytes=few), compiled=True).end_s[flow])
    return np.where(np.array(rates) < 1e-15, 0.0, rates)


def slow_simulation(program: FlowProgram) -> tuple[np.ndarray, np.ndarray]:
    """Go from event to event; solve all rates anew at each; search all tasks for what comes next."""
    num_tasks = program.num_tasks
    start, end = [math.nan] * num_tasks, [math.nan] * num_tasks
    left = program.num_bytes.tolist()
    waits = [program.indices[program.indptr[t] : program.indptr[t + 1]].tolist() for t in range(num_tasks)]
    last: dict[int, int] = {}
    for task, queue in enumerate(program.queue.tolist()):
        if queue >= 0:
            waits[task] += [last[queue]] if queue in last else []
            last[queue] = task
    now = 0.0
    while any(math.isnan(one) for one in end):
        for task in range(num_tasks):
            if math.isnan(start[task]) and all(end[before] <= now for before in waits[task]):
                start[task] = max(now, program.release_s[task])
        running = [t for t in range(num_tasks) if not math.isnan(start[t]) and math.isnan(end[t])]
        arrived = {t: start[t] + program.delay_s[t] for t in running}
        flowing = [t for t in running if arrived[t] <= now * (1 + 1e-13) and left[t] > 0.0]
        rates = slow_rates(program, flowing)
        events = [arrived[t] for t in running if t not in flowing]
        events += [now + left[t] / rates[t] for t in flowing if rates[t] > 0.0]
        following = max(min(events), now)
        for task in flowing:
            left[task] -= rates[task] * (following - now)
            if left[task] <= 1e-12 * program.num_bytes[task]:
                left[task] = 0.0
        now = following
        for task in running:
            if left[task] == 0.0 and arrived[task] <= now * (1 + 1e-13):
                end[task] = now
    return np.array(start), np.array(end)


@given(seeds)
@settings(max_examples=150)
def test_the_simulation_is_the_slow_one(seed):
    rng = np.random.default_rng(seed)
    program = random_program(rng, int(rng.integers(1, 22)))
    start_s, end_s = slow_simulation(program)
    for compiled in (False, True):
        times = simulate(program, compiled=compiled)
        assert times.end_s == pytest.approx(end_s, rel=SAME, abs=SAME)
        assert times.start_s == pytest.approx(start_s, rel=SAME, abs=SAME)


@given(seeds)
@settings(max_examples=80)
def test_folding_changes_no_time(seed):
    rng = np.random.default_rng(seed)
    program = symmetric_program(rng, copies=int(rng.integers(3, 7)))
    if rng.random() < 0.3:  # one odd number must end a part of the symmetry
        program.num_bytes[rng.integers(program.num_tasks)] += 1.0
    small, times = fold(program, compiled=True), simulate(program, compiled=True)
    if small is not None:
        folded = simulate(small.program, compiled=True)
        assert folded.end_s[small.task] == pytest.approx(times.end_s, rel=SAME)
        assert longest_path_s(program, small) == pytest.approx(longest_path_s(program), rel=SAME)


def test_most_symmetric_programs_fold():
    """Otherwise the law above says nothing."""
    folds = [fold(symmetric_program(np.random.default_rng(i), 6), compiled=True) for i in range(20)]
    assert all(one is not None and 6 * one.program.num_tasks == len(one.task) for one in folds)


@given(seeds)
@settings(max_examples=150)
def test_every_flow_has_a_full_resource_where_no_other_is_faster(seed):
    """Bottleneck condition: what makes rates max-min fair, and the only ones (Bertsekas-Gallager 6.5.2)."""
    rng = np.random.default_rng(seed)
    num_flows, num_resources = int(rng.integers(1, 40)), int(rng.integers(1, 15))
    routes = random_routes(rng, num_flows, num_resources)
    capacity = rng.choice([1.0, 1.0, rng.uniform(0.1, 10)], num_resources)
    priority = rng.integers(0, int(rng.integers(1, 4)), num_flows)
    builder = FlowProgramBuilder(capacity)
    for one, route in enumerate(routes):
        row = builder.route(route, rng.choice([1.0, 0.25], len(route)).tolist())
        builder.send(row, 1.0, weight=float(rng.choice([1.0, 2.0, 0.1])), priority=int(priority[one]))
    program = builder.build()
    weight = program.weight
    flow, resources, usage = (np.concatenate(column) for column in zip(*entries_of(program), strict=True))
    rate = first_rates(program)
    load = np.bincount(resources, usage * rate[flow], minlength=num_resources)
    assert np.all(load <= capacity * (1 + SAME))
    for one in range(num_flows):
        has_bottleneck = False
        for resource in routes[one]:
            here = flow[resources == resource]
            upper = here[priority[here] >= priority[one]]
            used = sum(usage[(flow == f) & (resources == resource)].sum() * rate[f] for f in upper)
            peers = here[priority[here] == priority[one]]
            fastest = (rate[peers] / weight[peers]).max()
            is_full = used >= capacity[resource] * (1 - SAME)
            has_bottleneck |= is_full and rate[one] / weight[one] >= fastest * (1 - SAME)
        assert has_bottleneck


@given(seeds)
@settings(max_examples=60)
def test_no_resource_carries_more_than_its_capacity_in_any_window(seed):
    rng = np.random.default_rng(seed)
    program = random_program(rng, 20)
    times = simulate(program, compiled=True)
    flows = np.flatnonzero(program.num_bytes > 0.0)
    opens = times.start_s[flows] + program.delay_s[flows]
    closes = times.end_s[flows]
    usage = np.zeros((len(flows), program.num_resources))
    for i, flow in enumerate(flows):
        row = slice(*program.route_indptr[program.route[flow] : program.route[flow] + 2])
        usage[i, program.route_resources[row]] = program.route_usage[row] * program.num_bytes[flow]
    for begin in opens:
        for end in closes[closes > begin]:
            inside = (opens >= begin) & (closes <= end)
            carried = usage[inside].sum(axis=0)
            assert np.all(carried <= program.capacity_bytes_per_s * (end - begin) * (1 + 1e-8))
    assert np.all(usage.sum(axis=0) <= program.capacity_bytes_per_s * times.makespan_s * (1 + SAME))
    assert program.resource_bytes == pytest.approx(usage.sum(axis=0), rel=SAME)


@given(seeds)
@settings(max_examples=60)
def test_no_flow_ends_before_its_bound_and_the_bounds_hold(seed):
    program = random_program(np.random.default_rng(seed), 20)
    times = simulate(program, compiled=True)
    alone_s = np.where(
        program.route >= 0, program.num_bytes / program.rate_alone_bytes_per_s[program.route], 0.0
    )
    assert np.all(times.end_s - times.start_s >= (program.delay_s + alone_s) * (1 - SAME) - SAME)
    bound_s = max(longest_path_s(program), float(program.resource_s.max()))
    assert times.makespan_s >= bound_s * (1 - SAME)
    fixed = replace(program, delay_s=program.delay_s + alone_s, num_bytes=np.zeros(program.num_tasks))
    assert longest_path_s(program) == pytest.approx(simulate(fixed, compiled=True).makespan_s, rel=SAME)


@given(seeds)
@settings(max_examples=60)
def test_relabelling_resources_and_queues_changes_nothing(seed):
    rng = np.random.default_rng(seed)
    program = random_program(rng, 20)
    order = rng.permutation(program.num_resources)
    names = np.append(rng.permutation(program.num_queues), -1)
    capacity = np.empty(program.num_resources)
    capacity[order] = program.capacity_bytes_per_s
    other = replace(
        program,
        capacity_bytes_per_s=capacity,
        route_resources=order[program.route_resources],
        queue=names[program.queue],
    )
    found, expected = simulate(other, compiled=True), simulate(program, compiled=True)
    assert found.end_s == pytest.approx(expected.end_s, rel=SAME)
    assert other.resource_bytes[order] == pytest.approx(program.resource_bytes, rel=SAME)


@given(seeds, st.floats(0.01, 100.0))
@settings(max_examples=60)
def test_units_change_nothing(seed, factor):
    """Bytes and capacities in another unit, and times in another unit."""
    program = random_program(np.random.default_rng(seed), 20)
    expected = simulate(program, compiled=True).end_s
    bytes_scaled = replace(
        program,
        num_bytes=program.num_bytes * factor,
        capacity_bytes_per_s=program.capacity_bytes_per_s * factor,
    )
    assert simulate(bytes_scaled, compiled=True).end_s == pytest.approx(expected, rel=SAME)
    slower = replace(
        program,
        capacity_bytes_per_s=program.capacity_bytes_per_s / factor,
        delay_s=program.delay_s * factor,
        release_s=program.release_s * factor,
    )
    assert simulate(slower, compiled=True).end_s == pytest.approx(expected * factor, rel=SAME)


def ring_program(num_ranks: int, capacity: np.ndarray, latency_s: float, num_bytes: float) -> FlowProgram:
    builder = FlowProgramBuilder(capacity)
    queues = builder.new_queue(num_ranks)
    for step in range(2 * (num_ranks - 1)):
        for rank in range(num_ranks):
            after = [(step - 1) * num_ranks + (rank - 1) % num_ranks] if step else []
            row = builder.route([rank])
            builder.send(row, num_bytes / num_ranks, latency_s=latency_s, queue=queues + rank, after=after)
    return builder.build()


@given(seeds)
@settings(max_examples=30)
def test_a_faster_link_never_makes_a_ring_slower(seed):
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.integers(2, 9))
    capacity = rng.uniform(1.0, 9.0, num_ranks)
    before_s = simulate(ring_program(num_ranks, capacity, 0.1, 8.0), compiled=True).makespan_s
    capacity[rng.integers(num_ranks)] *= rng.uniform(1.0, 5.0)
    after_s = simulate(ring_program(num_ranks, capacity, 0.1, 8.0), compiled=True).makespan_s
    assert after_s <= before_s * (1 + SAME)


@given(st.integers(2, 12), st.floats(1e-7, 1e-4), st.floats(1e3, 1e9), st.floats(1e9, 1e12))
@settings(max_examples=30)
def test_a_ring_that_shares_nothing_is_alpha_beta(num_ranks, latency_s, num_bytes, capacity):
    program = ring_program(num_ranks, np.full(num_ranks, capacity), latency_s, num_bytes)
    closed_s = 2 * (num_ranks - 1) * (latency_s + num_bytes / num_ranks / capacity)
    assert simulate(program, compiled=True).makespan_s == pytest.approx(closed_s, rel=1e-9)
