"""`foreshard comm simulate`, `synthesize`, `export`: the contract, and one time for one schedule."""

import json
from itertools import pairwise

import pytest

from foreshard.comm.schedules.schedule import COLLECTIVES

SIMULATED = {"schema_version", "time_s", "lower_bound_s", "gap", "flows", "busiest", "wall_s"}
SYNTHESISED = {"schema_version", "time_s", "lower_bound_s", "gap", "wall_s"}
RING = """name = "ring"
[[nodes]]
count = 16
device = "h100-sxm"
per_node = 8
nic = "3200 Gb/s"
nic_latency = "5 us"
"""


def test_a_ring_at_raw_rates_takes_what_its_slowest_link_does(shell, tmp_path):
    (tmp_path / "ring.toml").write_text(RING)
    words = ("comm", "simulate", "all-reduce", "1GiB", str(tmp_path / "ring.toml"), "--algorithm", "ring")
    found = shell(*words, "--rates", "datasheet", "--json").json
    assert set(found) >= SIMULATED and found["flows"] == 2 * 127 * 128
    assert found["time_s"] == pytest.approx(2 * 127 * (5e-6 + 2**30 / 128 / 50e9), rel=1e-6)
    assert found["closed_form_s"] == pytest.approx(found["time_s"], rel=1e-3)
    assert found["in_lockstep"] is False  # links inside nodes are faster than those between them
    assert found["lower_bound_s"] <= found["time_s"] * (1 + 1e-9)
    assert all(0 < one["utilisation"] <= 1 + 1e-9 for one in found["busiest"])


def test_what_is_synthesised_is_simulated_at_the_same_time_and_exported(shell, tmp_path):
    schedule, cluster = str(tmp_path / "schedule.json"), "1x4xa100-sxm-80gb"
    made = shell("comm", "synthesize", "all-gather", "16MiB", cluster, "-o", schedule, "--json").json
    assert set(made) >= SYNTHESISED and -1e-9 <= made["gap"] < 0.1
    assert made["in_order_s"] >= made["lower_bound_s"] * (1 - 1e-9)
    run = shell("comm", "simulate", "all-gather", "16MiB", cluster, "--algorithm", schedule, "--json").json
    assert run["time_s"] == pytest.approx(made["time_s"], rel=1e-9)
    goal = shell("comm", "export", schedule, "--to", "goal", "--size", "16MiB")
    assert goal.code == 0 and goal.out.startswith("num_ranks 4")
    again = shell("comm", "export", schedule, "--to", "json")
    assert json.loads(again.out) == json.loads((tmp_path / "schedule.json").read_text())
    files = str(tmp_path / "et")
    assert shell("comm", "export", schedule, "--to", "chakra", "--size", "16MiB", "-o", files).code == 0
    assert len(list(tmp_path.glob("et.*.et"))) == 4


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_is_simulated_without_naming_an_algorithm(shell, collective):
    made = shell("comm", "simulate", collective, "1MiB", "1x4xa100-sxm-80gb", "--json").json
    assert made["time_s"] > 0 and made["gap"] >= 0


def test_a_trace_has_every_send(shell, tmp_path):
    trace = tmp_path / "trace.json"
    words = ("comm", "simulate", "all-gather", "1MiB", "1x4xh100-sxm", "--trace", str(trace))
    assert shell(*words).code == 0
    slices = [one for one in json.loads(trace.read_text())["traceEvents"] if one.get("ph") == "X"]
    assert len(slices) >= 12


def test_a_topology_is_drawn_and_read_again(shell, tmp_path):
    graph = str(tmp_path / "graph.json")
    assert shell("comm", "export", "2x4xa100-sxm-80gb", "--to", "svg").out.lstrip().startswith("<svg")
    assert shell("comm", "export", "2x4xa100-sxm-80gb", "--to", "graph", "-o", graph).code == 0
    words = ("comm", "simulate", "all-gather", "1MiB")
    times = [
        shell(*words, where, "--rates", "datasheet", "--json").json["time_s"]
        for where in ("2x4xa100-sxm-80gb", graph)
    ]
    assert times[0] == pytest.approx(times[1])


