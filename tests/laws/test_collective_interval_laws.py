"""Laws of intervals around collectives."""

import json

import numpy as np
import pytest

from foreshard import api
from foreshard.catalog.shipped import shipped
from foreshard.cli.program import run
from foreshard.comm.intervals import (
    BANDS,
    EVIDENCE,
    LEVELS,
    collective_evidence,
    collective_intervals,
    left_out_evidence,
)
from foreshard.comm.prediction import predict_collective

SIZES = (1024.0, 2.0**22, 2.0**30)


@pytest.mark.parametrize("size", SIZES)
def test_intervals_are_nested_and_weaker_evidence_is_never_narrower(size):
    found = {evidence: collective_intervals(2.0, size, evidence) for evidence in EVIDENCE}
    for ends in found.values():
        assert tuple(ends) == LEVELS
        lows, highs = zip(*ends.values(), strict=True)
        assert list(lows) == sorted(lows, reverse=True) and list(highs) == sorted(highs)
        assert lows[0] < 2.0 < highs[0]
        assert np.multiply(lows, highs) == pytest.approx(4.0)  # alike on both sides, in logarithms
    for level in LEVELS:
        for evidence in ("unseen", "network"):
            assert found[evidence][level][1] >= found["fitted"][level][1]


def test_a_system_counts_once_and_not_where_it_is_left_out():
    """The quantile of residuals in which every system has as many, one of them left out."""
    systems = shipped("collective_residuals.json")["classes"]["fitted"]
    band, size = BANDS[2][0], SIZES[2]
    for left in ("", "b200_sxm", "a100_sxm"):
        own = [value for name, bands in systems.items() if name != left for value in bands.get(band, ())]
        _, high = collective_intervals(1.0, size, "fitted", exclude=left)[0.9]
        assert np.log(high) == pytest.approx(np.quantile(own, 0.9))
    assert len({len(values) for bands in systems.values() for values in bands.values()}) == 1


@pytest.mark.parametrize(
    ("cluster", "ranks", "evidence"),
    [
        ("1x8xh100-sxm", 8, "fitted"),
        ("2x8xh100-sxm", 8, "fitted"),
        ("2x8xh100-sxm", 16, "network"),
        ("1x8xl40s", 8, "fitted"),
        ("1x8xrtx-4090", 8, "unseen"),
        ("1x8xmi300x", 8, "unseen"),
    ],
)
def test_evidence_is_that_of_the_links_that_are_used(cluster, ranks, evidence):
    found = predict_collective("all-reduce", 2.0**20, api.load_cluster(cluster), ranks)
    assert found.evidence == evidence
    assert found.time_intervals_s == collective_intervals(found.time_s, 2.0**20, evidence)
    assert collective_evidence(api.load_cluster(cluster), ranks, float(ranks)) != "network"


def test_a_system_that_is_left_out_rests_on_others_of_its_generation_or_on_none():
    assert left_out_evidence("b200_sxm") == "fitted" and left_out_evidence("b60") == "unseen"
    assert left_out_evidence("GCP a3-megagpu-8g x2") == "network" and left_out_evidence("mine") is None


def test_validate_tells_how_often_they_hold(tmp_path, capsys):
    head = "collective,library,system,gpu,num_gpus,num_nodes,size_bytes,time_us,algbw_GBps,busbw_GBps"
    right = api.load_cluster("1x8xh100-sxm")
    lines = [head]
    for size, factor in ((2**20, 1.0), (2**24, 1.02), (2**28, 9.0)):
        us = 1e6 * factor * predict_collective("all-reduce", size, right).time_s
        lines.append(f"all_reduce,nccl,mine,NVIDIA H100 SXM,8,1,{size},{us!r},,")
    table = tmp_path / "mine.csv"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert run(["validate", str(table), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["summary"]
    assert found["intervals"]["by_level"]["0.9"] == pytest.approx(2 / 3)
    assert found["intervals"]["by_evidence"]["fitted"]["rows"] == 3
