"""Times of flow programs worked out by hand, in plain Python and compiled."""

import sys

import numpy as np
import pytest

from foreshard.comm.flow.program import FlowProgram, FlowProgramBuilder
from foreshard.comm.flow.simulation import simulate
from foreshard.comm.flow.symmetry import fold
from foreshard.errors import ExtraMissingError, SpecError

pytestmark = pytest.mark.parametrize("compiled", [False, True])


def build(*capacity: float) -> FlowProgramBuilder:
    return FlowProgramBuilder(np.array(capacity))


def test_a_flow_alone_takes_latency_and_bytes_over_the_narrowest_link(compiled):
    builder = build(10.0, 4.0)
    builder.send(builder.route([0, 1]), 8.0, latency_s=0.5)
    times = simulate(builder.build(), compiled=compiled)
    assert times.end_s.tolist() == [2.5]


def test_a_flow_gets_the_rate_of_one_that_ends(compiled):
    """Both at 5 until the short one ends at 2; the long one has 10 left, at 10: ends at 3."""
    builder = build(10.0)
    link = builder.route([0])
    builder.send(link, 10.0)
    builder.send(link, 20.0)
    times = simulate(builder.build(), compiled=compiled)
    assert times.end_s.tolist() == [2.0, 3.0]


def test_a_late_flow_of_high_priority_stops_the_other(compiled):
    """One second at 10, one second of nothing, one second at 10."""
    builder = build(10.0)
    link = builder.route([0])
    low = builder.send(link, 20.0)
    high = builder.send(link, 10.0, priority=1, release_s=1.0)
    end_s = simulate(builder.build(), compiled=compiled).end_s
    assert (end_s[low], end_s[high]) == (3.0, 2.0)


def test_two_jobs_share_by_weight(compiled):
    """Rates 6 and 3: the first ends at 2, the second has 12 - 6 = 6 left at 9."""
    builder = build(9.0)
    link = builder.route([0])
    builder.send(link, 12.0, weight=2.0)
    builder.send(link, 12.0)
    assert simulate(builder.build(), compiled=compiled).end_s == pytest.approx([2.0, 2.0 + 2 / 3], rel=1e-12)


def test_a_queue_runs_one_task_at_a_time_in_order(compiled):
    builder = build(1.0)
    stream, channel, link = builder.new_queue(), builder.new_queue(), builder.route([0])
    first = builder.compute(1.0, queue=stream, release_s=3.0)
    second = builder.compute(2.0, queue=stream)
    sends = [builder.send(link, 1.0, latency_s=0.25, queue=channel) for _ in range(3)]
    end_s = simulate(builder.build(), compiled=compiled).end_s
    assert (end_s[first], end_s[second]) == (4.0, 6.0)
    assert end_s[sends].tolist() == [1.25, 2.5, 3.75]


def test_a_step_overlaps_gradients_with_the_backward_pass(compiled):
    """Layer 2's backward ends at 1, its gradient (8 B at 4 B/s) at 3; layer 1's backward ends at 2.

    Its gradient (4 B) shares the link from 2 on: both have 4 B left at 2 B/s, both end at 4; the update
    takes a second more.
    """
    builder = build(4.0)
    stream, link = builder.new_queue(), builder.route([0])
    backward = [builder.compute(1.0, queue=stream) for _ in range(2)]
    gradients = [builder.send(link, 8.0, after=[backward[0]]), builder.send(link, 4.0, after=[backward[1]])]
    update = builder.compute(1.0, queue=stream, after=gradients)
    times = simulate(builder.build(), compiled=compiled)
    assert times.end_s[gradients].tolist() == [4.0, 4.0]
    assert (times.start_s[update], times.end_s[update]) == (4.0, 5.0)


def test_messages_without_bytes_or_resources_take_their_delay(compiled):
    builder = build(1.0)
    builder.send(builder.route([0]), 0.0, latency_s=2.0)
    builder.send(builder.route([]), 5.0, latency_s=1.0)
    times = simulate(builder.build(), compiled=compiled)
    assert times.end_s.tolist() == [2.0, 1.0]