def test_the_tuner_file_covers_every_size_once(shell):
    text = shell("comm", "export", "8x8xh100-sxm", "--to", "nccl-tuner").out
    rows = [line.split(",") for line in text.splitlines() if line and not line.startswith("#")]
    for name in ("allreduce", "allgather", "reducescatter", "broadcast"):
        ranges = [(int(low), int(high)) for kind, low, high, *_ in rows if kind == name]
        assert ranges[0][0] == 0 and ranges[-1][1] == 2**32 - 1
        assert all(high + 1 == low for (_, high), (low, _) in pairwise(ranges))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("simulate", "all-reduce", "0", "2x8xh100-sxm"), "SIZE"),
        (("simulate", "all-reduce", "1MiB", "2x8xh100-sxm", "--algorithm", "foo"), "sharp. Use one of them"),
        (("simulate", "all-reduce", "1MiB", "1x1xh100-sxm"), "at least 2 ranks"),
        (("simulate", "all-reduce", "1MiB", "2x8xh100-sxm", "--ranks", "99"), "99 ranks on 16 devices"),
        (("simulate", "all-reduce", "1MiB", "2x8xh100-sxm", "--algorithm", "nvls"), "scale-up domains"),
        (("simulate", "all-dance", "1MiB", "2x8xh100-sxm"), "all-dance"),
        (("synthesize", "all-gather", "0", "2x8xh100-sxm"), "SIZE"),
        (("synthesize", "all-to-all", "1MiB", "1x1xh100-sxm"), "one device alone"),
        (("export", "2x8xh100-sxm", "--to", "msccl"), "2x8xh100-sxm"),
        (("measure", "all-reduce", "1MiB", "--local", "1"), "--local"),
        (("measure", "all-reduce", "1MiB", "--local", "4", "--algorithm", "nvls"), "switches"),
        (("export", "1x8xmi300x", "--to", "nccl-tuner"), "NVIDIA"),
        (("export", "1x1xh100-sxm", "--to", "nccl-tuner"), "a communicator of 1 rank"),
    ],
)
def test_bad_input_ends_with_2_and_says_why(shell, words, said):
    answer = shell("comm", *words)
    assert answer.code == 2 and said in answer.err


def test_a_schedule_is_measured_between_local_ranks(shell):
    words = (
        "comm",
        "measure",
        "all-gather",
        "64KiB",
        "--local",
        "3",
        "--algorithm",
        "bruck",
        "--repeats",
        "2",
    )
    found = shell(*words, "--json").json
    assert found["is_exact"] is True and found["num_ranks"] == 3 and found["algorithm"] == "bruck"
    assert found["time_s"] > 0 and found["library_s"] > 0


def test_a_malformed_topology_file_ends_with_2(shell, tmp_path):
    bomb = tmp_path / "bomb.xml"
    bomb.write_text('<!DOCTYPE a [<!ENTITY b "c">]><system version="1">&b;</system>')
    answer = shell("comm", "simulate", "all-reduce", "1MiB", str(bomb))
    assert answer.code == 2 and "bomb.xml" in answer.err


def test_the_schema_names_every_key_of_a_schedule_and_a_topology():
    from dataclasses import fields

    from foreshard.cli.schema import read
    from foreshard.comm.schedules.schedule_file import ScheduleFile
    from foreshard.comm.topology.graph import Vertex
    from foreshard.comm.topology.importers import plain_graph

    def names(kind):
        return [field.name for field in fields(kind)]

    assert list(read("schedule")["keys"]["schedule"]) == names(ScheduleFile)
    topology = read("topology")["keys"]
    assert list(topology["topology"]) == names(plain_graph.TopologyFile)
    assert list(topology["vertices"]) == names(Vertex)
    assert list(topology["links"]) == names(plain_graph.TopologyLinkTable)
    assert list(topology["shared"]) == names(plain_graph.SharedTable)


def test_clusters_whose_sends_no_memory_holds_are_refused(shell):
    for words in (
        ("simulate", "all-reduce", "1MiB", "300x8xh100-sxm"),
        ("simulate", "all-gather", "1MiB", "99999x8xh100-sxm", "--ranks", "16"),
        ("synthesize", "all-gather", "1MiB", "300x8xh100-sxm"),
    ):
        answer = shell("comm", *words, "--json")
        assert answer.code == 2 and "comm predict" in answer.json["error"]["fix"]


def test_simulate_and_synthesize_take_as_many_ranks(shell):
    """A send between two of many ranks is one flow; an all-to-all between them has millions."""
    for verb in (("simulate", "--algorithm", "direct"), ("synthesize", "--budget-s", "0")):
        name, *flags = verb
        found = shell("comm", name, "send", "1MiB", "257x8xh100-sxm", *flags, "--json")
        assert found.code == 0 and found.json["num_ranks"] == 2056
        refused = shell("comm", name, "all-to-all", "1MiB", "257x8xh100-sxm", *flags, "--json")
        assert refused.code == 2 and "at most 2,048" in refused.json["error"]["rule"]


def test_what_hosts_cannot_execute_is_refused_before_ranks_start(shell, monkeypatch):
    started = []
    monkeypatch.setattr("foreshard.profile.collective_times.local_times", lambda *a, **b: started.append(a))
    done = shell("comm", "measure", "all-reduce", "1MiB", "--local", "2", "--algorithm", "nvls")
    assert done.code == 2 and "switches" in done.err and not started
