"""Orders of zb-h2, zbv, dualpipe and dualpipev against torch's own, and against what their papers state."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from foreshard.graph.pipeline import pipeline_program
from foreshard.graph.pipeline_schedules import FOLDED, Op, in_flight, stage_order
from foreshard.sim import critical_path

SIZES = [(2, 4), (2, 7), (3, 6), (4, 8), (4, 13), (6, 12), (8, 24)]
EVEN = [(2, 4), (4, 8), (4, 14), (6, 12), (8, 32), (16, 40)]


def of_torch(name, stages, micro_batches, rank):
    """Return the order of a schedule of torch.distributed.pipelining, overlapped pairs in turn."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    itself = SimpleNamespace(
        pp_group_size=stages, _n_microbatches=micro_batches, num_stages=2 * stages, _num_stages=2 * stages
    )
    rows = getattr(schedules, name)._calculate_single_rank_operations(itself, rank)
    known = {"F": Op.FORWARD, "B": Op.BACKWARD, "I": Op.BACKWARD_INPUT, "W": Op.BACKWARD_WEIGHT}
    found = []
    for row in rows:
        for one in () if row is None else (row.sub_actions or (row,)):
            found.append(
                (known[one.computation_type.value], int(one.stage_index != rank), one.microbatch_index)
            )
    return found


@pytest.mark.parametrize("stages, micro_batches", [*SIZES, (4, 3), (5, 1)])
def test_zbv_is_that_of_torch(stages, micro_batches):
    orders = stage_order("zbv", num_stages=stages, num_micro_batches=micro_batches, num_chunks=2)
    for rank, order in enumerate(orders):
        theirs = of_torch("ScheduleZBVZeroBubble", stages, micro_batches, rank)
        assert [tuple(row) for row in order.tolist()] == theirs


@pytest.mark.parametrize("stages, micro_batches", SIZES)
def test_dualpipev_is_that_of_torch(stages, micro_batches):
    orders = stage_order("dualpipev", num_stages=stages, num_micro_batches=micro_batches, num_chunks=2)
    for rank, order in enumerate(orders):
        theirs = of_torch("ScheduleDualPipeV", stages, micro_batches, rank)
        assert [tuple(row) for row in order.tolist()] == theirs


def dualpipe_phases(stages, micro_batches, rank):
    """Return how often each kind of op runs in the eight steps of DualPipe on a rank, and in which order.

    F0 and B0 are of the direction whose near end is the rank's, F1 and B1 of the other; weight gradients are
    left out, since they belong to whatever was split first.
    """
    half, near = stages // 2, min(rank, stages - 1 - rank)
    behind = half - near - 1
    yield from ["F0"] * (2 * behind)
    yield from ["F0", "F1"] * (near + 1)
    yield from ["B1", "F1"] * behind
    yield from ["F0", "B1", "F1", "B0"] * (micro_batches // 2 - stages + near + 1)
    yield from ["B1", "F1", "B0"] * behind
    yield from ["B1", "B0"] * (near + 1)
    yield from ["B0"] * behind


@pytest.mark.parametrize("stages, micro_batches", EVEN)
def test_dualpipe_runs_the_steps_of_its_report_from_both_ends(stages, micro_batches):
    orders = stage_order("dualpipe", num_stages=stages, num_micro_batches=micro_batches, num_chunks=2)
    for rank, order in enumerate(orders):
        is_behind = rank >= stages // 2
        words, split = [], 0
        for op, chunk, k in order.tolist():
            assert (k >= micro_batches // 2) == (chunk == 1)
            if op != Op.BACKWARD_WEIGHT:
                words.append(("F" if op == Op.FORWARD else "B") + str(chunk ^ is_behind))
            split += (op == Op.BACKWARD_WEIGHT) - (op == Op.BACKWARD_INPUT)
            assert split <= 0  # a weight gradient follows its input gradient
        assert words == list(dualpipe_phases(stages, micro_batches, rank))
        other = orders[stages - 1 - rank].copy()
        other[:, 1] ^= 1
        other[:, 2] = (other[:, 2] + micro_batches // 2) % micro_batches
        assert (order == other).all()  # the pipeline looks the same from both ends


@pytest.mark.parametrize("stages, micro_batches", EVEN)
def test_peaks_in_flight_are_those_published(stages, micro_batches):
    """DualPipe p + 1 of its stages, zbv p micro-batches, zb-h2 2p - 1, where there are enough of them."""
    sizes = {"num_stages": stages, "num_micro_batches": micro_batches}
    assert set(in_flight("dualpipe", num_chunks=2, **sizes)) == {stages + 1}
    assert set(in_flight("zbv", num_chunks=2, **sizes)) == {2 * stages}
    assert set(in_flight("zb-h2", **sizes)) == {2 * stages - 1}
    assert set(in_flight("dualpipev", num_chunks=2, **sizes)) == {2 * stages + 1}


@pytest.mark.parametrize("schedule", ["zb-h2", "zbv"])
@pytest.mark.parametrize("stages, micro_batches", [(2, 4), (4, 8), (5, 12), (8, 20)])
def test_no_stage_waits_in_between_where_all_ops_are_equal(schedule, stages, micro_batches):
    table = (stages, 2) if schedule in FOLDED else (stages,)
    program = pipeline_program(
        schedule=schedule,
        num_micro_batches=micro_batches,
        **{f"{op}_s": np.ones(table) for op in ("forward", "backward_input", "backward_weight")},
        overlap_p2p=True,
    )
    times = critical_path.run(program)
    for stage in range(stages):
        mine = np.flatnonzero((program.stage == stage) & (program.kind <= Op.BACKWARD_WEIGHT))
        span_s = times.end_s[mine].max() - times.start_s[mine].min()
        assert span_s == program.duration_s[mine].sum()
