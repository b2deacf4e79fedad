"""The all-reduce that a user names, and what hosts cannot execute alike."""

from dataclasses import replace

import numpy as np
import pytest

from foreshard.comm.schedules.registry import ALGORITHMS, schedule_of
from foreshard.comm.schedules.schedule import Chunk, ScheduleBuilder
from foreshard.comm.schedules.selection import ScheduleSelection, all_reduce_selection, sums_round_alike
from foreshard.errors import SpecError


def rounded(schedule, values):
    """Execute with float32 numbers, send by send in the common order; return what each rank ends with."""
    held = {(r, c): values[r, c] for c, chunk in enumerate(schedule.chunks) for r in chunk.sources}
    order = np.lexsort((np.arange(schedule.num_sends), schedule.rounds()))
    for i in order.tolist():
        source, target, chunk = schedule.source[i], schedule.target[i], schedule.chunk[i]
        value = held[source, chunk]
        held[target, chunk] = held[target, chunk] + value if schedule.is_reduced[i] else value
    return held


@pytest.mark.parametrize("num_ranks", range(2, 10))
def test_alike_is_what_numbers_show(num_ranks):
    """Where the expressions are equal so are all sums of random numbers; seeded changes are found."""
    draw = np.random.default_rng(num_ranks)
    for name, made in ALGORITHMS.items():
        if "all-reduce" not in made.collectives or made.needs_nodes or name in ("nvls", "sharp"):
            continue
        schedule = schedule_of("all-reduce", name, num_ranks)
        assert sums_round_alike(schedule), name
        for _ in range(20):
            values = draw.standard_normal((num_ranks, len(schedule.chunks))).astype(np.float32)
            held = rounded(schedule, values)
            for chunk in range(len(schedule.chunks)):
                assert len({held[rank, chunk].tobytes() for rank in range(num_ranks)}) == 1


def test_sums_in_other_orders_are_refused():
    """Four ranks gather all values, and each adds them from its own on: the last bits differ."""
    every = tuple(range(4))
    chunks = [Chunk(weight=1.0, sources=every, targets=every)]
    build = ScheduleBuilder("all-reduce", "rotated", 4, chunks)
    firsts = [build.send(rank, (rank + 1) % 4, 0, reduce=True) for rank in every]
    assert firsts == [0, 1, 2, 3]
    assert not sums_round_alike(build.schedule())
    with pytest.raises(SpecError, match="different orders"):
        ScheduleSelection(name="x", schedule=build.schedule()).schedule_for(4)


def test_what_cannot_be_executed_is_refused():
    ring = schedule_of("all-reduce", "ring", 4)
    for schedule, says in (
        (ring, "a schedule of 4 ranks"),
        (schedule_of("all-reduce", "nvls", 3), "reduces in switches"),
        (replace(schedule_of("all-reduce", "ring", 3), chunks=ring.chunks[:3]), "take no part|of together"),
    ):
        with pytest.raises(SpecError, match=says):
            ScheduleSelection(name="x", schedule=schedule).schedule_for(3)


@pytest.mark.parametrize(
    "text", ["", "rong", "ring:", "ring:parts", "ring:parts=0", "ring:root=1", "none.json"]
)
def test_bad_words_are_refused(text):
    with pytest.raises(SpecError):
        all_reduce_selection(text)


def test_words_are_read():
    assert all_reduce_selection("backend") is None
    assert all_reduce_selection("hierarchical:per_node=2,channels=2").schedule_for(6).num_ranks == 6
