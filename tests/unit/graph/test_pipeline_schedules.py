import doctest
from collections import Counter

import numpy as np
import pytest

from foreshard.errors import SpecError
from foreshard.graph import pipeline, pipeline_schedules
from foreshard.graph.pipeline import add_pipeline, pipeline_durations, pipeline_program, pipeline_shape
from foreshard.graph.pipeline_schedules import Op, in_flight, stage_order
from foreshard.graph.program import Kind, ProgramBuilder

LETTERS = {Op.FORWARD: "F", Op.BACKWARD: "B", Op.BACKWARD_INPUT: "b", Op.BACKWARD_WEIGHT: "w"}


def written(schedule, **counts):
    """Each stage as text: op, micro-batch, and the chunk as a number of primes."""
    return [
        " ".join(f"{LETTERS[op]}{k}{chr(39) * int(chunk)}" for op, chunk, k in order)
        for order in stage_order(schedule, **counts)
    ]


def test_1f1b_as_drawn_by_narayanan_2021_figure_4():
    assert written("1f1b", num_stages=4, num_micro_batches=5) == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_gpipe_runs_all_forwards_first():
    assert written("gpipe", num_stages=2, num_micro_batches=2) == ["F0 F1 B0 B1"] * 2


def test_interleaved_of_megatron_two_stages():
    assert written("interleaved", num_stages=2, num_micro_batches=4, num_chunks=2) == [
        "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3",
        "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3",
    ]


def test_interleaved_table_with_a_larger_group_and_a_short_last_one():
    """The table in Megatron's comment: PP2 N3 M5 VP2."""
    order = stage_order("interleaved", num_stages=2, num_micro_batches=5, num_chunks=2, group_size=3)[0]
    forward = order[order[:, 0] == Op.FORWARD]
    assert forward[:, 2].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert forward[:, 1].tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_zb_h1_delays_weight_gradients_by_the_stage():
    assert written("zb-h1", num_stages=3, num_micro_batches=4) == [
        "F0 F1 F2 b0 w0 F3 b1 w1 b2 w2 b3 w3",
        "F0 F1 b0 F2 b1 w0 F3 b2 w1 b3 w2 w3",
        "F0 b0 F1 b1 F2 b2 w0 F3 b3 w1 w2 w3",
    ]


@pytest.mark.parametrize(
    "schedule, expected", [("gpipe", [6] * 4), ("1f1b", [4, 3, 2, 1]), ("zb-h1", [4] * 4)]
)
def test_activations_in_flight(schedule, expected):
    assert in_flight(schedule, num_stages=4, num_micro_batches=6).tolist() == expected


def test_in_flight_never_exceeds_the_micro_batches():
    assert in_flight("1f1b", num_stages=4, num_micro_batches=2).tolist() == [2, 2, 2, 1]
    assert in_flight("interleaved", num_stages=4, num_micro_batches=4, num_chunks=2).tolist() == [8, 8, 7, 5]


@pytest.mark.parametrize(
    "schedule, counts, said",
    [
        ("zbv", {}, "two virtual stages"),
        ("dualpipe", {"num_chunks": 2, "num_micro_batches": 7}, "even number"),
        ("dualpipev", {"num_chunks": 2, "num_micro_batches": 3}, "at least two micro-batches"),
        ("2f2b", {}, "zb-h2, zbv, dualpipe"),
        ("1f1b", {"num_chunks": 2}, "interleaved"),
        ("1f1b", {"num_micro_batches": 0}, "micro_batches"),
        ("interleaved", {}, "Use schedule 1f1b"),
        ("interleaved", {"num_chunks": 2, "num_stages": 1}, "Use schedule 1f1b"),
        ("interleaved", {"num_chunks": 2, "num_micro_batches": 3}, "at least 4"),
        ("interleaved", {"num_chunks": 2, "num_micro_batches": 6}, "Use 4 or 8"),
        ("interleaved", {"num_chunks": 2, "group_size": 3}, "between the stages"),
    ],
)
def test_what_a_schedule_cannot_do_is_said(schedule, counts, said):
    counts = {"num_stages": 4, "num_micro_batches": 8, **counts}
    with pytest.raises(SpecError, match=said):
        stage_order(schedule, **counts)


def test_a_short_last_group_of_at_least_the_stages_is_accepted():
    order = stage_order("interleaved", num_stages=2, num_micro_batches=5, num_chunks=2, group_size=3)
    assert len(order[0]) == 20


