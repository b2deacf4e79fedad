"""How well collectives are predicted on systems that no constant has seen, by system and by model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreshard.errors import SpecError
from foreshard.validation.collective_cases import MODELS, OWN, TimedCase, collective_cases
from foreshard.validation.facts import integer, number
from foreshard.validation.scoring import RowOutcome, summarise
from foreshard.validation.tables import COLLECTIVE, MeasuredTable, read_table
from foreshard.validation.validate import case_outcomes

_SHOWN = ("rows", "skipped", "median_ape", "p90_ape", "bias", "coverage")
LEAST_BYTES, MOST_BYTES = 2**10, 2**34
OUTSIDE = "smaller than 1 KiB or larger than 16 GiB"


def collective_systems(files: Iterable[str | Path]) -> dict[str, Any]:
    """Return the errors of every system with the constants fitted without it, and of all together.

    A model's scores are those of `scoring.summarise`: rows with identical inputs count once, as their
    medians. Rows of more than one node are marked by the largest number of nodes of their system. NCCL's
    estimate has no constant that was fitted to these rows.

    Raises
    ------
    SpecError
        A file is no table of collectives.
    """
    tables = [_collectives(path) for path in files]
    outcomes = {model: [one for table in tables for one in _outcomes(table, model)] for model in MODELS}
    families = sorted({one.family for rows in outcomes.values() for one in rows})
    nodes = _nodes(tables)
    systems = [{"system": family, "nodes": nodes[family]} | _scores(outcomes, family) for family in families]
    return {
        "systems": systems,
        "pooled": _scores(outcomes, None),
        "skipped": {model: _reasons(rows) for model, rows in outcomes.items()},
    }


def _collectives(path: str | Path) -> MeasuredTable:
    table = read_table(path)
    if table.kind != COLLECTIVE:
        rule = "Only collectives are scored by system"
        fix = "Give comm_collectives or a table with its columns"
        raise SpecError("not a table of collectives", file=str(path), key="--by-system", rule=rule, fix=fix)
    return table


def _outcomes(table: MeasuredTable, model: str) -> list[RowOutcome]:
    cases = collective_cases(table, exclude=OWN, model=model)
    kept = [_within(case, row) for row, case in zip(table.rows, cases, strict=True)]
    return case_outcomes(table, kept, 0.0)


def _within(case: TimedCase, row: Mapping[str, str]) -> TimedCase:
    """Return the case, skipped when its size lies outside what is scored."""
    if case.reason:
        return case
    num_bytes = number(row, "size_bytes") or 0.0
    if not num_bytes or LEAST_BYTES <= num_bytes <= MOST_BYTES:
        return case
    return replace(case, predicted_s=None, reason=OUTSIDE)


def _nodes(tables: Sequence[MeasuredTable]) -> dict[str, int]:
    """Return the largest number of nodes of each system."""
    found: dict[str, int] = {}
    for table in tables:
        for row, family in zip(table.rows, table.families, strict=True):
            found[family] = max(found.get(family, 1), _num_nodes(row))
    return found


def _num_nodes(row: Mapping[str, str]) -> int:
    try:
        return integer(row, "num_nodes") or 1
    except SpecError:  # the row is skipped for it
        return 1


def _scores(outcomes: dict[str, list[RowOutcome]], family: str | None) -> dict[str, Any]:
    """Return the scores of one system (None: of all) by model."""
    made = {}
    for model, rows in outcomes.items():
        mine = [one for one in rows if family in (None, one.family)]
        summary = summarise(mine)
        made[model] = {
            key: summary[key] for key in ("rows", "skipped", "median_ape", "p90_ape", "bias", "coverage")
        }
    return {"models": made}


def _reasons(outcomes: Sequence[RowOutcome]) -> list[dict[str, Any]]:
    """Return why rows are skipped, with how many and of which systems."""
    skipped = [one for one in outcomes if one.status == "skipped"]
    counts = Counter(one.reason for one in skipped)
    return [
        {
            "reason": reason,
            "rows": count,
            "systems": sorted({one.family for one in skipped if one.reason == reason}),
        }
        for reason, count in counts.most_common()
    ]
