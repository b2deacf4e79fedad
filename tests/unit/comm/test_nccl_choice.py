"""NCCL's estimates, recomputed by hand; what may run; the pick and its margin."""

import csv
import os
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from foreshard.api import load_cluster
from foreshard.comm.nccl.channels import Channels
from foreshard.comm.nccl.choice import nccl_choice
from foreshard.comm.nccl.communicator import Communicator, communicator_of
from foreshard.comm.nccl.constants import ALGORITHMS, PROTOCOLS, tree_correction, tuning
from foreshard.comm.nccl.estimates import COLLECTIVES, estimate, estimates
from foreshard.errors import SpecError

US, GB, MIB = 1e-6, 1e9, 2**20


@pytest.fixture(scope="module")
def comms():
    names = {
        "h100": ("1x8xh100-sxm", 8),
        "h100s": ("8x8xh100-sxm", 64),
        "a100": ("1x8xa100-sxm-80gb", 8),
        "v100s": ("2x8xv100-sxm-32gb", 16),
        "l40s": ("1x8xl40s", 8),
        "singles": ("8x1xh100-sxm", 8),
    }
    return {name: communicator_of(load_cluster(cluster), ranks) for name, (cluster, ranks) in names.items()}


def by_hand(comms, name, collective, num_bytes, algorithm, protocol):
    return estimate(collective, num_bytes, algorithm, protocol, comms[name])


# latency in us, bandwidth of the bus in GB/s, ratio of algorithm bandwidth: from the formulas of tuning.cc
@pytest.mark.parametrize(
    ("name", "collective", "algorithm", "protocol", "latency", "bandwidth"),
    [
        ("h100", "all-reduce", "ring", "Simple", 8.4 + 14 * 3.4, 12 * 30 * 8 / 14),
        ("h100", "all-reduce", "ring", "LL", 6.6 + 14 * 0.6, 141.0 * 8 / 14),
        ("h100", "all-reduce", "ring", "LL128", 14.0 + 14 * 1.9, 12 * 30 * 0.92 * 8 / 14),
        ("h100", "all-gather", "ring", "Simple", 8.4 + 7 * 3.4, 12 * 30 * 8 / 7),
        ("h100", "broadcast", "ring", "Simple", 8.4 + 3.4, 12 * 30),
        ("h100", "all-reduce", "nvls", "Simple", 25.0, 8 * (40 * 0.85 * 7 / 8 * 2) * 8 / 14),
        ("h100", "all-gather", "nvls", "Simple", 25.0, 8 * (40 * 0.85 * 7 / 8 * 7 / 8)),
        ("a100", "all-reduce", "tree", "LL", 6.8 + 2 * 7 * 0.6, 12 * 20 * 0.92 / 3.8 * 0.5 * 0.4),
        ("h100s", "all-reduce", "nvls-tree", "Simple", 25.0 + 2 * 3 * 20.9, 8 * 45.5 * 64 / 126),
        # plateau of 1.4 on the latency; 112 hops inside nodes are bounded by three postings of 1 us
        ("h100s", "all-reduce", "ring", "Simple", 1.4 * (8.4 + 112 * 3.4 + 14 * 14.0), 8 * 48 * 64 / 126),
        ("h100s", "all-reduce", "tree", "LL128", 14 + 2 * (7 * 1.25 + 3 * 8.5), 36 * 8 * 0.92 * 0.9375 * 0.5),
        ("singles", "all-gather", "pat", "Simple", 8.0 + 3 * 14 / 3.5 + 8 * 2.8, 2 * 24 * 0.75),
    ],
)
def test_an_estimate_is_the_one_worked_out_by_hand(
    comms, name, collective, algorithm, protocol, latency, bandwidth
):
    size = MIB / 4 if protocol == "LL" else 512 * MIB
    found = by_hand(comms, name, collective, size, algorithm, protocol)
    if (name, algorithm, protocol) == ("h100s", "tree", "LL128"):
        bandwidth = min(8 * 48 * 0.92, 8 * 36.0) * 0.9375  # bus, then the limit of LL128 per channel
        bandwidth = min(bandwidth, 8 * 29.0) * 0.85 * 0.5  # a simple tree: each device has a card
    assert found.latency_s == pytest.approx(latency * US)
    assert found.bytes_per_s == pytest.approx(bandwidth * GB)
    assert found.time_s == pytest.approx(latency * US + size / (bandwidth * GB))


def test_a_tree_is_corrected_at_middle_sizes():
    assert tree_correction("LL", 64 << 12, 23) == 0.4
    assert tree_correction("Simple", 64, 23) == 0.9
    assert tree_correction("Simple", 63, 23) == 1.0 and tree_correction("Simple", 64 << 23, 23) == 1.0


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_cannot_run_has_a_reason_and_the_rest_a_time(comms, collective):
    for comm in comms.values():
        for found in estimates(collective, MIB, comm):
            assert found.runs == (found.time_s < 1.0) and bool(found.reason) != found.runs


