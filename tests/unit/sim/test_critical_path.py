import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from foreshard.compiled import loops
from foreshard.errors import ExtraMissingError, ForeshardError
from foreshard.graph.pipeline import add_pipeline, pipeline_durations, pipeline_program, pipeline_shape
from foreshard.graph.program import Kind, ProgramBuilder
from foreshard.sim import critical_path
from foreshard.sim.critical_path import TaskTimes


def diamond():
    """0 (a, 1 s) -> 1 (b, 5 s) and 2 (c, 2 s) -> 3 (a, 1 s)."""
    builder = ProgramBuilder()
    first = builder.add("a", 1.0)
    middle = [builder.add("b", 5.0, after=[first]), builder.add("c", 2.0, after=[first])]
    builder.add("a", 1.0, after=middle)
    return builder.build()


def test_times_of_a_diamond():
    program = diamond()
    timeline = critical_path.run(program)
    assert timeline.start_s.tolist() == [0.0, 1.0, 1.0, 6.0]
    assert timeline.end_s.tolist() == [1.0, 6.0, 3.0, 7.0]
    assert timeline.makespan_s == 7.0


def test_a_resource_keeps_its_order_even_when_a_later_task_is_ready():
    builder = ProgramBuilder()
    late = builder.add("b", 4.0)
    builder.add("a", 1.0, after=[late])
    builder.add("a", 1.0)
    timeline = critical_path.run(builder.build())
    assert timeline.start_s.tolist() == [0.0, 4.0, 5.0]


def test_dependencies_on_later_numbers_run():
    builder = ProgramBuilder()
    early = builder.add("a", 1.0)
    late = builder.add("b", 2.0)
    builder.depend(early, late)
    assert critical_path.run(builder.build()).start_s.tolist() == [2.0, 0.0]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_circle_is_an_error_that_names_the_resources(compiled):
    builder = ProgramBuilder()
    first = builder.add("a", 1.0)
    second = builder.add("b", 2.0, after=[first])
    builder.depend(first, second)
    with pytest.raises(ForeshardError, match="circle: a at task 0, b at task 1"):
        critical_path.run(builder.build(), compiled=compiled)


def test_an_empty_program_takes_no_time():
    program = ProgramBuilder().build()
    timeline = critical_path.run(program)
    assert timeline.makespan_s == 0.0


def test_groups_join_at_the_gradient_sync():
    """Two replicas of different speed: both wait for the slower one, then reduce and step together."""
    builder = ProgramBuilder()
    shape = pipeline_shape("1f1b", num_stages=2, num_micro_batches=4)
    last = []
    for group, forward_s in enumerate((1.0, 1.5)):
        durations_s = pipeline_durations(shape, forward_s=forward_s, backward_s=2 * forward_s)
        last.append(add_pipeline(builder, shape, durations_s, group=group))
    for stage in range(2):
        ready = np.concatenate([tasks.last[stage] for tasks in last])
        reduce = builder.add(f"dp{stage}", 0.25, after=ready, kind=Kind.GRADIENT_REDUCE, stage=stage)
        for tasks in last:
            builder.add(int(tasks.compute[stage]), 0.5, after=[reduce], kind=Kind.OPTIMIZER, stage=stage)
    program = builder.build()
    timeline = critical_path.run(program)
    assert timeline.makespan_s == (4 + 1) * 3 * 1.5 + 0.25 + 0.5


def test_compiled_gives_the_same_bits():
    rng = np.random.default_rng(0)
    program = pipeline_program(
        schedule="interleaved",
        num_micro_batches=12,
        forward_s=rng.random((4, 3)),
        backward_s=rng.random((4, 3)),
        send_forward_s=rng.random(4),
        send_backward_s=rng.random(4),
    )
    plain, fast = critical_path.run(program), critical_path.run(program, compiled=True)
    assert plain.end_s.tobytes() == fast.end_s.tobytes()
    assert plain.start_s.tobytes() == fast.start_s.tobytes()


def test_without_numba_compiled_names_the_extra(monkeypatch):
    loops.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ExtraMissingError, match=r"foreshard\[fast\]"):
        critical_path.run(diamond(), compiled=True)


def test_one_prediction_never_imports_numba():
    code = (
        "import sys; from foreshard.graph.pipeline import pipeline_program as f; "
        "from foreshard.sim.critical_path import run; "
        "run(f(schedule='1f1b', num_micro_batches=2, forward_s=[1.0], backward_s=1.0)); "
        "assert not {'numba', 'pandas', 'scipy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_timeline_of_a_program_with_another_duration():
    program = diamond()
    slower = replace(program, duration_s=program.duration_s * [1, 1, 4, 1])
    assert isinstance(critical_path.run(slower), TaskTimes)
    assert critical_path.run(slower).makespan_s == 1.0 + 8.0 + 1.0
    assert critical_path.run(program).makespan_s == 7.0


@pytest.mark.parametrize("compute_s, gather_s", [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0)])
def test_streams_of_one_rank_overlap_layer_by_layer(compute_s, gather_s):
    """Gathers run one layer ahead, gradient buckets one behind: the slower stream sets the pace."""
    num_layers = 5
    builder = ProgramBuilder()
    gather = builder.resource("gather")
    gathers = builder.add_many(gather, [gather_s] * num_layers, kind=Kind.PARAMETER_GATHER)
    forward = builder.add_many(builder.resource("compute"), [compute_s] * num_layers, kind=Kind.FORWARD)
    builder.depend(forward, gathers)
    backward = builder.add_many(builder.resource("compute"), [compute_s] * num_layers, kind=Kind.BACKWARD)
    reduces = builder.add_many(builder.resource("reduce"), [gather_s] * num_layers, kind=Kind.GRADIENT_REDUCE)
    builder.depend(reduces, backward)
    builder.add("compute", 0.5, after=[int(reduces[-1])], kind=Kind.OPTIMIZER)
    pace_s = (num_layers - 1) * max(compute_s, gather_s)
    timeline = critical_path.run(builder.build())
    assert timeline.end_s[forward[-1]] == gather_s + pace_s + compute_s
    assert timeline.makespan_s == timeline.end_s[forward[-1]] + compute_s + pace_s + gather_s + 0.5
