"""Residuals of collectives by systems left out of the fit: python scripts/fit_comm_intervals.py.

Writes ``src/foreshard/catalog/data/collective_residuals.json`` after ``scripts/fit_comm.py``, whose constants
without a system it takes; ``--check`` compares instead. Prints how often intervals hold on every system by
the residuals of the others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from accuracy_rows import markdown
from fit_comm import SYSTEMS

from foreshard.catalog.shipped import shipped
from foreshard.comm.intervals import BANDS, LEVELS, band_of, collective_intervals
from foreshard.validation.collective_cases import OWN, collective_cases
from foreshard.validation.collective_systems import LEAST_BYTES, MOST_BYTES
from foreshard.validation.tables import measured_folder, read_table

TABLE = Path(__file__).resolve().parents[1] / "src/foreshard/catalog/data/collective_residuals.json"
FILES = ("comm_collectives.csv.gz", "comm_vtrain_allreduce_a100.csv.gz", "comm_sailor_profiles.csv.gz")
POINTS = 41
"""Quantiles that stand for the residuals of a system, evenly spaced."""
LEAST_ROWS = 5
Residuals = dict[str, dict[str, dict[str, list[float]]]]


def evidence_of(system: str, num_nodes: int) -> str:
    """Return what a system rests on when it is left out: others of its generation, or none."""
    if num_nodes > 1:
        return "network"
    own = SYSTEMS[system]
    others = [
        name
        for name, other in SYSTEMS.items()
        if other.fitted and name != system and other.generation == own.generation
    ]
    return "fitted" if others else "unseen"


def measured() -> dict[tuple[str, str], dict[str, list[float]]]:
    """Return residuals of each (evidence, system) by band, without rows that measure the host's loop."""
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name in FILES:
        table = read_table(str(measured_folder() / name))
        cases = collective_cases(table, exclude=OWN)
        for row, family, case in zip(table.rows, table.families, cases, strict=True):
            sailor = "data_size_mb" in row
            size = float(row["data_size_mb"]) * 1e6 if sailor else float(row["size_bytes"] or 0.0)
            system, nodes = f"sailor {family}" if sailor else family, int(float(row.get("num_nodes") or 1))
            if case.predicted_s is None or not case.measured_s or not LEAST_BYTES <= size <= MOST_BYTES:
                continue
            known = SYSTEMS.get(system)
            ranks = int(float(row["num_gpus"]))
            if nodes == 1 and (known is None or size < known.min_bytes or ranks < known.min_ranks):
                continue
            if sailor and row["collective"] not in ("all_reduce", "all_to_all"):
                continue  # lists of tensors are copied once more
            residual = abs(float(np.log(case.measured_s / case.predicted_s)))
            found[evidence_of(system, nodes), family][band_of(size)].append(residual)
    return found


def residuals() -> Residuals:
    """Return quantiles of residuals by evidence, system and band."""
    classes: Residuals = {"fitted": {}, "unseen": {}, "network": {}}
    at = (np.arange(POINTS) + 0.5) / POINTS
    for (evidence, system), bands in sorted(measured().items()):
        kept = {
            band: [round(float(value), 4) for value in np.quantile(bands[band], at)]
            for band, _ in BANDS
            if len(bands.get(band, ())) >= LEAST_ROWS
        }
        if kept:
            classes[evidence][system] = kept
    return classes


def coverage() -> None:
    """Print the share of rows inside the intervals by the residuals of all other systems."""
    lines, totals = [], defaultdict(list)
    for (evidence, system), bands in sorted(measured().items()):
        inside: dict[float, list[bool]] = {level: [] for level in LEVELS}
        for band, values in bands.items():
            size = {"small": 2.0**19, "middle": 2.0**22, "large": 2.0**28}[band]
            ends = collective_intervals(1.0, size, evidence, exclude=system)
            for level, (_, high) in ends.items():
                inside[level] += [value <= np.log(high) for value in values]
        shares = [100.0 * float(np.mean(inside[level])) for level in LEVELS]
        totals[evidence].append(shares)
        lines.append((evidence, system, len(inside[0.9]), *(f"{share:.0f}" for share in shares)))
    for evidence, rows in totals.items():
        means = np.mean(rows, axis=0)
        lines.append((evidence, "mean of systems", "", *(f"{share:.0f}" for share in means)))
    header = ("evidence", "system left out", "rows", *(f"{level:.0%}" for level in LEVELS))
    print("\n".join(markdown(header, lines)))


def _near(values: list[float], known: list[float] | None) -> bool:
    return known is not None and np.allclose(values, known, atol=2e-3)


def main() -> None:
    """Write the residuals, or compare them with those that ship."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    made = {"source": "scripts/fit_comm_intervals.py", "classes": residuals()}
    if parser.parse_args().check:
        known = json.loads(TABLE.read_text(encoding="utf-8"))
        off = [
            (evidence, system)
            for evidence, systems in made["classes"].items()
            for system, bands in systems.items()
            for band, values in bands.items()
            if not _near(values, known["classes"].get(evidence, {}).get(system, {}).get(band))
        ]
        sys.exit(f"differs: {off}" if off else 0)
    TABLE.write_text(json.dumps(made, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
    shipped.cache_clear()
    coverage()


if __name__ == "__main__":
    main()
