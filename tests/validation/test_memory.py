"""Predicted peaks against published ones; skipped without the measured tables."""

from __future__ import annotations

from functools import cache
from statistics import median

import pytest

from foreshard.predict.batch import Case
from foreshard.predict.memory import plan_memory
from foreshard.profile.rows import read_training_rows
from foreshard.profile.tables import measured_folder

ALLOCATED, CACHED, PEAK = "allocated", "cached", "peak"


@cache
def rows_of(table: str):
    path = measured_folder() / f"llm_{table}.csv"
    if not path.exists():
        pytest.skip(f"{path.name} is not here; set FORESHARD_MEASURED")
    return tuple(read_training_rows([path])[0])


def case_of(row) -> Case:
    return Case(model=row.model, cluster=row.cluster, plan=row.plan, framework=row.framework)


def errors(table: str, quantity: str) -> list[float]:
    """Relative errors of the fullest stage, over rows that state memory."""
    out = []
    for row in rows_of(table):
        if row.measured_peak_bytes:
            _, parts = plan_memory(case_of(row))
            out.append(float(getattr(parts, quantity).max()) / row.measured_peak_bytes - 1)
    return out


def test_allocated_bytes_of_megatron_core_on_b200():
    """SimuMax B200 release v1.2: max allocated on the fullest rank, dense, MoE and MLA, 4K to 128K tokens."""
    found = [abs(error) for error in errors("simumax_b200", ALLOCATED)]
    assert len(found) >= 20
    assert median(found) <= 0.01
    assert max(found) <= 0.03


@pytest.mark.parametrize(
    ("table", "quantity", "limit"),
    [
        ("megatronbridge_memory", ALLOCATED, 0.12),
        ("internevo", PEAK, 0.10),
        ("stas_h200_b200", CACHED, 0.10),
    ],
)
def test_other_frameworks(table, quantity, limit):
    """Targets of the sources that do not say what their number counts, or that depend on a recipe."""
    assert median(abs(error) for error in errors(table, quantity)) <= limit


@pytest.mark.parametrize(
    "table", ["llmfoundry", "simumax_b200", "internevo", "nanotron", "megatronbridge_memory"]
)
def test_runs_that_ran_fit(table):
    """At most one in ten of the runs that ran is judged not to fit."""
    rows = [row for row in rows_of(table) if not row.oom]
    fits = [plan_memory(case_of(row))[0].fits for row in rows]
    assert sum(fits) >= 0.9 * len(fits)
