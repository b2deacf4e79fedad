"""Predicted peaks against published ones, through the rows as they are read; skipped without the tables."""

from __future__ import annotations

from functools import cache
from statistics import median

import pytest

from foreshard.predict.batch import PlannedRun
from foreshard.predict.memory import plan_memory
from foreshard.spec.prediction import Memory
from foreshard.validation.rows import TrainingRow, table_rows
from foreshard.validation.tables import measured_folder, read_table

TABLES = (
    "simumax_b200",
    "megatronbridge_memory",
    "bigscience",
    "internevo",
    "nanotron",
    "stas_h200_b200",
    "misc_fsdp",
)
ALLOCATED_LIMIT, OTHER_LIMIT, WRONG_LIMIT = 0.03, 0.10, 0.10


@cache
def cases_of(table: str) -> tuple[tuple[TrainingRow, Memory], ...]:
    """Rows of a table with what is predicted for them."""
    path = measured_folder() / f"llm_{table}.csv"
    if not path.exists():
        pytest.skip(f"{path.name} is not here; set FORESHARD_MEASURED")
    rows = table_rows(read_table(path))[0]
    cases = [PlannedRun(model=r.model, cluster=r.cluster, plan=r.plan, framework=r.framework) for r in rows]
    return tuple((row, plan_memory(case)[0]) for row, case in zip(rows, cases, strict=True))


def error(row: TrainingRow, memory: Memory) -> float:
    """Relative error of the quantity the source reports."""
    assert row.measured_peak_bytes is not None
    return abs(memory.counted(row.memory_kind) / row.measured_peak_bytes - 1)


def errors(*tables: str, allocated: bool | None = None) -> list[float]:
    """Errors of the rows that state memory; of those that count allocated bytes, or of the others."""
    return [
        error(row, memory)
        for table in tables
        for row, memory in cases_of(table)
        if row.measured_peak_bytes and allocated in (None, row.memory_kind == "allocated")
    ]


def test_where_allocated_bytes_are_reported():
    found = errors(*TABLES, allocated=True)
    assert len(found) >= 35
    assert median(found) <= ALLOCATED_LIMIT


def test_elsewhere():
    found = errors(*TABLES, allocated=False)
    assert len(found) >= 60
    assert median(found) <= OTHER_LIMIT


def test_allocated_bytes_of_megatron_core_on_b200():
    """SimuMax B200 release v1.2: max allocated on the fullest rank, dense, MoE and MLA, 4K to 128K tokens."""
    found = errors("simumax_b200")
    assert len(found) >= 20
    assert median(found) <= 0.01
    assert max(found) <= 0.03


@pytest.mark.parametrize("table", ["bigscience", "internevo", "nanotron", "stas_h200_b200"])
def test_every_other_source(table):
    assert median(errors(table)) <= OTHER_LIMIT


def test_megatron_bridge():
    """Moonlight 1.7 to 3.7 %; 70B in 8 bit 8 to 12 %: recomputing the MLP frees less than predicted."""
    assert median(errors("megatronbridge_memory")) <= 0.07
    assert max(errors("megatronbridge_memory")) <= 0.13


def test_runs_that_state_memory_fit():
    fits = [m.fits for table in TABLES for row, m in cases_of(table) if row.measured_peak_bytes]
    assert fits.count(False) <= WRONG_LIMIT * len(fits)


def test_runs_that_did_not_fit():
    """One of six is missed: 206B on 384 A100, 23 % below the device although smaller runs match."""
    wrong = [row.id for row, memory in cases_of("bigscience") if row.oom and memory.fits]
    assert wrong == ["bigscience-0117"]


@pytest.mark.parametrize(
    ("table", "limit"),
    [("llmfoundry", 0.0), ("mlperf", 0.02), ("maxtext_tpu", 0.04), ("megatronbridge", 0.02), ("dgxc", 0.10)],
)
def test_runs_without_stated_memory_ran(table, limit):
    """They are evidence too: at most this share is judged not to fit.

    Two of MLPerf: PAX without its degrees, and GPT-3 with three samples a Trillium, 1.6 % above its memory.
    """
    fits = [memory.fits for row, memory in cases_of(table) if not row.oom]
    assert fits.count(False) <= limit * len(fits)
