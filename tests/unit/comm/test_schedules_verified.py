"""Every algorithm computes what its collective promises; the verifier agrees with executing schedules."""

from __future__ import annotations

import heapq
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from foreshard.comm.schedules.hierarchical import two_level
from foreshard.comm.schedules.registry import ALGORITHMS, schedule_of
from foreshard.comm.schedules.ring import ring
from foreshard.comm.schedules.schedule import Chunk, Schedule, ScheduleBuilder
from foreshard.comm.schedules.sequential import SequentialBuilder
from foreshard.comm.schedules.trees import double_tree
from foreshard.comm.schedules.verify import verify

SIZES = [*range(2, 10), 16, 17]
_GARBAGE = 2**40  # what buffers hold before anything is written; no sum of contributions comes near


def is_right(schedule: Schedule, rng: np.random.Generator) -> bool:
    """Execute a schedule on integers in one random legal order; return whether every target has its sum.

    A send reads at its start or at its arrival, whichever the generator draws, and writes at its arrival.
    """
    count = schedule.num_sends
    given = {
        (r, c): int(rng.integers(1, 2**20)) for c, one in enumerate(schedule.chunks) for r in one.sources
    }
    held = dict(given)
    after: list[list[int]] = [[] for _ in range(2 * count)]  # event 2 i: send i starts, 2 i + 1: it arrives
    left = [0] * (2 * count)
    last: dict[tuple[int, int, int], int] = {}
    for send in range(count):
        edges = [(2 * int(other) + 1, 2 * send) for other in schedule.waits_for(send)] + [
            (2 * send, 2 * send + 1)
        ]
        lane = (int(schedule.source[send]), int(schedule.target[send]), int(schedule.channel[send]))
        if lane in last:
            edges += [(2 * last[lane] + end, 2 * send + end) for end in (0, 1)]
        last[lane] = send
        for before, then in edges:
            after[before].append(then)
            left[then] += 1
    priority = rng.random(2 * count).tolist()
    late = rng.random(count) < 0.5
    in_flight: dict[int, int | None] = {}
    ready = [(priority[event], event) for event in range(2 * count) if not left[event]]
    heapq.heapify(ready)
    done = 0

    def read(send: int) -> int | None:
        place, chunk = int(schedule.source[send]), int(schedule.chunk[send])
        return held.get((place, chunk), int(rng.integers(_GARBAGE, 2 * _GARBAGE)))

    while ready:
        _, event = heapq.heappop(ready)
        done += 1
        send, arrives = divmod(event, 2)
        if not arrives:
            in_flight[send] = read(send)
        else:
            value = read(send) if late[send] else in_flight[send]
            there = (int(schedule.target[send]), int(schedule.chunk[send]))
            if schedule.is_reduced[send]:
                empty = 0 if there[0] >= schedule.num_ranks else int(rng.integers(_GARBAGE, 2 * _GARBAGE))
                value = held.get(there, empty) + value
            held[there] = value
        for then in after[event]:
            left[then] -= 1
            if not left[then]:
                heapq.heappush(ready, (priority[then], then))
    if done < 2 * count:
        return False
    wanted = {
        (rank, c): sum(given[source, c] for source in one.sources)
        for c, one in enumerate(schedule.chunks)
        for rank in one.targets
    }
    return all(held.get(place) == value for place, value in wanted.items())


def shapes(algorithm: str, collective: str, num_ranks: int):
    """Yield options of an algorithm to test at a number of ranks."""
    one = ALGORITHMS[algorithm]
    nodes = [n for n in range(2, num_ranks) if num_ranks % n == 0]
    if one.needs_nodes:
        for per_node in nodes[:2]:
            yield {"per_node": per_node}
            yield {"per_node": per_node, "parts": 2, "channels": 2}
        return
    yield {}
    yield {"parts": 4, "channels": 2}
    if "per_node" in one.options and nodes:
        yield {"per_node": nodes[0], "parts": 2}
    if "root" in one.options and collective == "broadcast":
        yield {"root": num_ranks - 1, "parts": 3}


CASES = [(name, collective) for name, one in ALGORITHMS.items() for collective in one.collectives]


