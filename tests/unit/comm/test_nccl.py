"""NCCL's choice by its own model against choices that were logged."""

import pytest

from foreshard.catalog.fabrics import link_constants
from foreshard.comm.fabric import fabric_from
from foreshard.comm.nccl import KINDS, collective_choice
from foreshard.errors import SpecError


def fabric(row, rate, nccl_row, *, switch, domain=8):
    return fabric_from(
        link_constants(row),
        intra_bytes_per_s=rate,
        domain=domain,
        per_node=8,
        nic_bytes_per_s=400e9,
        nic_latency_s=5e-6,
        in_network=switch,
        nccl_row=nccl_row,
    )


H200 = fabric("hopper-nvlink", 450e9, 2, switch=True)
B200 = fabric("blackwell-nvlink", 900e9, 3, switch=True)
A100 = fabric("ampere-nvlink", 300e9, 1, switch=False)


def chosen(kind, num_bytes, ranks, f):
    choice = collective_choice(kind, num_bytes, ranks, 1, f)
    return choice.algorithm, choice.protocol


def test_eight_h200_as_logged():
    # stas00/ml-engineering: RING/LL up to 1 MiB, NVLS/SIMPLE from 2 MiB.
    assert chosen("all_reduce", 2**15, 8, H200) == ("Ring", "LL")
    assert chosen("all_reduce", 2**20, 8, H200) == ("Ring", "LL")
    assert chosen("all_reduce", 2**22, 8, H200) == ("NVLS", "Simple")
    assert chosen("all_reduce", 2**34, 8, H200) == ("NVLS", "Simple")


@pytest.mark.parametrize(("ranks", "algorithm"), [(5, "Ring"), (6, "NVLS"), (7, "NVLS"), (8, "NVLS")])
def test_b200_by_number_of_ranks_as_logged(ranks, algorithm):
    assert chosen("all_reduce", 2**33, ranks, B200)[0] == algorithm


def test_ampere_has_no_nvls():
    assert chosen("all_reduce", 2**30, 8, A100) == ("Ring", "Simple")


def test_small_messages_over_many_nodes_take_a_tree():
    assert chosen("all_reduce", 4096, 512, A100)[0] == "Tree"
    assert chosen("all_reduce", 4096, 512, H200)[0] == "Tree"


def test_pcie_has_no_ll128():
    pcie = fabric("pcie", 31.5e9, 11, switch=False)
    for octave in range(10, 30):
        assert chosen("all_reduce", 2**octave, 8, pcie)[1] != "LL128"


@pytest.mark.parametrize("kind", KINDS)
def test_margin_is_over_the_winner(kind):
    choice = collective_choice(kind, 1e7, 16, 1, H200)
    assert choice.time_s > 0
    assert choice.margin >= 0
    assert (choice.runner_up == "") == (kind in ("all_to_all", "send"))


def test_one_rank_chooses_nothing():
    assert collective_choice("all_reduce", 1e6, 1, 1, H200).algorithm == "none"


def test_unknown_kind():
    with pytest.raises(SpecError, match="all_reduce"):
        collective_choice("gossip", 1.0, 2, 1, H200)