def test_valid_combinations_are_those_of_the_source(comms):
    def valid(collective, comm):
        pairs = [(a, p) for a in ALGORITHMS for p in PROTOCOLS]
        return {a for a, p in pairs if estimate(collective, 1.0, a, p, comm).runs}

    assert valid("broadcast", comms["h100"]) == {"ring"}
    assert valid("all-reduce", comms["h100"]) == {"ring", "tree", "nvls"}
    assert valid("all-reduce", comms["h100s"]) == {"ring", "tree", "nvls-tree"}
    assert valid("reduce-scatter", comms["h100"]) == {"ring", "nvls"}
    assert valid("all-gather", comms["singles"]) == {"ring", "pat"}
    assert valid("all-reduce", comms["a100"]) == {"ring", "tree"}
    assert "NVLink" in estimate("all-reduce", 1.0, "ring", "LL128", comms["l40s"]).reason
    assert "one rank per node" in estimate("all-gather", 1.0, "pat", "Simple", comms["h100s"]).reason


def test_collnet_runs_where_the_network_reduces():
    comm = communicator_of(load_cluster("4x8xh100-sxm"), 32, collnet=True)
    found = {one.name: one for one in estimates("all-reduce", 64 * MIB, comm)}
    assert all(found[f"{name}/Simple"].runs for name in ("CollNetDirect", "CollNetChain", "NVLS"))
    assert found["NVLS/Simple"].latency_s == pytest.approx((25 + 18) * US)
    assert found["CollNetChain/Simple"].latency_s == pytest.approx((2 * 7 * 2.8 + 30) * US)


@pytest.mark.parametrize(
    ("name", "num_bytes", "picked"),
    [
        ("h100", 1024, "Ring/LL"),
        ("h100", 1024 * MIB, "NVLS/Simple"),
        ("h100s", 1024, "Tree/LL"),
        ("h100s", 1024 * MIB, "NVLSTree/Simple"),
        ("a100", 1024 * MIB, "Ring/Simple"),
    ],
)
def test_the_pick(comms, name, num_bytes, picked):
    choice = nccl_choice("all-reduce", num_bytes, comms[name])
    assert f"{choice.algorithm}/{choice.protocol}" == choice.best.name == picked
    assert choice.runner_up.time_s == pytest.approx(choice.best.time_s * (1 + choice.margin))
    assert all(one.time_s >= choice.best.time_s for one in choice.estimates)


# The table that NCCL 2.29.7 printed of two ranks that meet over sockets: latency in us, bandwidth in GB/s.
@pytest.mark.parametrize(
    ("collective", "algorithm", "logged"),
    [
        ("broadcast", "ring", {"LL": (9.3, 1.2), "Simple": (22.4, 2.4)}),
        ("all-gather", "ring", {"LL": (11.6, 2.4), "Simple": (22.4, 4.8)}),
        ("reduce-scatter", "ring", {"LL": (11.6, 2.4), "Simple": (22.4, 4.8)}),
        ("all-reduce", "ring", {"LL": (16.6, 1.2), "Simple": (36.4, 2.4)}),
        ("all-reduce", "tree", {"LL": (16.8, 0.5), "Simple": (36.4, 1.9)}),
        ("all-gather", "pat", {"Simple": (17.6, 3.6)}),
        ("reduce-scatter", "pat", {"Simple": (17.6, 3.6)}),
    ],
)
def test_the_estimates_are_those_that_nccl_printed(collective, algorithm, logged):
    comm = replace(SOCKETS, far_cards=False)
    for protocol, (latency, bandwidth) in logged.items():
        # The table leaves out what depends on the size: a size below all corrections.
        found = estimate(collective, 63, algorithm, protocol, comm)
        assert found.latency_s / US == pytest.approx(latency, abs=0.05)
        assert found.bytes_per_s / GB == pytest.approx(bandwidth, abs=0.05)


# Tables that NCCL 2.27.5 logged of 1 to 8 H100 in each of 2 to 32 nodes, a card of 400 Gb/s per device,
# as meta-pytorch/autoparallel 0288b2ca keeps them (cost_models/nccl_cost_model.py): 190 entries.
def logged_over_nodes():
    with (Path(__file__).parent / "nccl_2_27_tuning.csv").open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def test_the_estimates_over_nodes_are_those_that_nccl_logged():
    rows = logged_over_nodes()
    assert len(rows) == 190
    for row in rows:
        nodes, inside = int(row["nodes"]), int(row["per_node"])
        comm = communicator_of(load_cluster(f"{nodes}x{inside}xh100-sxm"), nodes * inside, release="2.27")
        found = estimate(row["collective"], 63, row["algorithm"], row["protocol"], comm)
        assert found.latency_s / US == pytest.approx(float(row["latency_us"]), abs=0.06), row
        assert found.bytes_per_s / GB == pytest.approx(float(row["algbw_GBps"]), abs=0.06), row


