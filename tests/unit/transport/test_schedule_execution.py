"""Schedules executed for real over gloo: every rank a thread with its own process group."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
import torch.distributed as dist

from foreshard.comm.schedules.registry import ALGORITHMS, schedule_of
from foreshard.comm.schedules.schedule import COLLECTIVES
from foreshard.errors import SpecError
from foreshard.profile.collective_times import _is_exact, local_times
from foreshard.profile.link_times import TimedRanks
from foreshard.transport.schedule_execution import ScheduleExecution, elements_of

ON_HOSTS = [
    (name, collective)
    for name, made in ALGORITHMS.items()
    for collective in COLLECTIVES
    if collective in made.collectives and name not in ("nvls", "nvls-tree", "sharp")
]
NODES = {4: 2, 6: 3, 8: 4, 9: 3}


@cache
def groups(size):
    """Return a process group of every rank, joined in threads."""
    store = dist.HashStore()

    def join(rank):
        ranks = TimedRanks(store, rank, size, torch.device("cpu"), address="127.0.0.1")
        return ranks.group(range(size), "all")

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))


def exact(schedule, num_elements):
    sizes, members = elements_of(schedule, num_elements), groups(schedule.num_ranks)

    def run(rank):
        return _is_exact(ScheduleExecution(schedule, rank, members[rank]), schedule, rank, sizes)

    with ThreadPoolExecutor(schedule.num_ranks) as pool:
        return all(pool.map(run, range(schedule.num_ranks)))


@pytest.mark.parametrize(
    "num_ranks", [2, 3, 4, 6, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 7, 8, 9))]
)
def test_every_algorithm_ends_with_the_exact_sums(num_ranks):
    ran = 0
    for name, collective in ON_HOSTS:
        needs_nodes = ALGORITHMS[name].needs_nodes
        if needs_nodes and num_ranks not in NODES:
            continue
        per_node = NODES[num_ranks] if needs_nodes else None
        for parts in (None, 3):
            made = schedule_of(collective, name, num_ranks, per_node=per_node, parts=parts)
            assert exact(made, 1000), (name, collective, parts)
            ran += 1
    assert ran >= 30


def test_uneven_shares_and_channels_are_exact():
    weights = [0.4, 0.1, 0.0, 0.3, 0.2]
    for collective in ("all-reduce", "all-gather", "reduce-scatter"):
        assert exact(schedule_of(collective, "ring", 5, weights=weights, channels=2), 777)


def test_a_schedule_that_loses_a_send_is_found():
    made = schedule_of("all-reduce", "ring", 3)
    made.is_reduced[0] = False  # overwrites what it should add to
    assert not exact(made, 100)


def test_switches_cannot_be_executed():
    with pytest.raises(SpecError, match="reduces in switches"):
        ScheduleExecution(schedule_of("all-reduce", "nvls", 4), 0, None)


def test_local_ranks_are_started_timed_and_ended():
    found = local_times(schedule_of("all-reduce", "halving-doubling", 3), 4096, repeats=2)
    assert found["is_exact"] and found["time_s"] > 0 and found["library_s"] > 0