@pytest.mark.parametrize(("algorithm", "collective"), CASES)
def test_every_algorithm_is_right_at_every_size(algorithm, collective):
    rng = np.random.default_rng(7)
    for num_ranks in SIZES:
        for options in shapes(algorithm, collective, num_ranks):
            schedule = schedule_of(collective, algorithm, num_ranks, **options)
            assert verify(schedule) == (), (num_ranks, options)
            if num_ranks < 10 or not options.get("parts"):
                assert is_right(schedule, rng), (num_ranks, options)
            assert schedule.algorithm == algorithm
            assert sum(chunk.weight for chunk in schedule.chunks) == pytest.approx(
                num_ranks if collective == "all-to-all" else 1.0
            )


@pytest.mark.parametrize(("algorithm", "collective"), CASES)
def test_uneven_weights_change_sizes_and_not_sends(algorithm, collective):
    if "weights" not in ALGORITHMS[algorithm].options or collective in ("broadcast", "send"):
        return
    if (algorithm, collective) in (("hierarchical", "all-reduce"), ("bruck", "all-to-all")):
        return
    rng = np.random.default_rng(3)
    weights = np.arange(1.0, 7.0) / 21.0
    if collective == "all-to-all":
        weights = np.where(rng.random((6, 6)) < 0.3, 0.0, rng.random((6, 6)))
    options = {"per_node": 3} if ALGORITHMS[algorithm].needs_nodes else {}
    schedule = schedule_of(collective, algorithm, 6, weights=weights.tolist(), **options)
    assert verify(schedule) == ()
    assert is_right(schedule, rng)
    assert sum(chunk.weight for chunk in schedule.chunks) == pytest.approx(weights.sum())
    assert len({round(chunk.weight, 9) for chunk in schedule.chunks}) > 4


def levels_of_rings(collective: str, sizes: tuple[int, ...], root: int, **options: int) -> Schedule:
    """Return rings along each dimension, the first one innermost."""
    if len(sizes) == 1:
        return schedule_of(collective, "ring", sizes[0], root=root)
    names = ("reduce-scatter", "all-gather") if collective == "all-reduce" else (collective,)
    inner = [schedule_of(name, "ring", sizes[0], root=root % sizes[0]) for name in names]
    outer = levels_of_rings(collective, sizes[1:], root // sizes[0])
    return two_level(collective, inner, outer, **options)


@pytest.mark.parametrize("collective", ["all-reduce", "all-gather", "reduce-scatter", "broadcast"])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 2), (2, 3, 3)])
def test_three_dimensions(collective, sizes):
    rng = np.random.default_rng(5)
    for root in {0, 5 if collective == "broadcast" else 0}:
        schedule = levels_of_rings(collective, sizes, root, parts=2)
        assert verify(schedule) == ()
        assert is_right(schedule, rng)


def test_levels_take_any_algorithm():
    rng = np.random.default_rng(6)
    inner = [schedule_of(one, "pat", 3) for one in ("reduce-scatter", "all-gather")]
    for outer in (
        double_tree("all-reduce", 5, parts=2),
        schedule_of("all-reduce", "nvls", 4),
        ring("all-reduce", 2, channels=2),
    ):
        schedule = two_level("all-reduce", inner, outer, parts=3)
        assert verify(schedule) == ()
        assert is_right(schedule, rng)


@cache
def originals() -> tuple[Schedule, ...]:
    """Return small schedules of every kind, to be mutated."""
    wanted = [
        ("all-reduce", "ring", 4, {}),
        ("all-reduce", "double-tree", 5, {"parts": 2}),
        ("all-reduce", "halving-doubling", 5, {}),
        ("all-reduce", "nvls", 4, {"parts": 2}),
        ("all-reduce", "nvls-tree", 4, {"per_node": 2}),
        ("all-reduce", "sharp", 4, {"per_node": 2, "parts": 2}),
        ("all-reduce", "hierarchical", 4, {"per_node": 2, "parts": 2}),
        ("all-gather", "ring", 5, {"channels": 2}),
        ("all-gather", "bruck", 5, {}),
        ("all-gather", "recursive-doubling", 6, {}),
        ("reduce-scatter", "pat", 5, {}),
        ("reduce-scatter", "recursive-halving", 6, {}),
        ("broadcast", "binomial", 7, {"parts": 3}),
        ("broadcast", "ring", 4, {"parts": 4, "channels": 2}),
        ("all-to-all", "bruck", 5, {}),
        ("all-to-all", "three-step", 6, {"per_node": 2}),
        ("send", "chain", 4, {"parts": 3}),
    ]
    return tuple(schedule_of(collective, name, size, **options) for collective, name, size, options in wanted)


