"""Schedules as JSON, GOAL and traces, and choices as the CSV of NCCL's tuner."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from foreshard.comm.schedules.registry import ALGORITHMS, schedule_of
from foreshard.comm.schedules.ring import ring
from foreshard.comm.schedules.schedule_file import (
    load_schedule,
    save_schedule,
    schedule_from,
    schedule_object,
)
from foreshard.errors import SpecError
from foreshard.interop.collective_schedules.chakra import VERSION, chakra_traces
from foreshard.interop.collective_schedules.goal import goal_text
from foreshard.interop.collective_schedules.nccl_tuner import (
    MAX_BYTES,
    TunerChoice,
    nccl_tuner_csv,
)
from foreshard.interop.collective_schedules.send_trace import send_trace

CASES = [(collective, name) for name, one in ALGORITHMS.items() for collective in one.collectives]


@pytest.mark.parametrize(("collective", "name"), CASES)
def test_a_schedule_is_saved_and_loaded(collective, name, tmp_path):
    schedule = schedule_of(collective, name, 6, per_node=3, parts=2)
    save_schedule(schedule, tmp_path / "x.json")
    again = load_schedule(tmp_path / "x.json")
    assert schedule_object(again) == schedule_object(schedule)
    assert again.chunks == schedule.chunks and again.switches == schedule.switches


GOOD = schedule_object(ring("all-gather", 3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"collective": "all-gathr"}, "Did you mean 'all-gather'"),
        ({"num_ranks": 1}, "num_ranks"),
        ({"num_ranks": True}, "num_ranks"),
        ({"weight": [0.5, -0.1, 0.5]}, "weight"),
        ({"weight": [0.5]}, "Each chunk has"),
        ({"sources": [0, 1, 99]}, "index of the"),
        ({"groups": [[0], [0, 1, 2], [1], [7]]}, "ranks that do not exist"),
        ({"source": [0, 1, 2, 0, 1, 99]}, "beyond"),
        ({"source": [0, 1, 2, 0, 1, 2**40]}, "two thousand million"),
        ({"target": [1, 2, 0]}, "lengths"),
        ({"is_reduced": [2, 0, 0, 0, 0, 0]}, "is_reduced"),
        ({"indices": [0, 1, -1]}, "does not exist"),
        ({"indices": [5, 4, 3]}, "deadlock"),
        ({"indptr": [0, 0, 0, 0, 1, 2, 9]}, "indptr"),
        ({"is_reduced": [1, 0, 0, 0, 0, 0]}, "holds nothing"),
        ({"surprise": 1}, "surprise"),
        ({"schema_version": 2}, "schema_version"),
    ],
)
def test_what_is_no_schedule_is_refused(change, words):
    with pytest.raises(SpecError) as error:
        schedule_from({**GOOD, **change}, file="x.json")
    assert words in str(error.value) and "x.json" in str(error.value)


def run_goal(text: str) -> tuple[int, int]:
    """Run GOAL text: return operations and bytes, after checking that all match and none waits for ever."""
    ranks = re.findall(r"rank (\d+) \{\n(.*?)\}", text, flags=re.DOTALL)
    done, open_ops, needs = set(), {}, {}
    for rank, body in ranks:
        for line in body.splitlines():
            if " requires " in line:
                one, other = line.split(" requires ")
                needs.setdefault((rank, one), set()).add((rank, other))
            else:
                label, op = line.split(": ")
                open_ops[rank, label] = op
    assert len(ranks) == int(text.split()[1])
    sent = {}
    total = len(open_ops)
    while open_ops:
        ready = [key for key in open_ops if needs.get(key, set()) <= done]
        moved = False
        for rank, label in ready:
            op = open_ops[rank, label].split()
            if op[0] == "recv" and (op[3], rank, op[5]) not in sent:
                continue
            if op[0] == "send":
                sent[rank, op[3], op[5]] = op[1]
            elif op[0] == "recv":
                assert sent[op[3], rank, op[5]] == op[1]
            del open_ops[rank, label]
            done.add((rank, label))
            moved = True
        assert moved, open_ops
    return total, sum(int(size[:-1]) for size in sent.values())


@pytest.mark.parametrize(("collective", "name"), CASES)
def test_goal_text_runs_to_its_end(collective, name):
    schedule = schedule_of(collective, name, 6, per_node=3, parts=2)
    if schedule.switches:
        with pytest.raises(SpecError, match="switches"):
            goal_text(schedule, 1e6)
        return
    operations, moved = run_goal(goal_text(schedule, 6_000_000))
    assert operations == 2 * schedule.num_sends
    assert moved == pytest.approx(6_000_000 * schedule.weight.sum(), abs=schedule.num_sends)


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def message(data: bytes) -> dict[int, list]:
    """Return the fields of a protobuf message by number."""
    found: dict[int, list] = {}
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        value, at = varint(data, at)
        if key & 7:
            at, value = at + value, data[at : at + value]
        found.setdefault(key >> 3, []).append(value)
    return found


def nodes_of(trace: bytes) -> list[dict[int, list]]:
    found, at = [], 0
    while at < len(trace):
        size, at = varint(trace, at)
        found.append(message(trace[at : at + size]))
        at += size
    assert found[0] == {1: [VERSION.encode()]}
    return found[1:]


def test_chakra_traces_name_both_ends_and_what_they_wait_for():
    schedule = schedule_of("all-reduce", "ring", 3)
    traces = [nodes_of(trace) for trace in chakra_traces(schedule, 3000)]
    for rank, nodes in enumerate(traces):
        numbers = {node[1][0] for node in nodes}
        assert len(numbers) == len(nodes) == 8
        for node in nodes:
            attributes = {one[1][0].decode(): one for one in map(message, node[10])}
            ends = [attributes[name][7][0] for name in ("comm_src", "comm_dst")]
            assert ends[node[3][0] == 6] == rank  # 5 sends, 6 receives
            assert attributes["comm_size"][9] == [1000]
            waits, at = [], 0
            packed = b"".join(node.get(5, []))
            while at < len(packed):
                one, at = varint(packed, at)
                waits.append(one)
            assert set(waits) <= numbers - {node[1][0]}
    waiting = sum(5 in node for nodes in traces for node in nodes)
    assert waiting == 9  # all sends but those of the first round
    with pytest.raises(SpecError, match="switches"):
        chakra_traces(schedule_of("all-reduce", "nvls", 3), 1)


def test_a_trace_has_both_ends_of_every_send():
    schedule = schedule_of("all-reduce", "nvls", 3)
    start = schedule.rounds() * 1e-3
    trace = json.loads(json.dumps(send_trace(schedule, start, start + 1e-3, num_bytes=300)))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == 2 * schedule.num_sends
    assert {event["args"]["bytes"] for event in slices} == {300.0}
    assert sum(event["ph"] == "s" for event in trace["traceEvents"]) == schedule.num_sends
    called = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert called == ["rank 0", "rank 1", "rank 2", "switch 0"]
    short = send_trace(schedule, start, start, num_bytes=1, max_sends=2)
    assert short["otherData"]["omitted_sends"] == schedule.num_sends - 2
    with pytest.raises(SpecError, match="finite start"):
        send_trace(schedule, start, start - 1, num_bytes=1)
    with pytest.raises(SpecError, match="finite start"):
        send_trace(schedule, np.zeros(1), np.zeros(1), num_bytes=1)


def test_tuner_choices_are_written():
    choices = [
        TunerChoice(collective="allreduce", min_bytes=0, max_bytes=65536, algorithm="tree", protocol="ll"),
        TunerChoice(
            collective="allreduce", min_bytes=65537, max_bytes=MAX_BYTES, algorithm="ring", protocol="ll128"
        ),
        TunerChoice(
            collective="allgather",
            min_bytes=0,
            max_bytes=MAX_BYTES,
            algorithm="pat",
            protocol="simple",
            channels=4,
            num_nodes=8,
            num_ranks=8,
            registered=1,
        ),
    ]
    text = nccl_tuner_csv(choices)
    assert text.splitlines()[2] == "allreduce,65537,4294967295,ring,ll128,-1,-1,-1,-1,-1"
    assert text.splitlines()[3] == "allgather,0,4294967295,pat,simple,4,8,8,-1,1"


def test_a_small_file_takes_little_memory():
    """A million ranks, of which two take part, are no reason to hold a million rows for each chunk."""
    parts = 500
    data = {
        **schedule_object(schedule_of("broadcast", "ring", 2, parts=parts)),
        "num_ranks": 2**20,
        "groups": [[0], [0, 1]],
    }
    assert schedule_from(data).num_ranks == 2**20
