"""Compiled loops have one type of arguments each: processes that start together mix up several in caches."""

import numpy as np
import pytest

from foreshard.comm.flow.schedule_run import run_schedule, send_times
from foreshard.comm.schedules.registry import ALGORITHMS, schedule_of
from foreshard.comm.schedules.schedule import _rounds_in_order
from foreshard.comm.synthesis.timing import seconds_of
from foreshard.comm.topology.regular import full_mesh, star
from foreshard.compiled import loops

MODULES = (
    "foreshard.comm.flow._kernel",
    "foreshard.comm.flow._symmetry_kernel",
    "foreshard.comm.schedules._rounds_kernel",
    "foreshard.comm.synthesis._timing_kernel",
)
NUM_RANKS = 24  # sends enough to be worth compiling


def test_no_loop_is_compiled_for_two_types():
    pytest.importorskip("numba")
    mesh, hub = full_mesh(NUM_RANKS, 1e9), star(NUM_RANKS, 1e9, 1e-6)
    number = {(link.source, link.target): i for i, link in enumerate(hub.links)}
    kinds = set()
    for name, entry in ALGORITHMS.items():
        if entry.needs_nodes or name in ("nvls", "sharp"):
            continue
        for collective in entry.collectives:
            schedule = schedule_of(collective, name, NUM_RANKS)
            kinds.add((schedule.indptr.dtype, schedule.indices.dtype))
            _rounds_in_order(schedule.indptr, schedule.indices)
            seconds_of(schedule.listed_by_rounds(), mesh, 1e6)

            def route(a, b, channel):
                return number[a, NUM_RANKS], number[NUM_RANKS, b]

            run_schedule(schedule, 1e6, hub, route, compiled=True)
            send_times(schedule, 1e6, hub, route)
    assert len(kinds) > 1, "schedules of one type of numbers show nothing"
    _rounds_in_order(np.zeros(2, dtype=np.int64), np.zeros(0, dtype=np.int32))
    compiled = 0
    for module in MODULES:
        for name, loop in vars(loops(module, True)).items():
            types = getattr(loop, "signatures", [])
            compiled += len(types)
            assert len(types) <= 1, (module, name, types)
    assert compiled >= 8
