"""A bad cell costs its own row, and spelling costs none."""

from types import SimpleNamespace

import pytest

from foreshard.validation.collective_cases import collective_cases
from foreshard.validation.kernels.cases import kernel_cases
from foreshard.validation.mixed_rows import mixed_rows
from foreshard.validation.row_cuts import virtual_stages
from foreshard.validation.tables import read_table

GEMM = "system,framework,device,dtype,m,n,k,latency_ms\n"
COLLECTIVE = "system,collective,gpu,num_gpus,num_nodes,size_bytes,time_us\n"
SAILOR = (
    "model,gpu_mix,pp_stages,dp_per_stage,tp_per_stage,layers_per_stage,global_batch,micro_batch,"
    "measured_iter_s\n"
)


def table(tmp_path, text):
    path = tmp_path / "some.csv"
    path.write_text(text, encoding="utf-8")
    return read_table(path)


def test_one_product_without_a_size_does_not_hide_the_others(tmp_path):
    rows = ["4096,4096,4096,0.3", "n/a,4096,4096,0.3", "4096,,4096,0.3", "8192,4096,4096,0.6", "nan,1,1,1"]
    text = GEMM + "".join(f"h100,trtllm,H100-SXM-80GB,BF16,{row}\n" for row in rows)
    cases = kernel_cases(table(tmp_path, text))
    assert [case.reason is None for case in cases] == [True, False, False, True, False]
    assert cases[3].predicted_s == pytest.approx(2 * cases[0].predicted_s, rel=0.2)
    assert "m is not a number" in cases[1].reason and "n is not a number" in cases[2].reason


def test_collectives_by_any_spelling_and_no_time_for_less_than_a_byte(tmp_path):
    rows = ["all_reduce,8,1,1048576", "ALL-REDUCE,8,1,1048576", "AllReduce,8,1,1048576", "all_reduce,8,1,-5"]
    text = COLLECTIVE + "".join("h100,{},H100-SXM,{},{},{},50\n".format(*row.split(",")) for row in rows)
    cases = collective_cases(table(tmp_path, text))
    assert cases[0].predicted_s == cases[1].predicted_s == cases[2].predicted_s > 0
    assert cases[3].reason == "size or number of devices not stated"


def test_a_mixed_run_without_devices_is_skipped_by_name(tmp_path):
    line = 'OPT-350,{},1,"[[2]]","[[[1,1]]]","[[26]]",{},2,1.5\n'
    text = SAILOR + line.format("2XRTX-3090", 8) + line.format("", 8) + line.format("2xRTX-3090", "")
    rows, skipped = mixed_rows(table(tmp_path, text))
    assert [row.id for row in rows] == ["some-1"]
    assert [row.reason for row in skipped] == ["no devices are stated", "a plan without devices or samples"]


def test_unstated_virtual_stages_divide_the_blocks_or_are_one():
    for blocks in range(1, 60):
        for pp in range(2, 12):
            row = SimpleNamespace(whole=lambda key: None, name="sc21", note=lambda *lines: None)
            vpp = virtual_stages(row, blocks, pp)
            assert vpp == 1 or blocks % (pp * vpp) == 0