def rebuilt(schedule: Schedule, rows: list[dict]) -> Schedule:
    """Return a schedule with these sends; what they wait for are indices of rows."""
    build = ScheduleBuilder(
        schedule.collective, schedule.algorithm, schedule.num_ranks, schedule.chunks, schedule.switches
    )
    for row in rows:
        build.send(
            row["source"],
            row["target"],
            row["chunk"],
            reduce=row["reduce"],
            channel=row["channel"],
            after=row["after"],
        )
    return build.schedule()


def rows_of(schedule: Schedule) -> list[dict]:
    return [
        {
            "source": int(schedule.source[i]),
            "target": int(schedule.target[i]),
            "chunk": int(schedule.chunk[i]),
            "reduce": bool(schedule.is_reduced[i]),
            "channel": int(schedule.channel[i]),
            "after": schedule.waits_for(i).tolist(),
        }
        for i in range(schedule.num_sends)
    ]


def mutated(schedule: Schedule, kind: str, rng: np.random.Generator) -> Schedule:
    """Return a schedule with one thing wrong."""
    rows = rows_of(schedule)
    at = int(rng.integers(len(rows)))
    row = rows[at]
    if kind == "drop":
        del rows[at]
        for other in rows:
            waits = [*other["after"], *row["after"]] if at in other["after"] else other["after"]
            other["after"] = sorted({i - (i > at) for i in waits if i != at})
    elif kind == "duplicate":
        rows.append(dict(row))
    elif kind == "reorder":
        waiting = [i for i, one in enumerate(rows) if one["after"]]
        at = int(rng.choice(waiting))
        if rng.random() < 0.5:
            rows[at]["after"] = list(rng.permutation(rows[at]["after"])[1:])
        else:
            before = int(rng.choice(rows[at]["after"]))
            rows[at]["after"] = [i for i in rows[at]["after"] if i != before]
            rows[before]["after"] = [*rows[before]["after"], at]
    elif kind == "swap":
        other = int(rng.integers(len(rows)))
        for key in ("source", "target", "chunk", "reduce"):
            rows[at][key], rows[other][key] = rows[other][key], rows[at][key]
    elif kind in ("source", "target"):
        other_end = row["target" if kind == "source" else "source"]
        row[kind] = int(
            rng.choice([p for p in range(schedule.num_places) if p not in (row[kind], other_end)])
        )
    elif kind == "chunk":
        row["chunk"] = int(rng.choice([c for c in range(len(schedule.chunks)) if c != row["chunk"]]))
    else:
        row["reduce"] = not row["reduce"]
    return rebuilt(schedule, rows)