def test_pipeline_has_every_transfer_once_and_on_its_stream():
    program = pipeline_program(
        schedule="interleaved",
        num_micro_batches=4,
        forward_s=np.ones((2, 2)),
        backward_s=np.ones((2, 2)),
        overlap_p2p=True,
    )
    kinds = Counter(Kind(kind).name for kind in program.kind)
    # 4 virtual stages have 3 boundaries
    assert kinds == {"FORWARD": 16, "BACKWARD": 16, "SEND_FORWARD": 12, "SEND_BACKWARD": 12}
    names = np.array(program.resource_names)[program.resource]
    sends = program.kind == Kind.SEND_BACKWARD
    assert set(names[sends]) == {"group0.stage0.send_backward", "group0.stage1.send_backward"}


def test_durations_land_on_their_tasks():
    forward_s = np.arange(12.0).reshape(2, 2, 3)
    program = pipeline_program(
        schedule="interleaved",
        num_micro_batches=3,
        group_size=3,
        forward_s=forward_s,
        backward_s=100 + forward_s,
        send_forward_s=[0.1, 0.2],
        send_backward_s=[0.3, 0.4],
    )
    for kind, first in ((Kind.FORWARD, 0.0), (Kind.BACKWARD, 100.0)):
        at = program.kind == kind
        expected = first + forward_s[program.stage[at], program.chunk[at], program.micro_batch[at]]
        assert program.duration_s[at].tolist() == expected.tolist()
    sends = program.kind == Kind.SEND_FORWARD
    assert np.allclose(program.duration_s[sends], np.array([0.1, 0.2])[program.stage[sends]])
    sends = program.kind == Kind.SEND_BACKWARD  # stage 0 sends back over the last boundary
    assert np.allclose(program.duration_s[sends], np.array([0.4, 0.3])[program.stage[sends]])


def test_a_schedule_without_its_durations_is_refused():
    with pytest.raises(ValueError, match="backward_input"):
        pipeline_program(schedule="zb-h1", num_micro_batches=2, forward_s=[1.0, 1.0], backward_s=1.0)
    with pytest.raises(ValueError, match="finite"):
        pipeline_program(schedule="1f1b", num_micro_batches=2, forward_s=[1.0, np.nan], backward_s=1.0)


def test_builder_keeps_numbers_across_single_and_array_tasks():
    builder = ProgramBuilder()
    first = builder.add("a", 1.0, kind=Kind.HOST)
    many = builder.add_many(builder.resource("b"), [2.0, 3.0], stage=[4, 5])
    last = builder.add("a", 4.0, after=[first, *many])
    builder.depend(many, first)
    program = builder.build()
    assert [first, *many, last] == [0, 1, 2, 3]
    assert program.duration_s.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert program.stage.tolist() == [-1, 4, 5, -1]
    assert program.kind.tolist() == [Kind.HOST, Kind.OTHER, Kind.OTHER, Kind.OTHER]
    dependencies = [program.indices[program.indptr[t] : program.indptr[t + 1]].tolist() for t in range(4)]
    assert dependencies == [[], [0], [0], [0, 1, 2]]


def test_builder_refuses_tasks_never_added_and_negative_times():
    builder = ProgramBuilder()
    builder.add("a", 1.0, after=[7])
    with pytest.raises(ValueError, match="never added"):
        builder.build()
    builder = ProgramBuilder()
    builder.add("a", -1.0)
    with pytest.raises(ValueError, match="negative"):
        builder.build()


def test_a_pipeline_after_other_tasks_points_at_its_own():
    builder = ProgramBuilder()
    builder.add("host", 1.0)
    shape = pipeline_shape("1f1b", num_stages=2, num_micro_batches=3)
    tasks = add_pipeline(builder, shape, pipeline_durations(shape, forward_s=1.0, backward_s=2.0), group=1)
    program = builder.build()
    assert (tasks.ops[Op.BACKWARD_INPUT] == -1).all()
    at = tasks.ops[Op.BACKWARD, 1, 0, 2]
    assert (program.kind[at], program.stage[at], program.micro_batch[at]) == (Kind.BACKWARD, 1, 2)
    assert program.resource[at] == tasks.compute[1]
    assert program.resource_names[tasks.compute[1]] == "group1.stage1.compute"
    # stage 1 ends by sending the last gradient, stage 0 by computing with it
    assert program.kind[tasks.last[1]].tolist() == [Kind.SEND_BACKWARD, Kind.BACKWARD]
    assert tasks.last[0].tolist() == [tasks.ops[Op.BACKWARD, 0, 0, 2]]


@pytest.mark.parametrize("module", [pipeline_schedules, pipeline])
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0
