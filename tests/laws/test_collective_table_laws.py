"""Laws of measured tables of collectives: within one domain and their sizes, else the formula."""

from __future__ import annotations

import numpy as np
import pytest

from foreshard import api
from foreshard.comm.collectives import all_gather_s, all_reduce, all_reduce_s, all_to_all_s
from foreshard.comm.fabric import fabric_of, links_alone, network_alone
from foreshard.cost.tables import load_tables

FORMS = {"all_reduce": all_reduce_s, "all_gather": all_gather_s, "all_to_all": all_to_all_s}
CLUSTER = api.load_cluster("2x8xh100-sxm")
TWICE = 2.0


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Collectives of H100 twice as slow as the formula, from 1 KiB to 4 GiB on 2 to 8 ranks."""
    fabric = fabric_of(CLUSTER.nodes[0])
    lines = ["device,dtype,op,ranks,bytes,latency_ms"]
    for op, form in FORMS.items():
        for ranks in (2, 4, 8):
            for power in range(10, 33):
                ms = 1e3 * TWICE * float(form(2.0**power, ranks, 1, fabric))
                lines.append(f"h100-sxm,bf16,{op},{ranks},{2**power},{ms!r}")
    made = tmp_path_factory.mktemp("tables") / "collectives.csv"
    made.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(made)


@pytest.mark.parametrize("op", list(FORMS))
def test_a_table_gives_what_it_covers_and_the_formula_the_rest(path, op):
    tables = load_tables(path)
    plain, own = (fabric_of(CLUSTER.nodes[0], tables=source) for source in (None, tables))
    form = FORMS[op]
    for size in (2.0**10, 2.0**20, 2.0**32):
        assert form(size, 4, 1, own) == pytest.approx(TWICE * form(size, 4, 1, plain), rel=1e-9)
    between = form(1.5 * 2.0**20, 4, 1, own)
    assert form(2.0**20, 4, 1, own) < between < form(2.0**21, 4, 1, own)
    for size, ranks in ((512.0, 4), (2.0**33, 4), (2.0**20, 16), (0.0, 4), (2.0**20, 1)):
        assert form(size, ranks, 1, own) == form(size, ranks, 1, plain)
    mixed = form(np.array([2.0**20, 2.0**34]), np.array([4.0, 8.0]), 1, own)
    expected = [TWICE * float(form(2.0**20, 4, 1, plain)), float(form(2.0**34, 8, 1, plain))]
    assert mixed == pytest.approx(expected, rel=1e-9)


def test_parts_of_a_fabric_have_no_table(path):
    own = fabric_of(CLUSTER.nodes[0], tables=load_tables(path))
    plain = fabric_of(CLUSTER.nodes[0])
    for part in (links_alone, network_alone):
        found, known = (all_reduce(4, 1, part(one)).time_s(2.0**20) for one in (own, plain))
        assert found == pytest.approx(known)


@pytest.mark.parametrize("engine", ["analytical", "graph", "event"])
def test_a_step_takes_its_collectives_from_the_table_and_says_how_much(path, engine):
    asked = {"tp": 8, "global_batch": 16, "seq_len": 2048, "engine": engine, "network": "closed-form"}
    if engine == "analytical":
        del asked["network"]
    one = api.load_cluster("1x8xh100-sxm")
    plain = api.predict("llama3-8b", one, tp_overlap=False, **asked)
    own = api.predict("llama3-8b", one, tp_overlap=False, costs=path, **asked)
    parts = plain.time_breakdown_s, own.time_breakdown_s
    # Computation hides a part that is as long as before, so what is left is a little more than twice.
    assert TWICE <= parts[1]["tensor_comm"] / parts[0]["tensor_comm"] <= 1.1 * TWICE
    assert parts[1]["compute"] == pytest.approx(parts[0]["compute"], rel=1e-6)
    work = sum(value for name, value in parts[1].items() if name not in ("bubble", "straggler"))
    assert own.cost_sources["table"] == pytest.approx(parts[1]["tensor_comm"] / work, rel=0.05)
    assert sum(own.cost_sources.values()) == pytest.approx(1.0)


def test_a_plan_is_priced_as_it_is_predicted(path):
    run = {"global_batch": 32, "seq_len": 4096, "engine": "analytical", "budget_s": 1, "max_tp": 4}
    first = api.plan("llama3-8b", "1x4xh100-sxm", costs=path, **run).plans[0]
    again = api.predict("llama3-8b", "1x4xh100-sxm", first.plan, costs=path, engine="analytical")
    assert first.prediction.step_time_s == pytest.approx(again.step_time_s, rel=1e-9)
