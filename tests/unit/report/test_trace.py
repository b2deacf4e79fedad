import gzip
import json
from dataclasses import replace
from itertools import pairwise

import pytest

from foreshard.report.trace import pipeline_flows, trace_object, write_trace
from foreshard.spec.timeline import Event, Timeline


@pytest.fixture
def trace(answered):
    _, prediction, timeline = answered
    return trace_object(prediction, timeline)


def slices(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_slices_of_a_track_never_overlap(trace):
    tracks = {}
    for event in slices(trace):
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(tracks) > 8
    for spans in tracks.values():
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert start >= end - 1e-6


def test_every_task_is_there_once_with_kineto_names(trace, answered):
    _, _, timeline = answered
    kernels = [event for event in slices(trace) if event["cat"] == "kernel"]
    assert len(kernels) == len(timeline.events)
    assert {"stream", "device", "correlation"} <= set(kernels[0]["args"])
    for event in kernels:
        assert event["name"].startswith("nccl") == event["args"]["part"].endswith("_comm")
    steps = [event for event in slices(trace) if event["cat"] == "user_annotation"]
    assert len(steps) == 4 and steps[0]["dur"] == pytest.approx(timeline.step_time_s * 1e6)


def test_each_micro_batch_flows_through_every_boundary_both_ways(answered, trace):
    _, prediction, timeline = answered
    batches = prediction.plan.groups[0].num_micro_batches
    assert len(pipeline_flows(timeline)) == 2 * 3 * batches
    starts = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "s"}
    ends = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == 2 * 3 * batches
    assert all(starts[i]["ts"] <= ends[i]["ts"] and starts[i]["pid"] != ends[i]["pid"] for i in starts)


def test_flow_ends_lie_inside_slices(trace):
    spans = {}
    for event in slices(trace):
        spans.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            assert any(a <= event["ts"] <= b for a, b in spans[event["pid"], event["tid"]])


def test_overlapping_tasks_of_one_stream_get_a_lane_each(answered):
    _, prediction, _ = answered
    both = tuple(
        Event(
            rank=0,
            group=0,
            stage=0,
            stream="data",
            name=f"bucket {i}",
            part="data_comm",
            start_s=0.1 * i,
            end_s=1.0,
        )
        for i in range(3)
    )
    made = trace_object(prediction, Timeline(events=both, step_time_s=1.0))
    assert len({event["tid"] for event in slices(made) if event["cat"] == "kernel"}) == 3


def test_the_cap_is_kept_and_said(answered):
    _, prediction, timeline = answered
    made = trace_object(prediction, timeline, max_events=50)
    assert sum(event["cat"] == "kernel" for event in slices(made)) == 50
    assert made["otherData"]["omitted_events"] == str(len(timeline.events) - 50)


def test_the_file_is_gzip_of_utf8_json_and_the_same_each_time(answered, tmp_path):
    _, prediction, timeline = answered
    odd = replace(prediction, model="llämä \ud800")
    for name in ("a.json.gz", "b.json.gz"):
        size = write_trace(str(tmp_path / name), odd, timeline)
        assert size == (tmp_path / name).stat().st_size
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes()).decode("utf-8"))
    write_trace(str(tmp_path / "c.json"), prediction, timeline)
    json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))


def op(kind, stage, chunk, start, micro_batch=0, stream="compute"):
    return Event(
        rank=stage,
        group=0,
        stage=stage,
        stream=stream,
        name=kind,
        part="compute",
        start_s=start,
        end_s=start + 1,
        micro_batch=micro_batch,
        chunk=chunk,
    )


def test_virtual_stages_wrap_round_the_pipeline():
    events = tuple(op("forward", stage, chunk, 2.0 * chunk + stage) for chunk in (0, 1) for stage in (0, 1))
    pairs = pipeline_flows(Timeline(events=events, step_time_s=4.0))
    assert [((a.stage, a.chunk), (b.stage, b.chunk)) for a, b in pairs] == [
        ((0, 0), (1, 0)),
        ((1, 0), (0, 1)),
        ((0, 1), (1, 1)),
    ]


def test_of_an_op_in_pieces_the_last_sends_and_the_first_receives():
    events = (
        op("backward", 1, 0, 0.0),
        op("backward", 1, 0, 1.0),
        op("send_backward", 1, 0, 2.0, stream="send"),
        op("backward", 0, 0, 3.0),
        op("backward", 0, 0, 4.0),
    )
    with_send = pipeline_flows(Timeline(events=events, step_time_s=5.0))
    assert [(a.name, a.start_s, b.start_s) for a, b in with_send] == [("send_backward", 2.0, 3.0)]
    without = pipeline_flows(Timeline(events=(*events[:2], *events[3:]), step_time_s=5.0))
    assert [(a.start_s, b.start_s) for a, b in without] == [(1.0, 3.0)]
