"""`--costs FILE.csv`: products of a step from a measured table, and what is wrong in one."""

import pickle

import numpy as np
import pytest

from foreshard import api
from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import kernel_model
from foreshard.cost.attention import backward_of_forward_s, flash_attention_forward_s
from foreshard.cost.elementwise import stream_s
from foreshard.cost.gemm import gemm_s
from foreshard.cost.tables import ATTENTION, load_tables
from foreshard.errors import SpecError

HEAD = "device,dtype,m,n,k,latency_ms,flag"
RUN = ("predict", "llama3-8b", "1x8xh100-sxm", "--tp", "2", "--engine", "analytical", "--json")


@pytest.fixture
def table(tmp_path):
    """Products of H100 twice as slow as the formula."""
    kernels = kernel_model(resolve_device("h100-sxm"), "bf16", sustained=False)
    lines = [HEAD]
    for m in (256, 8192, 32768):
        for n in (256, 4096, 131072):
            for k in (256, 4096, 131072):
                ms = 2e3 * float(gemm_s(m, n, k, kernels))
                lines.append(f"NVIDIA H100 80GB HBM3,bfloat16,{m},{n},{k},{ms!r},")
    lines.append("NVIDIA H100 80GB HBM3,bfloat16,256,256,256,1e6,a flagged row counts nothing")
    path = tmp_path / "products.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_step_takes_its_products_from_the_table_and_says_how_much(table, shell):
    plain, own = shell(*RUN).json, shell(*RUN, "--costs", str(table)).json
    share = own["cost_sources"]["table"]
    assert 0.5 < share < 1.0 and own["costs"] == "table and formula"
    assert sum(own["cost_sources"].values()) == pytest.approx(1.0)
    # Products take twice as long, everything else as long as before.
    assert own["step_time_s"] * (1 - share / 2) == pytest.approx(plain["step_time_s"], rel=0.1)
    assert any("as measured within the sizes of the table" in line for line in own["assumptions"])
    graph = api.predict("llama3-8b", "1x8xh100-sxm", tp=2, costs=str(table))
    assert graph.step_time_s == pytest.approx(own["step_time_s"], rel=1e-3)


def test_attention_and_streams_of_a_table_are_part_of_its_share(table, shell):
    """Twice as slow as the formula where they are covered: every kernel of the step but the optimizer."""
    products = shell(*RUN, "--costs", str(table)).json
    kernels = kernel_model(resolve_device("h100-sxm"), "bf16", attention="fa3", sustained=False)
    head, *lines = table.read_text(encoding="utf-8").splitlines()
    names = ("op", *ATTENTION, "bytes")
    lines = [f"{line}," + "," * (len(names) - 1) for line in lines]
    for rows in (4, 256):
        for length in (1024, 16384):
            sizes = (1, rows, rows / 4, length, length, 128, 128)
            forward_s = float(flash_attention_forward_s(*sizes, kernels, causal=True))
            for op, seconds in (
                ("attention", forward_s),
                ("attention_backward", float(backward_of_forward_s(np.array(forward_s), kernels))),
            ):
                own = f"{2e3 * seconds!r},,{op},1,{rows},{rows // 4},{length},128,"
                lines.append(f"NVIDIA H100 80GB HBM3,bfloat16,,,,{own}")
    for moved in (2**20, 2**40):
        own = f"{2e3 * float(stream_s(moved, kernels))!r},,stream,,,,,,{moved}"
        lines.append(f"NVIDIA H100 80GB HBM3,bfloat16,,,,{own}")
    table.write_text("\n".join([f"{head},{','.join(names)}", *lines]) + "\n", encoding="utf-8")
    whole = shell(*RUN, "--costs", str(table)).json
    assert whole["cost_sources"]["table"] > products["cost_sources"]["table"] + 0.05
    assert whole["step_time_s"] > products["step_time_s"]
    graph = api.predict("llama3-8b", "1x8xh100-sxm", tp=2, costs=str(table))
    assert graph.step_time_s == pytest.approx(whole["step_time_s"], rel=1e-3)


def test_a_plan_is_priced_as_it_is_predicted(table):
    run = {"global_batch": 32, "seq_len": 4096, "engine": "analytical", "budget_s": 5, "max_tp": 4}
    first = api.plan("llama3-8b", "1x4xh100-sxm", costs=str(table), **run).plans[0]
    again = api.predict("llama3-8b", "1x4xh100-sxm", first.plan, costs=str(table), engine="analytical")
    assert first.prediction.step_time_s == pytest.approx(again.step_time_s, rel=1e-9)
    assert first.prediction.cost_sources["table"] > 0.3


def test_a_device_that_the_table_lacks_says_so(table):
    made = api.predict("llama3-8b", "1x8xa100-sxm-80gb", tp=2, costs=str(table), engine="analytical")
    plain = api.predict("llama3-8b", "1x8xa100-sxm-80gb", tp=2, engine="analytical")
    assert made.step_time_s == plain.step_time_s and made.cost_sources == {"formula": 1.0}
    assert any("no kernel of this step on a100-sxm-80gb" in line for line in made.assumptions)


def test_a_table_that_another_process_reads_gives_the_same(table):
    made = load_tables(str(table))
    other = pickle.loads(pickle.dumps(made))
    size = (1000.0, 1000.0, 1000.0)
    first, second = (one.devices["h100-sxm", "16bit"]["product"].seconds(*size) for one in (made, other))
    assert first == second and np.isfinite(first)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", "device"),
        ("device,m\nh100,1\n", "dtype"),
        (f"{HEAD}\nh100-sxm,bf16,128,128,many,1,\n", "k"),
        (f"{HEAD}\nh100-sxm,bf16,128,128,128,-1,\n", "latency_ms"),
        (f"{HEAD}\nh100-sxm,int4,128,128,128,1,\n", "dtype"),
        (f"{HEAD}\nh100-sxm,bf16,128,128\n", "k"),
        (f"{HEAD},op\nh100-sxm,bf16,128,128,128,1,,conv\n", "op"),
        (f"{HEAD},op\nh100-sxm,bf16,,,,1,,stream\n", "bytes"),
        (f"{HEAD},op,bytes\nh100-sxm,bf16,,,,1,,stream,many\n", "bytes"),
    ],
)
def test_what_is_no_table_of_products_is_refused(text, key, tmp_path, shell):
    path = tmp_path / "products.csv"
    path.write_text(text, encoding="utf-8")
    answer = shell(*RUN, "--costs", str(path))
    assert answer.code == 2 and answer.json["error"]["key"] == key
    assert answer.json["error"]["file"] == str(path)


def test_a_datasheet_takes_no_table(table):
    with pytest.raises(SpecError, match="datasheet"):
        api.predict("llama3-8b", "1x8xh100-sxm", costs=str(table), fidelity="datasheet")
