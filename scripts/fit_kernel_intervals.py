"""Residuals of measured kernels: python scripts/fit_kernel_intervals.py.

Writes ``src/foreshard/catalog/data/kernel_residuals.json`` after ``scripts/fit_kernels.py``; ``--check``
compares instead. Prints how often intervals hold on every device by the residuals of the others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from accuracy_rows import markdown

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.learned import fitted_devices
from foreshard.catalog.shipped import shipped
from foreshard.validation.kernels.cases import kernel_cases
from foreshard.validation.kernels.intervals import LEVELS, kernel_group, kernel_half_widths
from foreshard.validation.tables import measured_folder, read_table, table_rules

TABLE = Path(__file__).resolve().parents[1] / "src/foreshard/catalog/data/kernel_residuals.json"
POINTS = 41
"""Quantiles that stand for the residuals of a device, evenly spaced."""
LEAST_ROWS = 20
Residuals = dict[str, dict[str, list[float]]]


@cache
def name_of(device: str) -> str:
    return resolve_device(device.replace("_", " ").replace("NV ", "")).name


def measured() -> dict[str, dict[str, list[float]]]:
    """Return the residuals of each group of kernels by device of which kernels were fitted."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(measured_folder().glob("kernel_*.csv*")):
        table = read_table(str(path))
        rules = table_rules()["kernels"].get(table.layout)
        if rules is None:
            continue
        for row, case in zip(table.rows, kernel_cases(table), strict=True):
            if case.predicted_s is None or not case.measured_s:
                continue
            device = name_of(row["device"])
            if device in fitted_devices():
                group = kernel_group(table.layout, {key: row[key] for key in rules["shared"]})
                found[group][device].append(abs(float(np.log(case.measured_s / case.predicted_s))))
    return found


def residuals(rows: dict[str, dict[str, list[float]]]) -> Residuals:
    """Return quantiles of residuals by group and device."""
    at = (np.arange(POINTS) + 0.5) / POINTS
    return {
        group: {
            device: [round(float(value), 4) for value in np.quantile(values, at)]
            for device, values in sorted(devices.items())
            if len(values) >= LEAST_ROWS
        }
        for group, devices in sorted(rows.items())
    }


def coverage(rows: dict[str, dict[str, list[float]]]) -> None:
    """Print the share of rows inside the intervals by the residuals of all other devices."""
    lines: list[tuple[Any, ...]] = []
    every = []
    for group, devices in sorted(rows.items()):
        shares, count = [], 0
        for device, values in devices.items():
            halves = kernel_half_widths(group, device)
            if halves:
                shares.append([100.0 * float(np.mean(np.array(values) <= half)) for half in halves.values()])
                count += len(values)
        if shares:
            every += shares
            means = np.mean(shares, axis=0)
            lines.append((group, len(shares), count, *(f"{share:.0f}" for share in means)))
    lines.append(("all", len(every), "", *(f"{share:.0f}" for share in np.mean(every, axis=0))))
    header = ("kernels", "devices", "rows", *(f"{level:.0%}" for level in LEVELS))
    print("\n".join(markdown(header, lines)))


def main() -> None:
    """Write the residuals, or compare them with those that ship."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check, rows = parser.parse_args().check, measured()
    made = {"source": "scripts/fit_kernel_intervals.py", "groups": residuals(rows)}
    if check:
        known = json.loads(TABLE.read_text(encoding="utf-8"))["groups"]
        off = [
            (group, device)
            for group, devices in made["groups"].items()
            for device, values in devices.items()
            if not np.allclose(values, known.get(group, {}).get(device, [0.0]), atol=2e-3)
        ]
        sys.exit(f"differs: {off}" if off else 0)
    TABLE.write_text(json.dumps(made, separators=(",", ":")) + "\n", encoding="utf-8")
    shipped.cache_clear()
    coverage(rows)


if __name__ == "__main__":
    main()