def test_a_release_changes_what_it_logged_alone():
    cluster = load_cluster("4x8xh100-sxm")
    now, then = communicator_of(cluster, 32), communicator_of(cluster, 32, release="2.27")
    for algorithm, same in (("ring", True), ("tree", True), ("nvls-tree", False)):
        one, other = (estimate("all-reduce", MIB, algorithm, "Simple", comm) for comm in (now, then))
        assert (one.time_s == other.time_s) == same
    assert communicator_of(load_cluster("1x8xh100-sxm"), 8, release="2.27").release == "2.27"


def test_the_latency_that_a_plugin_reports_is_on_every_hop():
    plain, efa = load_cluster("2x8xh100-sxm"), load_cluster("2xaws-p5.48xlarge")
    assert efa.nodes[0].nic_latency_s == pytest.approx(75e-6)
    one, other = communicator_of(plain, 16), communicator_of(efa, 16)
    assert (one.plugin_latency_s, other.plugin_latency_s) == (0.0, pytest.approx(75e-6))
    for algorithm, protocol, hops in (("ring", "LL", 2), ("ring", "Simple", 4), ("tree", "LL128", 2)):
        times = [estimate("all-reduce", 63, algorithm, protocol, comm).latency_s for comm in (one, other)]
        assert times[1] - times[0] == pytest.approx(hops * 75e-6), algorithm


# Every pick that somebody logged or stated with its machine and release: a case for each communicator.
SOCKETS = Communicator(
    num_ranks=2,
    num_nodes=2,
    capability=120,
    nvlink=False,
    switched=False,
    ring=Channels(count=2, intra_bytes_per_s=1.2 * GB, inter_bytes_per_s=1.2 * GB),
    tree=Channels(count=2, intra_bytes_per_s=2.4 * GB, inter_bytes_per_s=1.2 * GB),
    switch=None,
    far_cards=True,
)


def sizes_of(text):
    """Sizes in bytes: numbers, powers as 2^3, and ranges of powers as 2^3..2^5."""
    for word in text.split():
        first, _, last = word.partition("..")
        if first.startswith("2^"):
            yield from (2**power for power in range(int(first[2:]), int((last or first)[2:]) + 1))
        else:
            yield int(first)


def cases():
    with (Path(__file__).parent / "nccl_picks.csv").open(encoding="utf-8") as lines:
        for _, rows in groupby(csv.DictReader(lines), key=lambda row: row["case"]):
            rows = list(rows)
            yield rows[0], {size: row["pick"] for row in rows for size in sizes_of(row["sizes"])}


def communicator_in(case):
    if case["cluster"] == "sockets":
        return replace(SOCKETS, release=case["release"])
    comm = communicator_of(load_cluster(case["cluster"]), int(case["ranks"]), release=case["release"])
    return replace(comm, switch=None) if case["setting"] == "no NVLS" else comm


def judged(case, picks):
    """Picks that are right, of how many, and the row of the case in the documentation."""
    comm, right, narrowest = communicator_in(case), 0, None
    for size, name in picks.items():
        choice = nccl_choice(case["collective"], float(size), comm)
        is_right = name in (choice.best.name, choice.algorithm)
        right += is_right
        if narrowest is None or choice.margin < narrowest.margin:
            narrowest = choice
    what = f"{case['cluster']}, {case['ranks']} ranks" + (f", {case['setting']}" if case["setting"] else "")
    row = f"| {case['case']} | {case['source']} | {what} | {case['collective']} | {right} of {len(picks)} "
    row += f"| {narrowest.best.name} | {narrowest.runner_up.name} | {narrowest.margin:.1%} |"
    return right, len(picks), row


def test_nine_of_ten_cases_are_right():
    """By case, not by size: the mean share of right picks, and the table of the documentation."""
    page = (Path(__file__).parents[3] / "docs" / "derivations" / "nccl.md").read_text(encoding="utf-8")
    found = [judged(case, picks) for case, picks in cases()]
    for _, _, row in found:
        assert row in page, row
    assert len(found) == 18 and sum(right == count for right, count, _ in found) == 16
    assert tuple(map(sum, zip(*((right, count) for right, count, _ in found), strict=True))) == (162, 169)
    assert "162 of 169 picks" in page
    assert sum(right / count for right, count, _ in found) / len(found) == pytest.approx(33 / 36)
    assert 33 / 36 > 0.9


