"""The lab's file, what changes when, its clock and its cluster."""

from pathlib import Path

import pytest

from foreshard.errors import SpecError
from foreshard.lab.lab import Change, Lab, load_lab
from foreshard.runtime.engine.clock import Clock

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "labs").glob("*.toml"))
RANKS = "[[ranks]]\ncount = 2\n[[ranks]]\nslow = 3\n"
TABLE = '[table]\nforward = "1 ms"\nbackward = "2 ms"\noptimizer = "4 ms"\n'


def lab_of(tmp_path, text):
    path = tmp_path / "lab.toml"
    path.write_text(text)
    return load_lab(str(path))


def test_a_file_says_ranks_links_and_changes(tmp_path):
    lab = lab_of(
        tmp_path,
        (
            'name = "two kinds"\nclock = "cpu"\n'
            '[[ranks]]\ncount = 2\ndevice = "big"\nmemory = "2 GiB"\nusd_per_h = 1.5\n[[ranks]]\nslow = 2.5\n'
            '[network]\nbandwidth = "1 Gb/s"\nlatency = "1 ms"\n'
            "[[change]]\nat_step = 9\nrank = 2\nslow = 1\n[[change]]\nat_step = 4\nrank = 0\nslow = 4\n"
        ),
    )
    assert (lab.name, lab.clock) == ("two kinds", "cpu")
    assert (lab.devices, lab.slow) == (("big", "big", "cpu-2.5x"), (1.0, 1.0, 2.5))
    assert (lab.bandwidth_bytes_per_s, lab.latency_s) == (1.25e8, 1e-3)
    assert lab.memory_bytes == (2 * 2**30, 2 * 2**30, None)
    assert [change.at_step for change in lab.changes] == [4, 9]
    assert [lab.slow_at(step, 0) for step in (0, 3, 4, 100)] == [1, 1, 4, 4]
    assert [lab.slow_at(step, 2) for step in (8, 9)] == [2.5, 1]
    assert lab.slow_at(100, 1) == 1


def test_ranks_share_hosts(tmp_path):
    lab = lab_of(tmp_path, 'clock = "wall"\n[[ranks]]\ncount = 4\nper_host = 2\n[[ranks]]\ncount = 2\n')
    assert lab.hosts == (0, 0, 1, 1, 2, 3) and [lab.host_of(rank) for rank in (1, 2, 5)] == [0, 1, 3]
    assert lab.is_even and [rank["host"] for rank in lab.to_dict()["ranks"]] == [0, 0, 1, 1, 2, 3]
    alone = lab_of(tmp_path, RANKS)
    assert alone.hosts == () and [alone.host_of(rank) for rank in range(3)] == [0, 1, 2] and not alone.is_even
    with pytest.raises(SpecError, match="divide the 3 ranks"):
        lab_of(tmp_path, 'clock = "wall"\n[[ranks]]\ncount = 3\nper_host = 2\n')
    with pytest.raises(SpecError, match="2 ranks a host"):
        lab_of(tmp_path, "[[ranks]]\ncount = 4\nper_host = 2\n")


def test_ranks_come_and_go(tmp_path):
    lab = lab_of(
        tmp_path,
        RANKS
        + (
            "[[change]]\nat_step = 0\nrank = 2\nthere = false\n"
            "[[change]]\nat_step = 5\nrank = 2\nthere = true\n"
            "[[change]]\nat_step = 8\nrank = 1\nthere = false\n"
            "[[change]]\nat_step = 9\nrank = 1\nthere = true\n"
        ),
    )
    assert [lab.there_at(step, 2) for step in (0, 4, 5, 99)] == [False, False, True, True]
    assert [lab.there_at(step, 1) for step in (0, 7, 8, 9)] == [True, True, False, True]
    assert lab.there_at(8, 0)


def test_power_and_carbon_of_a_rank(tmp_path):
    lab = lab_of(
        tmp_path,
        (
            '[[ranks]]\npower = "0.4 kW"\nidle_power = "100 W"\ncarbon_kg_per_kwh = 0.5\n'
            '[[ranks]]\npower = "200 W"\n[[ranks]]\n'
        ),
    )
    assert (lab.busy_w, lab.kg_per_kwh) == ((400, 200, None), (0.5, None, None))
    assert lab.idle_w[0] == 100 and 0 < lab.idle_w[1] < 200 and lab.idle_w[2] is None
    assert lab.to_dict()["ranks"][0]["busy_w"] == 400


def test_links_take_the_slower_of_their_ends_and_the_latest_change():
    lab = Lab(
        clock="cpu",
        slow=(1.0,) * 3,
        devices=("a",) * 3,
        bandwidth_bytes_per_s=100.0,
        latency_s=1.0,
        changes=(
            Change(at_step=1, rank=0, bandwidth=10.0),
            Change(at_step=2, latency=5.0, bandwidth=50.0),
            Change(at_step=3, rank=2, latency=7.0),
        ),
    )
    assert lab.link_at(0, 0, 1) == (100.0, 1.0)
    assert lab.link_at(1, 0, 1) == lab.link_at(1, 1, 0) == (10.0, 1.0)
    assert lab.link_at(1, 1, 2) == (100.0, 1.0)
    assert lab.link_at(2, 0, 1) == (50.0, 5.0)
    assert lab.link_at(3, 1, 2) == (50.0, 7.0) and lab.link_at(3, 0, 1) == (50.0, 5.0)


