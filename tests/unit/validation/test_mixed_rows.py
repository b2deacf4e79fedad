import pytest

from foreshard.validation.mixed_rows import mixed_rows
from foreshard.validation.tables import read_table
from foreshard.validation.validate import validate

SAILOR = (
    "cluster,model,gpu_mix,num_gpus,pp_stages,dp_per_stage,tp_per_stage,layers_per_stage,micro_batch,global_batch,"
    "measured_iter_s,measured_max_mem_bytes\n"
    "MIT,OPT-350,16xRTX-2080+8xRTX-3090+8xTitan-RTX,32,"
    '[2],"[[2, 2]]","[[[8, 8], [8, 8]]]","[[12, 14]]",2,288,66.0,{}\n'
)
AMP = (
    "experiment,model,cluster,num_gpus,global_batch,micro_batch,tp,dp,pp,partition,predicted_s,measured_s\n"
    'het_cluster,gpt2 24L h1024 s1024 v52256,c,16,32,2,1,8,2,"[0, 14, 30]",1.2,{}\n'
    'homogeneous,gpt2 24L h1024 s1024 v52256,c,16,32,2,1,8,2,"[0, 14, 30]",1.2,inf\n'
    'het_model,TransGAN,c,16,64,1,1,16,1,"[0, 56]",1.2,2.0\n'
)


def test_sailor_plans_name_their_stages(tmp_path):
    path = tmp_path / "s.csv"
    path.write_text(SAILOR.format(6.3e9))
    (row,), skipped = mixed_rows(read_table(path))
    assert not skipped
    stages = row.plan.groups[0].stages
    assert [stage.layers for stage in stages] == [((0, 12),), ((12, 26),)]
    assert [(len(stage.ranks), stage.tp, stage.inner_dp) for stage in stages] == [(16, 8, 2), (16, 8, 2)]
    assert [group.device.name for group in row.cluster.nodes] == ["rtx-2080", "rtx-3090", "titan-rtx"]
    assert row.plan.groups[0].micro_batch == 4
    assert (row.measured_s, row.measured_peak_bytes, row.family) == (66.0, 6.3e9, "s")


def test_amp_partitions_count_entries_before_the_blocks(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(AMP.format(3.0))
    rows, skipped = mixed_rows(read_table(path))
    mixed, failed = rows
    assert [stage.layers for stage in mixed.plan.groups[0].stages] == [((0, 12),), ((12, 26),)]
    assert [(g.device.name, g.nic_bytes_per_s) for g in mixed.cluster.nodes] == [
        ("v100-sxm-16gb", 10e9 / 8),
        ("t4", 50e9 / 8),
    ]
    assert mixed.plan.groups[0].stages[0].recompute == "none" and mixed.plan.collectives == "ring"
    assert (mixed.framework.label, mixed.framework.softmax) == ("megatron-deepspeed@2020", "wide")
    assert mixed.plan.overrides.grad_reduce_bytes == 4
    assert (failed.measured_s, failed.remark) == (None, "failed trial, cause unknown")
    assert [row.reason for row in skipped] == ["not modelled"]
    assert skipped[0].measured_s == 2.0


def test_a_failed_trial_is_listed_but_not_scored(tmp_path):
    from types import SimpleNamespace

    def predictor(row):
        memory = SimpleNamespace(counted=lambda kind: 1.0, fits=False)
        return SimpleNamespace(
            step_time_s=3.3,
            step_time_interval_s=(3.0, 4.0),
            step_time_intervals_s={},
            evidence="fitted",
            memory=memory,
        )

    path = tmp_path / "a.csv"
    path.write_text(AMP.format(3.0))
    report = validate([path], predictor=predictor)
    assert report["rows"][1]["reason"] == "failed trial, cause unknown"
    overall = report["summary"]["overall"]
    assert overall["mape"] == pytest.approx(0.1)
    assert overall["mape_all"] == pytest.approx(0.55)
    assert sum(overall["feasibility"].values()) == 0


def test_a_cell_that_does_not_parse_is_skipped_with_a_reason(tmp_path):
    path = tmp_path / "s.csv"
    path.write_text(SAILOR.format(1).replace('"[[12, 14]]"', '"[[12, 14"'))
    rows, skipped = mixed_rows(read_table(path))
    assert not rows
    assert "does not parse" in skipped[0].reason
