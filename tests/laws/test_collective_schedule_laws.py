"""Laws of schedules of collectives: what holds whatever the algorithm, the ranks and the network."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshard.comm.schedules.cost import round_cost
from foreshard.comm.schedules.hierarchical import nested
from foreshard.comm.schedules.registry import ALGORITHMS, schedule_of
from foreshard.comm.schedules.schedule import Chunk
from foreshard.comm.schedules.schedule_file import schedule_from, schedule_object
from foreshard.comm.schedules.sequential import SequentialBuilder
from foreshard.comm.schedules.verify import verify
from foreshard.comm.topology.graph import Edge, Topology, Vertex

CASES = [
    (collective, name)
    for name, one in ALGORITHMS.items()
    for collective in one.collectives
    if not one.needs_nodes
]


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


def seconds(schedule, bytes_per_s: float, latency_s: float, num_bytes: float) -> float:
    places = schedule.num_places

    def route(a: int, b: int) -> tuple[int, ...]:
        return (a * (places - 1) + b - (b > a),)

    return round_cost(schedule, full_mesh(places, bytes_per_s, latency_s), route).time_s(num_bytes)


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
    verified = verify(renamed)
    assert verified.faults == ()
    assert verified.peak[names] == pytest.approx(verify(schedule).peak)


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
    assert (verify(schedule).peak >= lacks[: schedule.num_ranks] - 1e-9).all()


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
    assert verify(build.schedule()).faults == ()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_levels_of_any_algorithms_are_right(data):
    """Catches an algorithm that only works alone: levels nest any of them."""
    collective = data.draw(st.sampled_from(["all-reduce", "all-gather", "reduce-scatter"]))
    sizes = data.draw(st.lists(st.integers(2, 3), min_size=2, max_size=3))

    def make(name: str, size: int, root: int):
        known = [one for c, one in CASES if c == name]
        return schedule_of(name, data.draw(st.sampled_from(known)), size, root=root)

    def inner(name: str, size: int, root: int):
        known = [one for c, one in CASES if c == name and one not in ("nvls", "sharp")]
        return schedule_of(name, data.draw(st.sampled_from(known)), size, root=root)

    makers = [inner] * (len(sizes) - 1) + [make]
    schedule = nested(collective, sizes, makers, parts=data.draw(st.integers(1, 3)))
    assert verify(schedule).faults == ()


@settings(max_examples=30, deadline=None)
@given(schedules())
def test_files_keep_schedules(schedule):
    data = schedule_object(schedule)
    assert schedule_object(schedule_from(data)) == data