KINDS = ["drop", "duplicate", "reorder", "swap", "source", "target", "chunk", "reduce"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_verifier_catches_every_mutation_that_goes_wrong(kind):
    """Where no execution goes wrong, the mutation counts as correct; the verifier may only find a race."""
    rng = np.random.default_rng(KINDS.index(kind))
    wrong = harmless = 0
    for turn in range(10):
        for original in originals():
            schedule = mutated(original, kind, rng)
            faults = verify(schedule)
            fails = any(not is_right(schedule, rng) for _ in range(12))
            wrong += fails
            harmless += not fails
            assert faults or not fails, (kind, turn, original.algorithm, rows_of(schedule))
            benign = not faults or any("race" in fault for fault in faults)
            assert fails or benign, (kind, turn, original.algorithm, faults)
    assert wrong + harmless == 10 * len(originals())
    assert wrong > (10 if kind in ("reorder", "duplicate") else 100), (wrong, harmless)


def test_a_circle_of_waiting_is_a_deadlock():
    build = ScheduleBuilder("broadcast", "x", 3, [Chunk(weight=1.0, sources=(0,), targets=(0, 1, 2))])
    build.send(0, 1, 0, after=[1])
    build.send(1, 2, 0, after=[0])
    assert "deadlock: sends 0, 1" in verify(build.schedule())[0]


def test_a_channel_that_holds_back_what_its_first_send_waits_for_is_a_deadlock():
    chunks = [Chunk(weight=0.5, sources=(0,), targets=(1,))] * 2
    build = ScheduleBuilder("send", "x", 2, chunks)
    build.send(0, 1, 0, after=[1])
    build.send(0, 1, 1)
    assert "deadlock" in verify(build.schedule())[0]
    build = ScheduleBuilder("send", "x", 2, chunks)
    build.send(0, 1, 0, channel=1, after=[1])
    build.send(0, 1, 1)
    assert verify(build.schedule()) == ()


def test_faults_name_send_place_and_chunk():
    chunk = Chunk(weight=1.0, sources=(0, 1), targets=(0, 1))
    build = ScheduleBuilder("all-reduce", "x", 3, [chunk])
    build.send(2, 1, 0, reduce=True)
    build.send(0, 1, 0, reduce=True)
    assert verify(build.schedule()) == (
        "send 0 (rank 2 -> rank 1, chunk 0) sends what rank 2 does not hold",
        "rank 0 ends with chunk 0 without ranks [1]",
    )
    build = ScheduleBuilder("all-reduce", "x", 2, [chunk])
    build.send(0, 1, 0, reduce=True)
    build.send(1, 0, 0, reduce=True, after=[0])
    assert verify(build.schedule()) == ("rank 0 ends with chunk 0 with ranks [0] more than once",)
    build = ScheduleBuilder("all-reduce", "x", 2, [chunk])
    build.send(0, 1, 0, reduce=True)
    build.send(1, 0, 0)
    assert verify(build.schedule())[0] == ("race: sends 0 and 1 access chunk 0 at rank 1 in no fixed order")


def test_malformed_schedules_are_told_apart_from_wrong_ones():
    good = schedule_of("all-gather", "ring", 3)
    for change, word in (
        ({"source": good.source + 9}, "has source"),
        ({"chunk": good.chunk - 5}, "has chunk"),
        ({"target": good.source}, "to itself"),
        ({"channel": good.channel[:-1]}, "lengths"),
        ({"indices": good.indices + 99}, "does not exist"),
        ({"indptr": good.indptr[::-1]}, "indptr"),
        ({"chunks": ()}, "has chunk"),
    ):
        assert word in verify(replace(good, **change))[0]
    empty = ScheduleBuilder("all-gather", "x", 2, []).schedule()
    assert verify(empty) == ("there are no chunks",)


def test_order_through_another_chunk_is_an_order():
    """Rank 1 passes chunk 0 on before chunk 1 tells rank 0 to overwrite it."""
    chunks = [Chunk(weight=0.5, sources=(0,), targets=(2,)), Chunk(weight=0.5, sources=(2,), targets=(0,))]
    build = ScheduleBuilder("all-to-all", "x", 3, chunks)
    first = build.send(0, 1, 0)
    second = build.send(1, 2, 0, after=[first])
    third = build.send(2, 0, 1, after=[second])
    build.send(0, 1, 0, after=[third])
    assert verify(build.schedule()) == ()


def test_the_sequential_builder_orders_writes_after_reads():
    chunk = Chunk(weight=1.0, sources=(0, 1, 2), targets=(0, 1, 2))
    build = SequentialBuilder("all-reduce", "x", 3, [chunk])
    build.send(1, 0, 0, reduce=True)
    build.send(2, 0, 0, reduce=True)
    build.send(0, 1, 0)
    build.send(0, 2, 0)
    schedule = build.schedule()
    assert [schedule.waits_for(i).tolist() for i in range(4)] == [[], [], [0, 1], [0, 1]]


@pytest.mark.parametrize("ranks", [2, 7, 9])
@pytest.mark.parametrize(("collective", "algorithm"), [("broadcast", "double-tree"), ("all-reduce", "ring")])
def test_a_schedule_listed_by_rounds_is_the_same_and_right(collective, algorithm, ranks):
    schedule = schedule_of(collective, algorithm, ranks, parts=3)
    listed = schedule.listed_by_rounds()
    assert not verify(listed)
    assert (np.diff(listed.rounds()) >= 0).all()
    assert listed.rounds().tolist() == sorted(schedule.rounds().tolist())
    columns = ("source", "target", "chunk", "channel")
    rows = [sorted(zip(*(getattr(one, name) for name in columns), strict=True)) for one in (schedule, listed)]
    assert rows[0] == rows[1]
