"""A search for a schedule keeps its budget. Calls of functions are counted in place of seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foreshard import api
from foreshard.comm.schedules.registry import schedule_of
from foreshard.comm.schedules.verify import verify
from foreshard.comm.synthesis.attempts import ScheduleAttempt, ScheduleFound
from foreshard.comm.synthesis.budget import Check, SynthesisBudget
from foreshard.comm.synthesis.synthesize import Synthesis, _search, synthesize
from foreshard.comm.synthesis.timing import seconds_of
from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.of_cluster import topology_of
from foreshard.comm.topology.regular import mesh

CALL_S = 1e-6
"""What a call counts for: about what one takes."""
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast")
TOPOLOGIES = {
    "grid": lambda: mesh((5, 4), bytes_per_s=1e9, latency_s=1e-6),
    "unequal nodes": lambda: topology_of(api.load_cluster("2x8xh100-sxm+1x8xa100-sxm-80gb")),
}


@cache
def load() -> None:
    """Load and compile what any search calls."""
    for collective in COLLECTIVES:
        synthesize(collective, 1e8, TOPOLOGIES["grid"](), budget=SynthesisBudget(0.3))
    many = schedule_of("all-gather", "ring", 30)
    seconds_of(many, mesh((30,), bytes_per_s=1e9), 1e8)


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    count = [0]

    def see(frame: object, event: str, argument: object) -> None:
        count[0] += 1

    sys.setprofile(see)
    try:
        yield count
    finally:
        sys.setprofile(None)


def searched(collective: str, topology: Topology, seconds: float) -> tuple[Synthesis, float]:
    """What is found within so many calls, and the seconds that they count for."""
    with counted_calls() as count:

        def clock() -> float:
            return count[0] * CALL_S

        found = synthesize(collective, 1e8, topology, budget=SynthesisBudget(seconds, clock, clock))
        return found, count[0] * CALL_S


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_search_keeps_its_budget_and_more_of_it_finds_nothing_worse(name, collective):
    topology = TOPOLOGIES[name]()
    load()
    first, least_s = searched(collective, topology, 0.0)
    assert not verify(first.schedule)
    found_s = [first.seconds]
    for budget_s in (0.1, 0.3):
        found, spent_s = searched(collective, topology, budget_s)
        assert spent_s <= max(1.1 * budget_s, least_s)
        found_s.append(found.seconds)
    assert found_s == sorted(found_s, reverse=True)


def test_more_budget_is_of_use():
    """Otherwise the law above says nothing."""
    topology = TOPOLOGIES["unequal nodes"]()
    load()
    first, _ = searched("all-gather", topology, 0.0)
    found, _ = searched("all-gather", topology, 0.5)
    assert found.seconds < 0.9 * first.seconds


def test_twice_the_ranks_of_a_broadcast_are_about_twice_the_work_of_its_first_schedule():
    """One that looks at the whole fabric for every rank takes four times the work."""
    calls = []
    for nodes in (16, 32, 64):
        topology = topology_of(api.load_cluster(f"{nodes}x8xh100-sxm"))
        load()
        found, seconds = searched("broadcast", topology, 0.0)
        assert found.schedule.algorithm == "ring"
        calls.append(seconds)
    assert calls[2] / calls[1] < 2.5 and calls[1] / calls[0] < 2.5


@pytest.mark.parametrize("stopped_at", [1, 3])
def test_ctrl_c_ends_a_search_with_the_best_so_far(stopped_at):
    made = []

    def attempts() -> Iterator[ScheduleAttempt]:
        for number in range(9):

            def make(to_beat_s: float, check: Check, number: int = number) -> ScheduleFound:
                if number == stopped_at:
                    raise KeyboardInterrupt
                made.append(number)
                schedule = schedule_of("send", "direct", 2)
                return ScheduleFound(seconds=9.0 - number, schedule=lambda: schedule)

            yield ScheduleAttempt(method=str(number), work=1.0, finishing_s=0.0, make=make)

    found, made_by, is_interrupted = _search(attempts(), 1.0, SynthesisBudget(1e6))
    assert is_interrupted and made_by == str(stopped_at - 1) and len(made) == stopped_at
    assert found.seconds == 10.0 - stopped_at


def test_ctrl_c_before_the_first_schedule_is_ctrl_c():
    def make(to_beat_s: float, check: Check) -> ScheduleFound:
        raise KeyboardInterrupt

    first = ScheduleAttempt(method="first", work=1.0, finishing_s=0.0, make=make)
    with pytest.raises(KeyboardInterrupt):
        _search([first], 1.0, SynthesisBudget(1e6))


TICK_S = 0.125
BUDGET_S = 10.0
TICKS = st.integers(0, 60)


@given(
    tries=st.lists(
        st.tuples(st.integers(1, 9), TICKS, TICKS.map(lambda ticks: ticks * TICK_S)), min_size=1, max_size=6
    )
)
@example(tries=[(9, 1, 0.0), (5, 7, 6.0), (7, 60, 0.25)])
def test_a_search_leaves_time_to_finish_the_best_schedule_it_found(tries):
    """An attempt takes ticks and then has a schedule of some seconds, which others take to finish."""
    now = [0.0]
    finishing_s = {}

    def attempt(number: int, seconds: int, ticks: int) -> ScheduleAttempt:
        def make(to_beat_s: float, check: Check) -> ScheduleFound:
            for _ in range(ticks):
                now[0] += TICK_S
                if number:  # the first one is made whatever the budget
                    check()
            return ScheduleFound(seconds=float(seconds), schedule=lambda: schedule_of("send", "direct", 2))

        method = f"method {number}"
        finishing_s[method] = tries[number][2]
        return ScheduleAttempt(method=method, work=1.0, finishing_s=finishing_s[method], make=make)

    attempts = [attempt(number, seconds, ticks) for number, (seconds, ticks, _) in enumerate(tries)]
    budget = SynthesisBudget(BUDGET_S, lambda: now[0], lambda: now[0])
    _, made_by, _ = _search(attempts, 1.0, budget)
    unavoidable_s = tries[0][1] * TICK_S + tries[0][2] if made_by == "method 0" else 0.0
    # the tick after which the budget is spent counts too
    assert now[0] + finishing_s[made_by] <= max(BUDGET_S, unavoidable_s) + TICK_S