def test_a_table_tells_the_time_of_each_action(tmp_path):
    """Half a backward is the gradient of the inputs, half that of the weights."""
    lab = lab_of(tmp_path, 'clock = "table"\n[[ranks]]\nslow = 3\n' + TABLE)
    clock = lab.make_clock([0])
    clock.slow = lab.slow_at(0, 0)
    assert (clock.name, clock.virtual) == ("table", True)
    told = []
    for action, samples, layers in [
        ("forward", 2, 5),
        ("backward", 2, 5),
        ("backward_input", 2, 5),
        ("backward_weight", 2, 5),
        ("optimizer", 0, 5),
    ]:
        before = clock.now()
        clock.begin()
        clock.end(action, samples, layers)
        told.append(clock.now() - before)
    assert told == pytest.approx([0.03, 0.06, 0.03, 0.03, 0.06])


def test_messages_take_what_the_links_of_the_step_take(tmp_path):
    lab = lab_of(
        tmp_path,
        (
            RANKS + '[network]\nbandwidth = "8 kb/s"\nlatency = "1 s"\n'
            '[[change]]\nat_step = 5\nbandwidth = "80 kb/s"\n'
        ),
    )
    step = [0]
    clock = lab.make_clock(step)
    assert clock.sent(2000, 0, 1) == pytest.approx(3.0)
    step[0] = 5
    assert clock.all_reduce_s(10_000, (0, 1)) == pytest.approx(2 + 1.0)


def test_the_clock_of_the_wall_is_the_machine_s(tmp_path):
    assert isinstance(lab_of(tmp_path, 'clock = "wall"\n' + RANKS).make_clock([0]), Clock)


def test_a_lab_is_a_cluster_of_its_devices(tmp_path):
    lab = lab_of(tmp_path, '[[ranks]]\ncount = 2\nmemory = "3 GiB"\n[[ranks]]\nslow = 4\nusd_per_h = 2\n')
    cluster = lab.cluster()
    assert [cluster.device_of(rank).name for rank in range(3)] == ["cpu-1x", "cpu-1x", "cpu-4x"]
    assert cluster.device_of(0).capacity_bytes == 3 * 2**30
    assert [node.usd_per_h for node in cluster.nodes] == [None, None, 2.0]
    assert all(node.nic_bytes_per_s == 1.25e9 for node in cluster.nodes)


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_the_shipped_labs_are_labs(path):
    lab = load_lab(str(path))
    assert lab.to_dict()["name"] == lab.name
    assert len(lab.to_dict()["ranks"]) == len(lab.slow) == 4


def test_the_mixed_labs_are_of_1_2_4_8():
    mixed = [load_lab(str(path)) for path in EXAMPLES if path.stem.startswith("mixed4")]
    assert [(lab.slow, lab.clock) for lab in mixed] == [((1, 2, 4, 8), "cpu"), ((1, 2, 4, 8), "wall")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("ranks = 3", "Must be a list"),
        ("[[ranks]]\ncount = 0", "whole number from 1 to 1024"),
        ("[[ranks]]\ncount = 1000000", "whole number"),
        ("[[ranks]]\ncount = true", "whole number"),
        ("[[ranks]]\ncount = 1.5", "whole number"),
        ("[[ranks]]\nslow = 0", "number from 0.001"),
        ("[[ranks]]\nslow = nan", "finite number"),
        ("[[ranks]]\nslow = '2'", "Must be a number"),
        ("[[ranks]]\ndevice = ' '", "Must be a name"),
        ("[[ranks]]\ndevice = 7", "Must be a string"),
        ("[[ranks]]\nspeed = 2", "unknown key 'speed'"),
        ("[[ranks]]\nmemory = 8", "has no unit"),
        ("[[ranks]]\nmemory = '0 GiB'", "at least 1 bytes"),
        ("frequency = 1\n" + RANKS, "unknown key 'frequency'"),
        ("clock = 'sun'\n" + RANKS, "Must be one of wall, cpu, table"),
        ("clock = 'table'\n" + RANKS, "The clock needs forward, backward, optimizer"),
        (RANKS + TABLE, "Only the clock 'table' reads it"),
        ("network = 4\n" + RANKS, "Must be a table"),
        (RANKS + "[network]\nbandwidth = '0 Gb/s'", "at least 1000 bytes/s"),
        (RANKS + "[network]\nlatency = '-1 us'", "out of range"),
        ("change = 3\n" + RANKS, "Must be a list"),
        (RANKS + "[[change]]\nat_step = 1", "nothing changes"),
        (RANKS + "[[change]]\nslow = 2\nrank = 0", "change[0].at_step"),
        (RANKS + "[[change]]\nat_step = 1\nslow = 2", "A change of slow names its rank"),
        (RANKS + "[[change]]\nat_step = 1\nslow = 2\nrank = 3", "whole number from 0 to 2"),
        (RANKS + "[[change]]\nat_step = 1\nthere = false", "A change of there names its rank"),
        (RANKS + "[[change]]\nat_step = 1\nthere = 0\nrank = 0", "Must be true or false"),
        ("[[ranks]]\n[[change]]\nat_step = 4\nthere = false\nrank = 0", "nobody is left"),
        ("[[ranks]]\npower = 300", "has no unit"),
        ("[[ranks]]\ncarbon_kg_per_kwh = -1", "number from 0"),
        ("ranks = [", "not valid TOML"),
    ],
)
def test_what_is_no_lab_is_refused_with_its_rule(tmp_path, text, said):
    with pytest.raises(SpecError) as told:
        lab_of(tmp_path, text)
    assert said in str(told.value) and "lab.toml" in str(told.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SpecError, match="cannot read"):
        load_lab(str(tmp_path / "none.toml"))
