import csv
from types import SimpleNamespace

import pytest

from foreshard.errors import AccuracyError, SpecError
from foreshard.validation.validate import check_mape, validate

HEADER = (
    "collective,library,system,gpu,num_gpus,num_nodes,size_bytes,time_us,algbw_GBps,busbw_GBps,"
    "inter_network\n"
)


def predictor(row):
    if row.raw["tp"] == "8":
        raise SpecError("tp 8 is refused")
    memory = SimpleNamespace(counted=lambda kind: 100.0, fits=row.raw["notes"] == "")
    return SimpleNamespace(
        step_time_s=11.0,
        step_time_interval_s=(10.0, 12.0),
        step_time_intervals_s={0.5: (10.8, 11.2), 0.9: (10.0, 12.0)},
        evidence="fitted",
        memory=memory,
    )


@pytest.fixture
def training(tmp_path, cells):
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(cells))
        writer.writeheader()
        for i, more in enumerate(
            ({}, {"tp": "8", "dp": "1"}, {"notes": "OOM: too big", "metric_step_time_s": ""})
        ):
            writer.writerow(cells | more | {"id": f"megatronbridge-{i}"})
    return path


def test_rows_keep_their_order_and_status(training):
    report = validate([training], predictor=predictor)
    assert [row["status"] for row in report["rows"]] == ["ok", "skipped", "ok"]
    first, refused, oom = report["rows"]
    assert (first["measured_s"], first["predicted_s"], first["interval_s"]) == (10.5, 11.0, [10.0, 12.0])
    assert first["predicted_peak_bytes"] == 100.0
    assert "refused" in refused["reason"]
    assert oom["measured_s"] is None
    overall = report["summary"]["overall"]
    assert overall["feasibility"] == {"tp": 1, "fp": 0, "tn": 0, "fn": 0}
    rests_on = {"rows": 1, "coverage": 1.0, "relative_width_median": pytest.approx(2.0 / 11.0)}
    held = {"by_level": {"0.5": 0.0, "0.9": 1.0}, "by_evidence": {"fitted": rests_on}}
    assert report["summary"]["intervals"] == held
    assert overall["mape"] == pytest.approx(0.5 / 10.5)
    assert overall["mape_all"] == pytest.approx((0.5 / 10.5 + 1.0) / 2)
    check_mape(report, 0.6)
    with pytest.raises(AccuracyError) as caught:
        check_mape(report, 0.5)
    assert caught.value.exit_code == 5


def test_collectives_are_predicted_from_their_inputs(tmp_path):
    path = tmp_path / "c.csv"
    lines = [
        "all_reduce,nccl 2.29,h100_sxm,NVIDIA H100 80GB HBM3,8,1,1073741824,4000,,,",
        "all_reduce,nccl 2.29,h100_sxm,NVIDIA H100 80GB HBM3,8,1,1073741824,,268.4,,",
        "moe_dispatch fp8,nccl,h100_sxm,NVIDIA H100 80GB HBM3,8,1,1024,10,,,",
        "all_reduce,nccl,x,unstated,8,1,1024,10,,,",
    ]
    path.write_text(HEADER + "\n".join(lines) + "\n")
    rows = validate([path], predictor=predictor)["rows"]
    assert [row["status"] for row in rows] == ["ok", "ok", "skipped", "skipped"]
    assert rows[0]["predicted_s"] == rows[1]["predicted_s"]
    assert rows[1]["measured_s"] == pytest.approx(4e-3, rel=1e-3)
    assert 0.5 * 4e-3 < rows[0]["predicted_s"] < 2 * 4e-3
    assert rows[2]["reason"] == "not modelled"
    assert rows[0]["family"] == "h100_sxm"


def test_kernels_are_predicted_and_flags_respected(tmp_path):
    path = tmp_path / "k.csv"
    path.write_text(
        "system,device,framework,dtype,m,n,k,latency_ms,flag\n"
        "h100,NVIDIA H100 80GB HBM3,vllm,bfloat16,8192,8192,8192,1.6,\n"
        "h100,NVIDIA H100 80GB HBM3,vllm,bfloat16,8192,8192,8192,1.0,>90% of datasheet peak\n"
        "h100,NVIDIA H100 80GB HBM3,vllm,fp8_block,8192,8192,8192,1.0,\n"
    )
    rows = validate([path], predictor=predictor)["rows"]
    assert [row["status"] for row in rows] == ["ok", "skipped", "skipped"]
    assert rows[0]["predicted_s"] == pytest.approx(1.6e-3, rel=0.25)


def test_kernels_without_a_model_say_so(tmp_path):
    path = tmp_path / "peaks.csv"
    path.write_text("accelerator,dtype,mamf_tflops\nH100,bf16,794\n")
    report = validate([path], predictor=predictor)
    assert (report["rows"][0]["status"], report["rows"][0]["reason"]) == ("skipped", "not modelled")
    assert report["summary"]["overall"]["mape_all"] == 1.0


def test_no_file_is_bad_input():
    with pytest.raises(SpecError):
        validate([], predictor=predictor)