def test_nothing_takes_no_time(compiled):
    assert simulate(build(1.0).build(), compiled=compiled).makespan_s == 0.0


def test_a_circle_is_named(compiled):
    builder = build(1.0)
    stream = builder.new_queue()
    builder.compute(1.0)
    first = builder.compute(1.0, queue=stream)
    second = builder.compute(1.0, queue=stream)
    builder.depend(first, second)
    with pytest.raises(SpecError, match="tasks 1, 2 never start"):
        simulate(builder.build(), compiled=compiled)


def test_symmetric_senders_are_simulated_once(compiled):
    """Eight senders on one link and their eight receivers fold into one task, at an eighth of the link."""
    builder = build(8.0, *[3.0] * 8)
    for i in range(8):
        builder.send(builder.route([0, 1 + i]), 4.0, queue=builder.new_queue())
    small = fold(builder.build(), compiled=compiled)
    assert small is not None
    assert (small.program.num_tasks, small.program.num_resources) == (1, 2)
    assert simulate(small.program, compiled=compiled).end_s.tolist() == [4.0]
    assert small.task.tolist() == [0] * 8


def test_one_odd_sender_is_kept_apart(compiled):
    builder = build(8.0)
    for i in range(8):
        builder.send(builder.route([0]), 4.0 if i else 2.0)
    small = fold(builder.build(), compiled=compiled)
    assert small is not None
    assert small.task.tolist() == [0] + [1] * 7 or small.task.tolist() == [1] + [0] * 7
    end_s = simulate(small.program, compiled=compiled).end_s[small.task]
    assert end_s == pytest.approx([2.0] + [2.0 + 14 / 8] * 7)


def test_what_is_different_only_in_what_it_waits_for_is_kept_apart(compiled):
    builder = build(8.0)
    for i in range(4):
        before = builder.compute(1.0 + (i == 3))
        builder.compute(1.0, after=[before])
    program = builder.build()
    small = fold(program, compiled=compiled)
    assert small is not None and small.program.num_tasks == 4
    expected = simulate(program, compiled=compiled).end_s
    assert simulate(small.program, compiled=compiled).end_s[small.task].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.array([0.0])}, r"weight\[0\] is 0"),
        ({"num_bytes": np.array([np.nan])}, r"num_bytes\[0\] is nan"),
        ({"route": np.array([1])}, "route names 1"),
        ({"queue": np.zeros(2, dtype=np.int64)}, "queue has 2 entries"),
        ({"capacity_bytes_per_s": np.array([-1.0])}, "is -1"),
    ],
)
def test_numbers_that_no_program_has_are_refused(compiled, change, message):
    builder = build(1.0)
    builder.send(builder.route([0]), 1.0)
    columns = {name: getattr(builder.build(), name) for name in FlowProgram.__dataclass_fields__}
    with pytest.raises(SpecError, match=message):
        FlowProgram(**{**columns, **change})


def test_dependencies_on_tasks_that_do_not_exist_are_refused(compiled):
    builder = build(1.0)
    builder.compute(1.0, after=[4])
    with pytest.raises(SpecError, match="indices names 4"):
        builder.build()
    builder = build(1.0)
    builder.depend(2, 0)
    with pytest.raises(SpecError, match="a dependency names task 2"):
        builder.build()


def test_without_numba_a_program_runs_in_plain_python(compiled, monkeypatch):
    """A module set to None is one that import does not find."""
    from foreshard.compiled import MIN_COMPILED_TASKS, loops

    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    loops.cache_clear()
    builder = build(1.0)
    for _ in range(MIN_COMPILED_TASKS):
        builder.send(builder.route([0]), 1.0)
    if compiled:
        with pytest.raises(ExtraMissingError, match="needs numba"):
            simulate(builder.build(), compiled=True)
    else:
        assert simulate(builder.build()).makespan_s == pytest.approx(MIN_COMPILED_TASKS)
    loops.cache_clear()
