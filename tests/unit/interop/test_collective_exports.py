"""Exports of a plan's collectives: which ranks communicate, NCCL's tuner file, MSCCL's schedules."""

from __future__ import annotations

import csv
import random
from dataclasses import replace

import pytest

from foreshard.api import load_cluster
from foreshard.comm.nccl.choice import nccl_choice
from foreshard.comm.nccl.communicator import communicator_of
from foreshard.comm.schedules.verify import verify
from foreshard.errors import SpecError
from foreshard.interop.collective_schedules.msccl import COLLECTIVE_NAMES
from foreshard.interop.collective_schedules.msccl_reader import schedule_of_msccl
from foreshard.interop.exporters import export
from foreshard.interop.exporters.rank_sets import rank_sets
from foreshard.spec.degrees import plan_from_degrees
from foreshard.spec.plan_file import parse_plan

CLUSTER = load_cluster("8x8xh100-sxm")


def made(devices=64, **degrees):
    return plan_from_degrees(32, devices, **{"global_batch": 128, "seq_len": 8192} | degrees)


@pytest.mark.parametrize("seed", range(20))
def test_rank_sets_are_those_of_coordinates(seed):
    """Oracle: ranks of a stage whose coordinates (tp fastest, cp, dp) differ in the named one alone."""
    draw = random.Random(seed)
    tp, cp, pp, dp = (draw.choice((1, 2, 4)) for _ in range(4))
    zero = draw.choice((0, 1, 3))
    plan = made(tp * cp * pp * dp, tp=tp, cp=cp, pp=pp, zero=zero, sp=tp > 1)
    plan = replace(plan, comm={"context_gather": True})
    found = {(one.purpose, one.ranks): one.collectives for one in rank_sets(plan)}
    wanted = {}
    for stage in range(pp):
        base = stage * tp * cp * dp
        at = {
            (t, c, d): base + (d * cp + c) * tp + t for t in range(tp) for c in range(cp) for d in range(dp)
        }
        for (t, c, d), rank in at.items():
            sets = {
                "tensor": [at[k, c, d] for k in range(tp)],
                "context": [at[t, k, d] for k in range(cp)],
                "gradients": [at[t, k, n] for n in range(dp) for k in range(cp)],
            }
            for purpose, ranks in sets.items():
                if len(ranks) > 1:
                    assert rank in ranks
                    whole = purpose == "gradients" and zero == 0
                    wanted[purpose, tuple(ranks)] = (
                        ("all-reduce",) if whole else ("reduce-scatter", "all-gather")
                    )
    assert found == wanted


def test_hybrid_shards_gather_inside_and_sum_across():
    sets = rank_sets(made(8, zero=3, shard_size=4))
    assert [(one.ranks, one.collectives[0]) for one in sets][:2] == [
        ((0, 1, 2, 3), "reduce-scatter"),
        ((4, 5, 6, 7), "reduce-scatter"),
    ]
    assert {one.ranks for one in sets if one.collectives == ("all-reduce",)} == {(n, n + 4) for n in range(4)}


def test_experts_exchange_tokens_and_sum_over_the_rest():
    sets = rank_sets(made(8, ep=4, zero=1))
    assert {one.ranks for one in sets if one.collectives == ("all-to-all",)} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert {one.ranks for one in sets if one.purpose == "gradients of experts"} == {
        (n, n + 4) for n in range(4)
    }


def test_pipelines_of_unequal_cuts_sum_each_layer_once():
    stages = [{"ranks": [0], "layers": [[0, 3]]}, {"ranks": [1], "layers": [[3, 8]]}]
    groups = [{"share": 3, "stages": stages}, {"share": 1, "stages": [{"ranks": [2], "layers": [[0, 8]]}]}]
    plan = parse_plan({"global_batch": 4, "seq_len": 8, "groups": groups})
    assert {one.ranks for one in rank_sets(plan)} == {(0, 2), (1, 2)}


def tuner_rows(exported):
    return list(csv.DictReader(exported.files[0][1].removeprefix("# ").splitlines()))


def test_nccl_rows_are_the_picks_for_each_shape_of_communicator():
    plan = made(tp=4, pp=2, zero=1)
    exported = export(plan, "nccl", cluster=CLUSTER)
    assert [name for name, _ in exported.files] == ["nccl_tuner.csv", "nccl_env.sh"]
    rows = tuner_rows(exported)
    assert {(row["nNodes"], row["nRanks"]) for row in rows} == {("1", "4"), ("4", "8")}
    inside = communicator_of(load_cluster("1x8xh100-sxm"), 4)
    for size in (1024, 2**20, 2**28):
        (row,) = [
            r
            for r in rows
            if (r["collective_type"], r["nRanks"]) == ("allreduce", "4")
            and int(r["min_bytes"]) <= size <= int(r["max_bytes"])
        ]
        pick = nccl_choice("all-reduce", size, inside)
        assert (row["algorithm"], row["protocol"]) == (pick.algorithm.lower(), pick.protocol.lower())
    assert "NCCL_TUNER_CONFIG_FILE" in exported.files[1][1] and "NCCL_ALGO" not in exported.files[1][1]


def test_nccl_rows_keep_the_algorithm_of_the_plan():
    exported = export(replace(made(tp=4), collectives="tree"), "nccl", cluster=CLUSTER)
    rows = [row for row in tuner_rows(exported) if row["collective_type"] == "allreduce"]
    assert {row["algorithm"] for row in rows} <= {"tree", "nvls", "nvls_tree"}
    assert "export NCCL_ALGO=allreduce:Tree,NVLS,NVLSTree" in exported.files[1][1]


@pytest.mark.parametrize(
    ("degrees", "algorithm"),
    [({"tp": 4, "zero": 0, "sp": False}, "auto"), ({"dp": 16, "ep": 8}, "auto"), ({"zero": 0}, "tree")],
)
def test_msccl_schedules_read_back_without_a_fault(degrees, algorithm):
    plan = replace(made(16, **degrees), collectives=algorithm)
    exported = export(plan, "msccl", cluster=load_cluster("2x8xh100-sxm"))
    sizes = {(COLLECTIVE_NAMES[c], len(one.ranks)) for one in rank_sets(plan) for c in one.collectives}
    assert {name for name, _ in exported.files} == {f"{name}-{count}.xml" for name, count in sizes}
    for name, text in exported.files:
        schedule = schedule_of_msccl(text)
        assert verify(schedule) == ()
        assert f"{COLLECTIVE_NAMES[schedule.collective]}-{schedule.num_ranks}.xml" == name
    if algorithm == "tree":
        assert 'name="double-tree"' in exported.text


def test_what_has_no_collectives_or_no_nccl_is_refused():
    with pytest.raises(SpecError, match="no two ranks"):
        export(made(1), "msccl")
    with pytest.raises(SpecError, match="no cluster"):
        export(made(8), "nccl")
    with pytest.raises(SpecError, match="NCCL does not run on mi300x"):
        export(made(8), "nccl", cluster=load_cluster("1x8xmi300x"))
