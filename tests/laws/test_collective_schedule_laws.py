"""Laws of schedules of collectives: what holds whatever the algorithm, the ranks and the network."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foreshard.comm.flow.places import routing_of
from foreshard.comm.flow.schedule_run import run_schedule
from foreshard.comm.schedules.cost import RoundTraffic
from foreshard.comm.schedules.hierarchical import two_level
from foreshard.comm.schedules.registry import ALGORITHMS, schedule_of
from foreshard.comm.schedules.schedule import Chunk, _rounds_in_order, rounds_by_level
from foreshard.comm.schedules.schedule_file import schedule_from, schedule_object
from foreshard.comm.schedules.sequential import SequentialBuilder
from foreshard.comm.schedules.verify import verify
from foreshard.comm.topology.fabrics import flat, leaf_spine, rail_optimised
from foreshard.comm.topology.graph import Edge, Topology, Vertex
from foreshard.comm.topology.machines import switched
from foreshard.comm.topology.regular import ring, star
from foreshard.errors import SpecError

CASES = [
    (collective, name)
    for name, one in ALGORITHMS.items()
    for collective in one.collectives
    if not one.needs_nodes
]
EVERY = [(collective, name) for name, one in ALGORITHMS.items() for collective in one.collectives]


@st.composite
def schedules(draw):
    """Return a schedule of any algorithm."""
    collective, name = draw(st.sampled_from(CASES))
    options = {"channels": draw(st.integers(1, 3)), "parts": draw(st.integers(1, 4))}
    return schedule_of(collective, name, draw(st.integers(2, 12)), **options)


def full_mesh(num_places: int, bytes_per_s: float, latency_s: float) -> Topology:
    """Return a link between every two places."""
    places = tuple(Vertex(name=str(place), kind="device") for place in range(num_places))
    links = tuple(
        Edge(source=a, target=b, bytes_per_s=bytes_per_s, latency_s=latency_s)
        for a in range(num_places)
        for b in range(num_places)
        if a != b
    )
    return Topology(vertices=places, links=links)


def own_links(schedule, bytes_per_s: float = 50e9, latency_s: float = 2e-6):
    """Return a network with a link between every two places, and the route over it."""
    places = schedule.num_places

    def route(a: int, b: int, channel: int) -> tuple[int, ...]:
        return (a * (places - 1) + b - (b > a),)

    return full_mesh(places, bytes_per_s, latency_s), route


def seconds(schedule, bytes_per_s: float, latency_s: float, num_bytes: float) -> float:
    return RoundTraffic(schedule, *own_links(schedule, bytes_per_s, latency_s)).cost().time_s(num_bytes)


UNEQUAL = {
    ("all-reduce", "hierarchical"): "levels send different numbers of chunks, which go on one by one",
    ("reduce-scatter", "hierarchical"): "as all-reduce",
    ("all-reduce", "nvls-tree"): "as hierarchical",
    ("all-to-all", "three-step"): "chunks of one node go direct, beside those of several others",
    ("all-to-all", "rail"): "as three-step",
}
"""Algorithms whose ranks do not proceed in lockstep, and why."""


@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
def test_closed_form_and_simulation_agree_where_every_pair_has_a_link(collective, algorithm):
    """Catches latencies paid once for each chunk, rounds that one of them counts and the other does not."""
    exact = 0
    for num_ranks in range(2, 10):
        options = {"channels": 1 + num_ranks % 3, "parts": [None, 1, 3][num_ranks % 3]}
        if ALGORITHMS[algorithm].needs_nodes:
            options["per_node"] = next((n for n in (2, 3) if num_ranks % n == 0 and num_ranks > n), None)
            if options["per_node"] is None:
                continue
        schedule = schedule_of(collective, algorithm, num_ranks, **options)
        topology, route = own_links(schedule)
        rounds = RoundTraffic(schedule, topology, route)
        cost, is_exact = rounds.cost(), rounds.is_lockstep()
        for size in (1e3, 1e9):
            run = run_schedule(schedule, size, topology, route)
            closed_s = cost.time_s(size)
            assert closed_s >= run.lower_bound_s * (1 - 1e-9)
            if is_exact:
                exact += 1
                assert run.seconds == pytest.approx(closed_s, rel=1e-3)
    assert bool(exact) == ((collective, algorithm) not in UNEQUAL)


@st.composite
def networks(draw, num_ranks, per_node):
    """Return a network of so many devices, in nodes or not."""
    machine = switched(per_node, 450e9, num_nics=draw(st.sampled_from([1, per_node])), nic_bytes_per_s=50e9)
    machines = [machine] * (num_ranks // per_node)
    over = {"num_spines": draw(st.integers(1, 2)), "oversubscription": draw(st.sampled_from([1.0, 4.0]))}
    kind = draw(st.sampled_from(["switch", "ring", "hosts", "rails", "leaves"]))
    if kind in ("switch", "ring"):
        return (star if kind == "switch" else ring)(num_ranks, 50e9, draw(st.sampled_from([0.0, 1e-6])))
    if kind == "hosts":
        return flat(machines)
    if kind == "rails":
        return rail_optimised(machines, **over)
    return leaf_spine(machines, nodes_per_leaf=draw(st.integers(1, 2)), **over)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_closed_form_and_simulation_of_shared_networks(data):
    """Catches routes of other channels than the simulation's, and loads that one of them leaves out.

    ``bench/bench_schedules.py`` draws thousands.
    """
    collective, algorithm = data.draw(st.sampled_from(EVERY))
    num_ranks = data.draw(st.integers(2, 9))
    per_node = data.draw(st.sampled_from([n for n in range(1, num_ranks + 1) if num_ranks % n == 0]))
    topology = data.draw(networks(num_ranks, per_node))
    options = {"channels": data.draw(st.integers(1, 4)), "parts": data.draw(st.integers(1, 4))}
    try:
        schedule = schedule_of(collective, algorithm, num_ranks, per_node=per_node, **options)
        route = routing_of(schedule, topology, forwarding="any")
    except SpecError:
        assume(False)
    size = 2.0 ** data.draw(st.floats(10, 30))
    run = run_schedule(schedule, size, topology, route)
    rounds = RoundTraffic(schedule, topology, route)
    closed_s = rounds.cost().time_s(size)
    assert closed_s >= run.lower_bound_s * (1 - 1e-9)
    if rounds.is_lockstep():
        assert run.seconds == pytest.approx(closed_s, rel=1e-3)


def test_many_draws_are_in_lockstep_and_sharing_ends_it():
    """Otherwise the law above says nothing."""
    for algorithm, is_even in (("ring", True), ("bidirectional-ring", False)):
        schedule = schedule_of("all-reduce", algorithm, 6, channels=2)
        both = star(6, 50e9), ring(6, 50e9)
        found = [RoundTraffic(schedule, one, routing_of(schedule, one)).is_lockstep() for one in both]
        assert found == [is_even, True]


@settings(max_examples=60, deadline=None)
@given(schedules(), st.randoms(use_true_random=False))
def test_renaming_ranks_and_channels_changes_nothing(schedule, random):
    """Catches algorithms or a verifier that believe in the numbers of ranks."""
    names = list(range(schedule.num_ranks))
    random.shuffle(names)
    place = np.array([*names, *range(schedule.num_ranks, schedule.num_places)])
    renamed = replace(
        schedule,
        source=place[schedule.source],
        target=place[schedule.target],
        channel=schedule.channel * 7 + 3,
        chunks=tuple(
            Chunk(
                weight=chunk.weight,
                sources=tuple(names[r] for r in chunk.sources),
                targets=tuple(names[r] for r in chunk.targets),
            )
            for chunk in schedule.chunks
        ),
    )
    assert verify(renamed) == ()


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_every_rank_gets_what_it_lacks(schedule):
    """Catches targets that are served without sending: bytes in are at least what is missing."""
    got = np.bincount(schedule.target, weights=schedule.weight, minlength=schedule.num_places)
    lacks = np.zeros(schedule.num_places)
    for chunk in schedule.chunks:
        for rank in chunk.targets:
            lacks[rank] += chunk.weight * (chunk.sources != (rank,))
    assert (got >= lacks - 1e-9).all()


@settings(max_examples=40, deadline=None)
@given(schedules(), st.floats(1e3, 1e9), st.floats(1.0, 8.0))
def test_time_scales(schedule, num_bytes, factor):
    """Catches mixed units: time is linear in size and latency, and falls with bandwidth in proportion."""
    slow = seconds(schedule, 1e9, 0.0, num_bytes)
    assert seconds(schedule, factor * 1e9, 0.0, num_bytes) == pytest.approx(slow / factor)
    assert seconds(schedule, 1e9, 0.0, factor * num_bytes) == pytest.approx(factor * slow)
    rounds = schedule.rounds().max() + 1
    assert seconds(schedule, 1e9, 1e-6, num_bytes) == pytest.approx(slow + rounds * 1e-6)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_programs_in_order_never_race(data):
    """Catches a dependency that the builder forgets: whatever is sent in order has a fixed result."""
    places, chunks = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 2))
    every = tuple(range(places))
    build = SequentialBuilder(
        "all-reduce", "x", places, [Chunk(weight=1.0 / chunks, sources=every, targets=())] * chunks
    )
    for _ in range(data.draw(st.integers(1, 24))):
        source = data.draw(st.integers(0, places - 1))
        target = (source + data.draw(st.integers(1, places - 1))) % places
        build.send(
            source,
            target,
            data.draw(st.integers(0, chunks - 1)),
            reduce=data.draw(st.booleans()),
            channel=data.draw(st.integers(0, 1)),
        )
        if data.draw(st.booleans()):
            build.next_round()
    assert verify(build.schedule()) == ()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_levels_of_any_algorithms_are_right(data):
    """Catches an algorithm that only works alone: levels nest any of them."""
    collective = data.draw(st.sampled_from(["all-reduce", "all-gather", "reduce-scatter"]))
    sizes = data.draw(st.lists(st.integers(2, 3), min_size=2, max_size=3))
    names = ("reduce-scatter", "all-gather") if collective == "all-reduce" else (collective,)

    def drawn(name: str, size: int, *without: str):
        known = [one for c, one in CASES if c == name and one not in without]
        return schedule_of(name, data.draw(st.sampled_from(known)), size)

    schedule = drawn(collective, sizes[-1])
    for level in range(len(sizes) - 2, -1, -1):
        inner = [drawn(name, sizes[level], "nvls", "sharp") for name in names]
        parts = data.draw(st.integers(1, 3)) if level == 0 else 1
        schedule = two_level(collective, inner, schedule, parts=parts)
    assert verify(schedule) == ()


@settings(max_examples=20, deadline=None)
@given(schedules())
def test_rounds_by_the_compiled_loop_are_those_by_level(schedule):
    """The loop counts those of schedules with very many sends, which are listed in order."""
    pytest.importorskip("numba")
    count = schedule.num_sends
    send = np.repeat(np.arange(count), np.diff(schedule.indptr))
    by_level = rounds_by_level(send, schedule.indices, count)
    assert (_rounds_in_order(schedule.indptr, schedule.indices) == by_level).all()
    backwards = count - 1 - schedule.indices[::-1]
    turned = np.concatenate([[0], np.cumsum(np.diff(schedule.indptr)[::-1])])
    assert len(backwards) == 0 or _rounds_in_order(turned, backwards) is None
    assert (rounds_by_level(count - 1 - send[::-1], backwards, count)[::-1] == by_level).all()


@settings(max_examples=30, deadline=None)
@given(schedules())
def test_files_keep_schedules(schedule):
    data = schedule_object(schedule)
    assert schedule_object(schedule_from(data)) == data
