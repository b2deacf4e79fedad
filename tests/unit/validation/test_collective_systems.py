"""Systems left out: their scores, what is skipped and why."""

import csv

import pytest

from foreshard.catalog.shipped import shipped
from foreshard.errors import SpecError
from foreshard.validation.collective_cases import CLOSED_FORM, NCCL, collective_cases, era_of
from foreshard.validation.collective_systems import OUTSIDE, collective_systems
from foreshard.validation.tables import read_table

COLUMNS = (
    *("collective", "library", "system", "gpu", "num_gpus", "num_nodes", "intra_link", "inter_network"),
    *("algo_or_setting", "dtype", "size_bytes", "time_us", "algbw_GBps", "busbw_GBps", "inplace_time_us"),
    *("inplace_busbw_GBps", "derived_fields", "source", "url_or_repo_path", "notes"),
)


def table(tmp_path, *rows):
    path = tmp_path / "collectives.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def row(**changes):
    usual = {
        "collective": "all_reduce",
        "library": "nccl 2.29.2",
        "system": "h100_sxm",
        "gpu": "H100 SXM",
        "num_gpus": 8,
        "num_nodes": 1,
        "size_bytes": 2**20,
        "time_us": 30.0,
    }
    return usual | changes


def cases(tmp_path, *rows, **options):
    return collective_cases(read_table(table(tmp_path, *rows)), **options)


def test_scores_by_system_and_model(tmp_path):
    found = collective_systems(
        [table(tmp_path, row(), row(system="other", size_bytes=2**34), row(size_bytes=8))]
    )
    assert [one["system"] for one in found["systems"]] == ["h100_sxm", "other"]
    models = found["systems"][0]["models"]
    assert set(models) == {CLOSED_FORM, NCCL} and models[CLOSED_FORM]["rows"] == 2
    assert models[CLOSED_FORM]["skipped"] == 1 and 0 < models[CLOSED_FORM]["median_ape"] < 1
    assert found["skipped"][CLOSED_FORM] == [{"reason": OUTSIDE, "rows": 1, "systems": ["h100_sxm"]}]


def test_a_system_is_predicted_by_constants_that_have_not_seen_it(tmp_path):
    (seen,) = cases(tmp_path, row())
    (unseen,) = cases(tmp_path, row(), exclude="own")
    (other,) = cases(tmp_path, row(system="unheard of"), exclude="own")
    assert seen.predicted_s != unseen.predicted_s and other.predicted_s == seen.predicted_s


def test_a_loop_of_torch_adds_its_host_work(tmp_path):
    bare, looped = cases(tmp_path, row(), row(library="nccl (torch all_reduce_bench.py)"))
    assert 1e-5 < looped.predicted_s - bare.predicted_s < 3e-5


def test_the_release_is_read_from_library_and_notes(tmp_path):
    now, early, noted, torch_release = cases(
        tmp_path,
        row(library="nccl"),
        row(library="nccl 2.18.5"),
        row(library="nccl", notes="in-place busbw; NCCL 2.18.5"),
        row(library="nccl", notes="torch 2.9.1+cu130 nccl 2.27.7"),
    )
    assert early.predicted_s == noted.predicted_s > now.predicted_s == torch_release.predicted_s


def test_times_that_state_no_release_are_of_one_that_there_was():
    """By the day of the commit that brought them, of every system in which NCCL states none."""
    assert era_of("nccl", "8x A100 node") == "2.1x"
    assert era_of("nccl", "CoreWeave H100 HGX, 64 GPUs (sharp example)") == "2.1x"
    assert era_of("nccl", "GCP a3-megagpu-8g x2") == era_of("nccl", "AWS p6-b200.48xlarge") == "2.2x"
    assert era_of("nccl", "vTrain profiled A100 server") == era_of("nccl 2.10.3", "another node") == "old"
    assert era_of("nccl 2.27.3", "8x A100 node") == era_of("nccl", "another node") == "2.2x"


def test_releases_follow_each_other():
    sources = shipped("collective_sources.toml", "foreshard.validation")
    days = list(sources["releases"].values())
    assert days == sorted(days)
    assert [int(name[2:]) for name in sources["releases"]] == list(range(10, 10 + len(days)))


def test_a_trace_that_names_fewer_ranks_than_its_groups_have(tmp_path):
    """Bandwidths of eight ranks, where two are named: no row of that group says how many it had."""
    told = {"system": "a trace", "num_gpus": 2, "collective": "all_gather"}
    found = cases(
        tmp_path,
        row(**told, algo_or_setting="group=tp n_samples=9", algbw_GBps=80.0, busbw_GBps=70.0),
        row(**told, algo_or_setting="group=tp n_samples=3"),
        row(**told, algo_or_setting="group=dp n_samples=3"),
        row(**told | {"num_gpus": "many"}, algo_or_setting="group=tp n_samples=3"),
    )
    reasons = [one.reason for one in found]
    assert reasons[:3] == [
        "its bandwidths are not those of 2 ranks",
        "other rows of its group are not of 2 ranks",
        None,
    ]
    assert reasons[3]


def test_the_transport_of_a_network_is_its_latency(tmp_path):
    two = {"num_gpus": 16, "num_nodes": 2, "collective": "all_gather"}
    times = [
        cases(tmp_path, row(**two, inter_network=f"{network} 8x400G"))[0].predicted_s
        for network in ("InfiniBand NDR", "EFA v3", "EFA", "GPUDirect-TCPX")
    ]
    assert times == sorted(times) and len(set(times)) == 4


def test_a_switch_that_is_forbidden_to_reduce(tmp_path):
    free, forbidden = cases(
        tmp_path, row(size_bytes=2**33), row(size_bytes=2**33, algo_or_setting="NCCL_NVLS_ENABLE=0")
    )
    assert forbidden.predicted_s > 1.2 * free.predicted_s


def test_gathered_sizes_of_onecc_are_what_one_rank_gives(tmp_path):
    one = {"gpu": "Arc Pro B60", "system": "b60", "num_gpus": 4, "collective": "all_gather"}
    given, whole = cases(
        tmp_path,
        row(**one, library="oneccl 2021.17", size_bytes=2**20),
        row(**one, library="nccl", size_bytes=2**22),
    )
    assert given.predicted_s == pytest.approx(whole.predicted_s)


def test_bandwidths_that_contradict_the_ranks(tmp_path):
    good, bad = ({"num_gpus": n, "algbw_GBps": 100.0, "busbw_GBps": 175.0, "time_us": 10.5} for n in (8, 2))
    right, wrong = cases(tmp_path, row(**good), row(**bad))
    assert right.reason is None and wrong.reason == "its bandwidths are not those of 2 ranks"


def test_nccl_estimates_what_it_chooses_among(tmp_path):
    reduce, exchange, foreign = cases(
        tmp_path,
        row(),
        row(collective="alltoall"),
        row(library="oneccl 2021", gpu="Arc Pro B60"),
        model=NCCL,
    )
    assert reduce.predicted_s > 0
    assert "no messages between pairs" in exchange.reason and foreign.reason == "not a run of NCCL"


def test_only_collectives_are_scored_by_system(tmp_path):
    path = tmp_path / "kernels.csv"
    path.write_text("device,dtype,framework,kernel_source,m,n,k,latency_ms\n", encoding="utf-8")
    with pytest.raises(SpecError):
        collective_systems([path])
