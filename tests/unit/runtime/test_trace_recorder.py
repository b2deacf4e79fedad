"""The measured trace: what is kept, how ranks are joined, what an addition costs."""

import gzip
import json

import pytest

from foreshard.errors import SpecError
from foreshard.runtime.records.trace_recorder import TraceRecorder, merge
from foreshard.spec.plan_file import parse_plan


def plan_of(*stages):
    told = [{"ranks": [rank], "layers": [list(layers)]} for rank, layers in enumerate(stages)]
    return parse_plan(
        {
            "global_batch": 4,
            "seq_len": 8,
            "precision": "fp32",
            "groups": [{"share": 4, "micro_batch": 2, "stages": told}],
        }
    )


PLAN = plan_of((0, 3), (3, 8))


def filled(rank: int, *, epoch_s: float = 0.0, clock: str = "cpu") -> TraceRecorder:
    timeline = TraceRecorder(rank, clock=clock, epoch_s=epoch_s)
    timeline.begin_step(0, PLAN, 1.0)
    timeline.phase("forward", 1.0)
    timeline.add("forward", 0, 0, 1.0 + rank, 1.5 + rank)
    timeline.phase("backward", 1.5 + rank)
    timeline.add("backward", 0, 0, 5.0 - rank, 5.5 - rank)
    timeline.phase("all-reduce", 6.0)
    timeline.phase("vote", 6.25)
    timeline.close(7.0)
    return timeline


def spans(trace, cat=None):
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and cat in (None, e["cat"])]


def test_an_action_is_a_kernel_with_its_place():
    trace = filled(1).to_dict()
    forward, backward = spans(trace, "kernel")
    assert (forward["name"], forward["ts"], forward["dur"]) == ("forward", 2e6, 5e5)
    assert forward["args"] == {
        "step": 0,
        "stream": 1,
        "device": 1,
        "correlation": forward["args"]["correlation"],
        "part": "compute",
        "group": 0,
        "stage": 1,
        "chunk": 0,
        "micro_batch": 0,
        "layers": [3, 8],
        "virtual_stage": 1,
    }
    assert backward["ts"] == 4e6


def test_phases_between_actions_and_the_step_are_annotations():
    named = {e["name"]: (e["ts"], e["dur"]) for e in spans(filled(0).to_dict(), "user_annotation")}
    assert named == {"all-reduce": (6e6, 2.5e5), "vote": (6.25e6, 7.5e5), "ProfilerStep#0": (1e6, 6e6)}


def test_a_change_of_plan_changes_the_place_of_later_actions_only():
    timeline = filled(0)
    timeline.begin_step(1, plan_of((0, 7), (7, 8)), 8.0)
    timeline.add("forward", 0, 0, 8.0, 9.0)
    layers = [e["args"]["layers"] for e in spans(timeline.to_dict(), "kernel")]
    assert layers == [[0, 3], [0, 3], [0, 7]]


def test_a_full_ring_keeps_the_latest_and_says_what_it_dropped():
    timeline = TraceRecorder(0, capacity=3)
    timeline.begin_step(0, PLAN, 0.0)
    for batch in range(5):
        timeline.add("forward", 0, batch, float(batch), batch + 0.5)
    trace = timeline.to_dict()
    assert [e["args"]["micro_batch"] for e in spans(trace)] == [2, 3, 4]
    assert trace["otherData"]["omitted_events"] == "2"


def test_ranks_join_on_one_clock_with_arrows_up_and_down(tmp_path):
    """The second rank's clock began 100 s later: its times are brought to the first's."""
    filled(0, epoch_s=1000.0).write(tmp_path / "0.json.gz")
    filled(1, epoch_s=1100.0).write(tmp_path / "1.json")
    size = merge([tmp_path / "0.json.gz", tmp_path / "1.json"], tmp_path / "all.json.gz")
    raw = (tmp_path / "all.json.gz").read_bytes()
    trace = json.loads(gzip.decompress(raw))
    assert size == len(raw)
    assert trace["distributedInfo"] == {"rank": 0, "world_size": 2}
    first = {e["pid"]: e["ts"] for e in spans(trace, "kernel") if e["name"] == "forward"}
    assert first == {0: 0.0, 1: 101e6}
    arrows = [(e["ph"], e["pid"], e["ts"]) for e in trace["traceEvents"] if e["ph"] in "sf"]
    assert arrows == [("s", 0, 0.0), ("f", 1, 101e6), ("s", 1, 103e6), ("f", 0, 4e6)]
    assert min(e["ts"] for e in spans(trace)) == 0.0


@pytest.mark.parametrize("content", ["{}", "nothing", "[1]"])
def test_what_is_no_trace_is_refused(tmp_path, content):
    (tmp_path / "0.json").write_text(content)
    with pytest.raises(SpecError, match="not the trace of a rank"):
        merge([tmp_path / "0.json"], tmp_path / "all.json")


def test_different_clocks_do_not_join(tmp_path):
    filled(0).write(tmp_path / "0.json")
    filled(1, clock="wall").write(tmp_path / "1.json")
    with pytest.raises(SpecError, match="different clocks"):
        merge([tmp_path / "0.json", tmp_path / "1.json"], tmp_path / "all.json")
    with pytest.raises(SpecError, match="no trace"):
        merge([], tmp_path / "all.json")
