"""Collectives against measured tables: error in the fit, with systems left out, and the shipped constants."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import fit_comm

from foreshard.validation.tables import measured_folder

LEFT_OUT = ("h100_sxm", "a100_sxm")


@pytest.fixture(scope="module")
def fitting():
    if not (measured_folder() / "comm_collectives.csv.gz").exists():
        pytest.skip(f"measured tables are not at {measured_folder()}; set FORESHARD_MEASURED")
    return fit_comm


@pytest.fixture(scope="module")
def data(fitting):
    return fitting.load()


@pytest.fixture(scope="module")
def shipped(fitting):
    return json.loads(fitting.TABLE.read_text("utf-8"))


@pytest.mark.parametrize(
    ("table", "limit"),
    [("comm_collectives.csv.gz", 0.10), ("comm_vtrain_allreduce_a100.csv.gz", 0.10), ("sailor", 0.10)],
)
def test_median_error_in_the_fit(fitting, data, shipped, table, limit):
    signed = np.concatenate([fitting.errors(shipped, p) for p in data if p.table == table])
    assert len(signed) > 4000
    assert np.median(np.abs(signed)) <= limit


def test_large_messages_inside_a_node(fitting, data, shipped):
    worst = []
    for points in data:
        if points.table == "comm_collectives.csv.gz" and fitting.SYSTEMS[points.system].generation.endswith(
            "nvlink"
        ):
            worst.append(np.abs(fitting.errors(shipped, points))[points.num_bytes >= 64e6])
    assert np.median(np.concatenate(worst)) <= 0.05
    assert np.quantile(np.concatenate(worst), 0.9) <= 0.12


def test_median_error_with_systems_left_out(fitting, data, shipped):
    nccl = [p for p in data if p.table == "comm_collectives.csv.gz"]
    signed = [fitting.errors(fitting.seen_without(p.system, shipped), p) for p in nccl]
    assert np.median(np.abs(np.concatenate(signed))) <= 0.15


@pytest.mark.slow
def test_shipped_constants_are_the_refit(fitting, data, shipped):
    refit = fitting.build(data, LEFT_OUT)  # `make check` refits without each of the others too
    shipped = {**shipped, "left_out": {name: shipped["left_out"][name] for name in LEFT_OUT}}
    data = [points for points in data if points.system in LEFT_OUT]
    assert fitting.moved(shipped, refit, data) == []
    # The comparison sees one constant that moved, in the fit and with a system left out.
    row = refit["links"]["hopper-nvlink"]
    wrong = {**refit, "links": {**refit["links"], "hopper-nvlink": {**row, "copy": row["copy"] * 1.001}}}
    assert [line.split(":")[0] for line in fitting.moved(shipped, wrong, data)] == [
        ".links.hopper-nvlink.copy"
    ]
    slower = {k: v * 1.05 if k.endswith("eff") else v for k, v in row.items()}
    without = {**refit["left_out"]["h100_sxm"], "links": {"hopper-nvlink": slower}}
    wrong = {**refit, "left_out": {**refit["left_out"], "h100_sxm": without}}
    assert [line.split(":")[0] for line in fitting.moved(shipped, wrong, data)] == [".left_out.h100_sxm"]


def test_multi_node_rows_that_fixed_the_nic_efficiency(fitting):
    from foreshard.catalog.fabrics import link_constants
    from foreshard.comm.collectives import all_reduce_s
    from foreshard.comm.fabric import fabric_from

    fabric = fabric_from(
        link_constants("hopper-nvlink"),
        intra_bytes_per_s=450e9,
        domain=8,
        per_node=8,
        nic_bytes_per_s=400e9,
        nic_latency_s=5e-6,
        in_network=True,
    )
    rows = [r for r in fitting.rows_of("comm_collectives.csv.gz") if r["system"].startswith("CoreWeave H100")]
    signed = [
        float(all_reduce_s(float(r["size_bytes"]), 64, 1, fabric)) / float(r["time_us"]) * 1e6 - 1
        for r in rows
    ]
    assert len(signed) == 5
    assert max(map(abs, signed)) <= 0.10
