"""What reading the published tables must keep: nothing of quality A is lost, every blank is declared."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from foreshard.spec.plan import check_recompute
from foreshard.validation.rows import table_rows
from foreshard.validation.tables import measured_folder, read_table

SEALED = "llm_torchtitan_2024.csv"  # opened once, at the very end
FOLDER = Path(__file__).resolve().parents[2] / measured_folder()


def files():
    folder = FOLDER if FOLDER.is_dir() else Path(measured_folder())
    return sorted(path for path in folder.glob("llm_*.csv*") if path.name != SEALED)


@pytest.fixture(scope="module")
def read():
    if not files():
        pytest.skip("the folder of published measurements is not here (FORESHARD_MEASURED)")
    rows, skipped = zip(*(table_rows(read_table(path)) for path in files()), strict=True)
    return [row for some in rows for row in some], [row for some in skipped for row in some]


def test_no_row_of_quality_a_that_states_dimensions_and_degrees_is_skipped(read):
    _, skipped = read
    stated = {
        raw["id"]
        for path in files()
        for raw in read_table(path).rows
        if raw["quality"] == "A" and raw["n_layers"] and raw["hidden"] and raw["tp"] and raw["pp"]
    }
    assert not stated & {row.id for row in skipped if "hybrid" not in row.reason}


def test_every_plan_covers_its_layers_devices_and_samples(read):
    for row in read[0]:
        group = row.plan.groups[0]
        spans = sorted(span for stage in group.stages for span in stage.layers)
        assert spans[0][0] == 0 and spans[-1][1] == row.model.num_layers + 2, row.id
        assert all(a[1] == b[0] for a, b in pairwise(spans)), row.id
        assert sorted(row.plan.ranks) == list(range(row.cluster.num_devices)), row.id
        assert sum(g.share for g in row.plan.groups) == row.plan.global_batch, row.id
        for stage in group.stages:
            assert (stage.tp * stage.cp * stage.inner_dp) % (stage.ep * stage.etp) == 0, row.id
            assert check_recompute(stage.recompute) == stage.recompute


def test_measured_times_agree_with_stated_tokens_per_second(read):
    """Step time, tokens/s and batch of a row are one fact written twice."""
    for row in read[0]:
        rate = row.raw["metric_tokens_per_s_per_gpu"]
        if row.measured_s and rate:
            again = row.plan.tokens / row.cluster.num_devices / float(rate)
            assert again == pytest.approx(row.measured_s, rel=0.05), row.id


def test_blanks_are_listed(read):
    for row in read[0]:
        text = " ".join(row.assumptions)
        for column, words in (
            ("dtype", "dtype not stated"),
            ("micro_batch", "micro-batch not stated"),
            ("zero_stage_or_fsdp", "sharding not stated"),
            ("act_recompute", "recompute not stated"),
            ("seq_len", "sequence not stated"),
        ):
            assert row.raw[column] or words in text, (row.id, column)


def test_memory_only_and_out_of_memory_rows(read):
    rows = {row.id: row for row in read[0]}
    assert sum(row.oom for row in rows.values()) >= 5
    assert all(row.measured_s is None and row.measured_peak_bytes is None for row in rows.values() if row.oom)
    kinds = Counter((row.family, row.memory_kind) for row in rows.values() if row.measured_peak_bytes)
    assert kinds["simumax_b200", "allocated"] > 20
    assert kinds["stas_h200_b200", "reserved"] >= 5
    assert kinds["bigscience", "device"] > 20  # nvidia-smi shows the context, too


def test_vtrain_groups_for_regret(read):
    groups = Counter(row.rank_key for row in read[0] if row.family == "vtrain_single")
    assert len(groups) == 87
    assert sum(count >= 3 for count in groups.values()) == 82


@pytest.mark.parametrize(
    "name",
    [
        "hw_accelerators.csv",
        "comm_nccl_tuning_constants.csv",
        "hetero_gavel_throughputs.csv.gz",
        "comm_teccl_outputs.csv",
        "hetero_spot_trace_p3.csv",
        "hetero_parcae_intervals.csv.gz",
    ],
)
def test_tables_that_are_not_measurements_are_refused(name):
    from foreshard.errors import SpecError

    folder = files()[0].parent if files() else None
    if folder is None or not (folder / name).exists():
        pytest.skip("the folder of published measurements is not here (FORESHARD_MEASURED)")
    with pytest.raises(SpecError):
        read_table(folder / name)


def test_every_other_table_is_known():
    if not files():
        pytest.skip("the folder of published measurements is not here (FORESHARD_MEASURED)")
    refused = {
        "hw_",
        "comm_nccl",
        "comm_rccl",
        "comm_teccl",
        "comm_sailor_network",
        "hetero_gavel",
        "hetero_spot",
        "hetero_parcae",
    }
    small = [p for p in files()[0].parent.glob("*.csv*") if p.stat().st_size < 300_000 and p.name != SEALED]
    for path in small:
        if not path.name.startswith(tuple(refused)):
            assert read_table(path).rows
