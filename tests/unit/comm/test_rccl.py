"""RCCL's estimates on MI300X, recomputed by hand; what runs; what its constants rest on."""

import csv
import os
from pathlib import Path

import pytest

from foreshard.api import load_cluster
from foreshard.comm.nccl.rccl import has_rccl_model, rccl_choice, rccl_estimate, rccl_tuning
from foreshard.comm.prediction import predict_collective

US, GB, MIB = 1e-6, 1e9, 2**20
ALL_LINKS = 7 * 48.0


# latency in us, bandwidth in GB/s: from the formulas of tuning.cc with tuning_model_5
@pytest.mark.parametrize(
    ("collective", "size", "ranks", "name", "latency", "bandwidth"),
    [
        ("all-reduce", 8 * MIB, 8, "ring/Simple", 17 + 14 * 2.1, ALL_LINKS * 8 / 14),
        ("all-reduce", 64 * 1024, 8, "ring/LL", 12 + 14 * 0.8, ALL_LINKS * 0.08 * 8 / 14),
        ("all-reduce", 64 * 1024, 8, "tree/LL", 12 + 14 * 0.9, ALL_LINKS * 0.06 / 2),
        ("broadcast", 64 * 1024, 8, "ring/LL", 12 + 0.8, ALL_LINKS * 0.08 * 1.65),
        ("all-gather", MIB, 8, "ring/Simple", 17 + 7 * 2.1, ALL_LINKS * 8 / 7),
        # two nodes: 30 hops, of which 4 cross; hops inside a node wait for the posting of a message
        ("all-reduce", 2**30, 16, "ring/Simple", 17 + 26 * 6.0 + 4 * 320, ALL_LINKS * 16 / 30),
        ("all-reduce", 2**30, 16, "tree/Simple", 17 + 2 * (7 * 2.3 + 25), ALL_LINKS * 0.11 / 2),
        ("all-reduce", 2**30, 64, "tree/Simple", 17 + 2 * (7 * 2.3 + 3 * 25), ALL_LINKS * 0.59 / 2),
        # factors by size: of a tree always, of a ring over nodes; the ends of the table hold beyond it
        ("all-reduce", 8, 8, "tree/LL", 12 + 14 * 0.9, ALL_LINKS * 0.06 / 2 * 0.1),
        ("all-reduce", 2**29, 16, "ring/Simple", 17 + 26 * 6.0 + 4 * 320, ALL_LINKS * 16 / 30 * 0.8),
        ("all-reduce", 2**36, 16, "tree/Simple", 17 + 2 * (7 * 2.3 + 25), ALL_LINKS * 0.11 / 2 * 0.8),
    ],
)
def test_an_estimate_is_the_one_worked_out_by_hand(collective, size, ranks, name, latency, bandwidth):
    found = rccl_estimate(collective, size, *name.split("/"), ranks)
    assert found.latency_s == pytest.approx(latency * US)
    assert found.bytes_per_s == pytest.approx(bandwidth * GB)
    assert found.time_s == pytest.approx(found.latency_s + size / found.bytes_per_s)


def test_what_cannot_run_has_a_reason():
    assert "LL128" in rccl_estimate("all-reduce", MIB, "ring", "LL128", 8).reason
    assert "several nodes" in rccl_estimate("all-reduce", MIB, "tree", "Simple", 8).reason
    assert rccl_estimate("all-reduce", MIB, "tree", "Simple", 16).runs
    assert "all-reduce only" in rccl_estimate("all-gather", MIB, "tree", "LL", 16).reason


def test_the_pick_and_its_margin():
    choice = rccl_choice("all-reduce", 8 * MIB, 8)
    assert choice.best.name == "Ring/Simple" and choice.best.time_s / US == pytest.approx(90.1, abs=0.05)
    assert choice.runner_up.time_s == pytest.approx(choice.best.time_s * (1 + choice.margin))
    assert rccl_choice("all-reduce", 4096, 8).protocol == "LL"
    assert rccl_choice("send", MIB, 8).algorithm == "P2P"


def test_whole_nodes_of_mi300x_have_a_pick_and_nothing_else_of_amd():
    assert has_rccl_model(load_cluster("2x8xmi325x"), 16)
    for cluster, ranks in (("1x8xmi300x", 4), ("1x8xmi355x", 8), ("1x4xmi300a", 4)):
        assert not has_rccl_model(load_cluster(cluster), ranks)
        found = predict_collective("all-reduce", MIB, load_cluster(cluster), ranks)
        assert found.choice is None and not found.library
    found = predict_collective("all-reduce", MIB, load_cluster("4x8xmi300x"))
    assert found.library == "RCCL" and found.communicator is None and found.choice.best.runs


def test_the_shipped_constants_are_those_of_the_table():
    path = Path(os.environ.get("FORESHARD_MEASURED", "/work/shared/measured/dev"))
    path /= "comm_rccl_tuning_constants.csv"
    if not path.exists():
        pytest.skip("the table of constants is not here")
    table, protocols, checked = rccl_tuning(), ("LL", "LL128", "Simple"), 0
    with path.open(encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["model"] == "tuning_model_5"]
    for row in rows:
        kind, first, second, third = row["table"], row["key1"], row["key2"], row["key3"]
        if kind == "hwLat" and first in ("NVLINK", "NET") and second in ("Tree", "Ring"):
            medium = "xgmi" if first == "NVLINK" else "network"
            found = table["hop_latency_us"][medium][second.lower()][protocols.index(third)]
        elif kind == "bwRatio" and second in ("Tree", "Ring"):
            nodes = "up_to_two_nodes" if first == "2 nodes" else "more_nodes"
            found = table["bandwidth_share"][nodes][second.lower()][protocols.index(third)]
        elif kind in ("treeCorrectionFactor", "ringCorrectionFactor"):
            found = table["correction"][kind[:4]][first][int(second.split("=")[1])]
        else:
            continue
        assert found == pytest.approx(float(row["value"])), row
        checked += 1
    assert checked == 12 + 12 + 162