@pytest.mark.parametrize(
    ("num_bytes", "picked", "microseconds"),
    [
        (8, "Tree/LL", 25.200924),
        (256, "Tree/LL", 25.229528),
        (512, "Tree/LL", 25.259054),
        (262144, "Tree/LL128", 54.707825),
        (524288, "NVLSTree/Simple", 59.553600),
        (8388608, "NVLSTree/Simple", 157.857605),
    ],
)
def test_an_estimated_time_is_the_one_that_nccl_logged(num_bytes, picked, microseconds):
    """NVIDIA/nccl 1453, release 2.22.3: 24 H100 on three nodes with cards of 200 Gb/s."""
    comm = communicator_of(load_cluster("3x8xh100-sxm@1600Gb/s"), 24, release="2.26")
    best = nccl_choice("all-reduce", num_bytes, comm).best
    assert best.name == picked
    assert best.time_s / US == pytest.approx(microseconds, rel=1e-7)


def test_the_estimate_of_a_ring_on_a_node_is_the_one_that_nccl_logged():
    """NVIDIA/nccl 1595: 768 MiB by the Simple ring of eight H100, 3970.683594 us."""
    comm = communicator_of(load_cluster("1x8xh100-sxm"), 8)
    found = estimate("all-reduce", 805306368, "ring", "Simple", comm)
    assert found.time_s / US == pytest.approx(3970.683594, rel=1e-7)


def test_a_tree_over_nodes_of_h800_is_the_one_that_nccl_logged():
    """NVIDIA/nccl 1154: 68.8 GB/s, that is 8 trees of 22, the first speed of which a device carries 8 in 7.

    The ring's 4 of 45 are doubled to 8 of 22.5, which is no speed that the search tries.
    """
    comm = communicator_of(load_cluster("2x8xh800-sxm"), 16)
    assert comm.ring.inter_bytes_per_s / GB == 22.5 and comm.tree.inter_bytes_per_s / GB == 22.0
    found = estimate("all-reduce", 63, "tree", "Simple", comm)
    assert found.bytes_per_s / GB == pytest.approx(68.8, abs=0.05)


# Row of the all-reduce in the table that NCCL 2.30 logged on a node of 8 H200.
@pytest.mark.parametrize(
    ("name", "latency", "bandwidth"),
    [
        ("tree/LL", 15.2, 43.6),
        ("tree/LL128", 31.5, 128.8),
        ("tree/Simple", 64.4, 165.6),
        ("ring/LL", 15.0, 80.6),
        ("ring/LL128", 40.6, 189.3),
        ("ring/Simple", 56.0, 205.7),
        ("nvls/Simple", 25.0, 272.0),
    ],
)
def test_the_estimates_on_a_node_are_those_that_nccl_logged(name, latency, bandwidth):
    comm = communicator_of(load_cluster("1x8xh200-sxm"), 8)
    found = estimate("all-reduce", 63, *name.split("/"), comm)
    assert found.latency_s / US == pytest.approx(latency, abs=0.051)
    assert found.bytes_per_s / GB == pytest.approx(bandwidth, abs=0.051)


def test_messages_have_no_choice(comms):
    assert nccl_choice("send", 1024, comms["h100"]).protocol == "LL"
    assert nccl_choice("send", MIB, comms["h100"]).protocol == "Simple"
    choice = nccl_choice("all-to-all", 1024, comms["h100s"])
    assert (choice.algorithm, choice.protocol, choice.runner_up, choice.margin) == (
        "P2P",
        "Simple",
        None,
        None,
    )


def test_an_unknown_collective(comms):
    with pytest.raises(SpecError, match="unknown collective 'all-dance'"):
        nccl_choice("all-dance", 1024, comms["h100"])


def test_the_shipped_constants_are_those_of_the_table():
    folder = os.environ.get("FORESHARD_MEASURED", "/work/shared/measured/dev")
    path = Path(folder) / "comm_nccl_tuning_constants.csv"
    if not path.exists():
        pytest.skip("the table of constants is not here")
    with path.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    words = {name: word for word, name in ALGORITHMS.items()}
    media = {"NVLINK": "nvlink", "PCI": "pcie", "NET": "network"}
    checked = 0
    for row in rows:
        table, first, second, third = row["table"], row["key1"], row["key2"], row["key3"]
        if table == "baseLatencies":
            found = tuning()["base_latency_us"][words[first]][PROTOCOLS.index(second)]
        elif table == "hwLatencies":
            found = tuning()["hop_latency_us"][media[first]][words[second]][PROTOCOLS.index(third)]
        elif table == "treeCorrectionFactor":
            found = tuning()["tree_correction"][first][int(second.split("=")[1])]
        elif table == "nvlsEfficiency":
            found = tuning()["nvls_efficiency"][first.lower()]
        else:
            continue
        assert found == pytest.approx(float(row["value"])), row
        checked += 1
    assert checked == 21 + 63 + 72 + 4
