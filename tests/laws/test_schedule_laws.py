"""What must hold for every schedule and every program, whatever the durations."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foreshard.errors import SpecError
from foreshard.graph.pipeline import pipeline_program, pipeline_shape
from foreshard.graph.pipeline_schedules import BY_ORDER, FOLDED, ZERO_BUBBLE, Op, in_flight, stage_order
from foreshard.graph.program import Program, ProgramBuilder
from foreshard.sim import critical_path
from foreshard.spec.plan import SCHEDULES

seconds = st.floats(0.0, 10.0, allow_subnormal=False)


@st.composite
def counts(draw):
    """A schedule and counts it accepts."""
    schedule = draw(st.sampled_from(SCHEDULES))
    sizes = {"num_stages": draw(st.integers(1, 6)), "num_micro_batches": draw(st.integers(1, 14))}
    if schedule == "interleaved":
        sizes["num_chunks"] = draw(st.integers(2, 4))
        sizes["group_size"] = draw(st.none() | st.integers(2, 9))
    if schedule in FOLDED:
        sizes["num_chunks"] = 2
    try:
        stage_order(schedule, **sizes)
    except SpecError:
        assume(False)
    return schedule, sizes


@st.composite
def pipelines(draw):
    """A pipeline with uneven times in any p2p mode."""
    schedule, sizes = draw(counts())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    table = (sizes["num_stages"], sizes.get("num_chunks", 1), sizes["num_micro_batches"])
    split = ("backward_input_s", "backward_weight_s") if schedule in ZERO_BUBBLE else ()
    backward = ("backward_s", *split) if schedule not in ("zb-h1", "zb-h2", "zbv") else split
    send_s = draw(st.sampled_from([0.0, 0.05, 2.0]))
    return {
        "schedule": schedule,
        "num_micro_batches": sizes["num_micro_batches"],
        "group_size": sizes.get("group_size"),
        "send_forward_s": send_s,
        "send_backward_s": send_s / 2,
        **{key: rng.random(table) for key in ("forward_s", *backward)},
    }


@st.composite
def programs(draw):
    """A program of any form without circles: tasks made in a hidden order, numbered by resource."""
    num_resources, num_tasks = draw(st.integers(1, 5)), draw(st.integers(1, 25))
    resource = [draw(st.integers(0, num_resources - 1)) for _ in range(num_tasks)]
    number = np.empty(num_tasks, dtype=int)
    number[np.argsort(resource, kind="stable")] = np.arange(num_tasks)
    builder = ProgramBuilder()
    for r in range(num_resources):
        builder.resource(f"r{r}")
    builder.add_many(np.sort(resource), [draw(seconds) for _ in range(num_tasks)])
    for task in range(1, num_tasks):
        for before in draw(st.lists(st.integers(0, task - 1), max_size=3)):
            builder.depend(number[task], number[before])
    return builder.build()


def edges(program: Program) -> list[tuple[int, int]]:
    task = np.repeat(np.arange(program.num_tasks), np.diff(program.indptr))
    return list(zip(task.tolist(), program.indices.tolist(), strict=True))


@given(counts())
def test_every_op_once_and_in_an_order_that_data_allow(case):
    schedule, sizes = case
    halves = 2 if schedule == "dualpipe" else 1  # a micro-batch passes one of the two copies
    for order in stage_order(schedule, **sizes):
        rows = [tuple(row) for row in order.tolist()]
        place = {row: i for i, row in enumerate(rows)}
        visits = sizes["num_micro_batches"] * sizes.get("num_chunks", 1) // halves
        passed = {op: {(c, k) for kind, c, k in rows if kind == op} for op in Op}
        assert len(place) == len(rows)
        assert len(passed[Op.FORWARD]) == visits
        assert passed[Op.BACKWARD_INPUT] == passed[Op.BACKWARD_WEIGHT]
        assert not passed[Op.BACKWARD] & passed[Op.BACKWARD_INPUT]
        assert passed[Op.BACKWARD] | passed[Op.BACKWARD_INPUT] == passed[Op.FORWARD]
        for op, chunk, k in rows:
            before = {Op.BACKWARD_WEIGHT: Op.BACKWARD_INPUT}.get(op, Op.FORWARD)
            assert place[before, chunk, k] <= place[op, chunk, k]


@given(counts())
def test_memory_in_flight_falls_along_the_stages_and_gpipe_is_the_most(case):
    schedule, sizes = case
    held = in_flight(schedule, **sizes)
    visits = sizes["num_micro_batches"] * sizes.get("num_chunks", 1)
    falls = schedule in BY_ORDER or (np.diff(held) <= 0).all()
    assert falls and held.max() <= visits and held.min() >= 1


@given(pipelines())
@settings(deadline=None)
def test_no_p2p_mode_waits_for_itself_and_overlap_never_costs(case):
    """Catches a call order that deadlocks, and an edge that overlap should have dropped."""
    makespans = [
        critical_path.run(pipeline_program(**case, overlap_p2p=overlap, overlap_warm_up=warm_up)).makespan_s
        for overlap, warm_up in ((False, False), (True, False), (True, True))
    ]
    blocking, steady, everywhere = makespans
    assert everywhere <= steady * (1 + 1e-12) and everywhere <= blocking * (1 + 1e-12)


@given(pipelines())
def test_makespan_covers_every_stage_and_every_micro_batch(case):
    program = pipeline_program(**case, overlap_p2p=True)
    makespan_s = critical_path.run(program).makespan_s * (1 + 1e-12)
    ops = program.kind <= Op.BACKWARD_WEIGHT
    load_s = np.bincount(program.stage[ops], program.duration_s[ops])
    assert load_s.max() <= makespan_s
    on_path = program.kind != Op.BACKWARD_WEIGHT  # a weight gradient is no link of the chain
    chain_s = np.bincount(program.micro_batch[on_path], program.duration_s[on_path])
    assert chain_s.max() <= makespan_s


@given(programs())
def test_times_are_the_earliest_that_obey_order_and_dependencies(program):
    """Each start equals the latest of what it waits for: no earlier, no later."""
    timeline = critical_path.run(program)
    waits = [[0.0] for _ in range(program.num_tasks)]
    for tasks in np.split(program.resource_tasks, program.resource_indptr[1:-1]):
        for before, task in pairwise(tasks):
            waits[task].append(timeline.end_s[before])
    for task, before in edges(program):
        waits[task].append(timeline.end_s[before])
    assert timeline.start_s.tolist() == [max(wait) for wait in waits]
    assert (timeline.end_s == timeline.start_s + program.duration_s).all()


@given(programs(), st.data())
def test_monotone_in_every_duration(program, data):
    task = data.draw(st.integers(0, program.num_tasks - 1))
    slower = program.duration_s.copy()
    slower[task] += data.draw(seconds)
    before, after = critical_path.run(program), critical_path.run(replace(program, duration_s=slower))
    assert (after.end_s >= before.end_s).all()


@given(programs(), st.randoms(use_true_random=False))
def test_numbers_and_names_do_not_matter(program, random):
    """Renumber tasks (keeping the order on each resource) and resources; times follow."""
    queues = [list(q) for q in np.split(program.resource_tasks, program.resource_indptr[1:-1])]
    new_resource = random.sample(range(len(queues)), len(queues))
    builder = ProgramBuilder()
    for r in range(len(queues)):
        builder.resource(f"other{r}")
    renumbered = {}
    while any(queues):
        r = random.choice([r for r, queue in enumerate(queues) if queue])
        task = queues[r].pop(0)
        renumbered[task] = builder.add(new_resource[r], program.duration_s[task])
    for task, before in edges(program):
        builder.depend(renumbered[task], renumbered[before])
    there = np.array([renumbered[task] for task in range(program.num_tasks)])
    end_s = critical_path.run(builder.build()).end_s
    assert end_s[there].tolist() == critical_path.run(program).end_s.tolist()


@given(programs())
def test_twice_the_durations_take_twice_the_time(program):
    doubled = replace(program, duration_s=2 * program.duration_s)
    assert (critical_path.run(doubled).end_s == 2 * critical_path.run(program).end_s).all()


@given(programs())
@settings(deadline=None)
def test_compiled_gives_the_same_bits(program):
    pytest.importorskip("numba")
    plain, fast = critical_path.run(program), critical_path.run(program, compiled=True)
    assert plain.end_s.tobytes() == fast.end_s.tobytes()


@given(counts())
def test_after_the_last_tasks_of_a_stage_nothing_of_it_runs(case):
    """Catches an optimizer that would start while its stage still sends."""
    schedule, sizes = case
    shape = pipeline_shape(schedule, **sizes)
    table = (sizes["num_stages"], sizes.get("num_chunks", 1))
    keys = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
    times = {key: np.ones(table) for key in keys}
    program = pipeline_program(
        schedule=schedule,
        num_micro_batches=sizes["num_micro_batches"],
        group_size=sizes.get("group_size"),
        send_forward_s=0.5,
        send_backward_s=0.5,
        **times,
    )
    end_s = critical_path.run(program).end_s
    for stage, last in enumerate(shape.last):
        assert end_s[last].max() == end_s[program.stage == stage].max()
