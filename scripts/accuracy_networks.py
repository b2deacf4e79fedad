"""Classic networks against published training speeds; only RegNet's are in a fit (scripts/fit_grouped.py).

What a row says, and which rows others contradict, is in `foreshard.validation.networks`.

    python scripts/accuracy_networks.py [--data FOLDER] [--residuals]

Prints a table for each source and device, and with --residuals writes `data/network_residuals.json`: one log
residual, the median, for each source, network, device, precision and layout. Intervals of traced modules
come from it. Rows without a batch size, of networks or devices without an entry, are counted and left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from foreshard.errors import SpecError
from foreshard.profile.networks.catalog import NETWORKS
from foreshard.validation.collective_cases import reason_of
from foreshard.validation.networks.plausible import contradicted
from foreshard.validation.networks.predicted import predicted, traced_of
from foreshard.validation.networks.run import MEASURED_FRAMEWORK, NetworkRun
from foreshard.validation.networks.tables import run_of
from foreshard.validation.tables import read_table

ROOT = Path(__file__).resolve().parents[1]
RESIDUALS = ROOT / "src/foreshard/catalog/data/network_residuals.json"
TABLES = ("cnn_timm_train.csv", "cnn_nvidia_dle.csv", "cnn_lambda_bench.csv", "cnn_mlperf_training.csv")
TUNED = "MLPerf"
"""Source of runs whose submitters fuse kernels by hand: judged, in no fit and in no interval."""


def rows(folder: Path, skipped: Counter[str], tables: Sequence[str] = TABLES) -> Iterator[NetworkRun]:
    """Yield the runs of networks of the catalog; count the other rows by reason."""
    for name in tables:
        table, runs = read_table(folder / name), []
        for row in table.rows:
            try:
                run = run_of(table.layout, row)
            except SpecError as error:
                skipped[f"{name}: {reason_of(error)}"] += 1
                continue
            if run.nodes > 1 or run.framework != MEASURED_FRAMEWORK:
                skipped[f"{name}: several nodes, or another framework"] += 1
            elif run.network in NETWORKS:
                runs.append(run)
            else:
                skipped[f"{name}: of timm's own code (scripts/accuracy_timm.py)"] += 1
        odd = contradicted(runs)
        for run in runs:
            if run in odd:
                skipped[f"{run.source}: {odd[run]}"] += 1
            else:
                yield run


def residuals(
    folder: Path, skipped: Counter[str]
) -> tuple[dict[tuple[Any, ...], list[float]], frozenset[str]]:
    """Return the log residuals of every case and number of devices, and the networks that read images."""
    found: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    images = set()
    for row in rows(folder, skipped):
        try:
            step_s = predicted(row).step_time_s
        except SpecError as error:
            skipped[f"{row.source}: {error.what}"] += 1
            continue
        found[(*row.case, row.num_devices)].append(math.log(row.step_s / step_s))
        if traced_of(row).reads_images:
            images.add(row.network)
    return found, frozenset(images)


def table(found: dict[tuple[Any, ...], list[float]], columns: Mapping[str, int]) -> str:
    """Return the errors by some parts of a case, name to place, as Markdown."""
    groups: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for key, values in found.items():
        groups[tuple(key[place] for place in columns.values())] += [math.expm1(value) for value in values]
    lines = [f"| {' | '.join(columns)} | rows | median | p90 | bias |", f"{'|---' * (len(columns) + 4)}|"]
    for key, errors in sorted(groups.items()):
        sizes = sorted(map(abs, errors))
        p90 = sizes[math.ceil(0.9 * len(sizes)) - 1]
        values = f"{median(sizes):.1%} | {p90:.1%} | {median(errors):+.1%}"
        lines.append(f"| {' | '.join(key)} | {len(errors)} | {values} |")
    return "\n".join(lines)


def scaling(found: dict[tuple[Any, ...], list[float]], by: int = 0) -> str:
    """Return the errors of scaling efficiency, speed on N devices over N times that on one, as Markdown.

    `by` is the part of a case that errors are grouped by.
    """
    errors: dict[str, list[float]] = defaultdict(list)
    for (*case, num_devices), values in found.items():
        alone = found.get((*case, 1))
        if num_devices > 1 and alone:
            errors[case[by]].append(math.expm1(median(values) - median(alone)))
    lines = [
        f"| {('source', 'network')[by]} | cases of several devices | median | bias |",
        "|---|---|---|---|",
    ]
    errors["all"] = [error for values in errors.values() for error in values]
    for source, values in sorted(errors.items()):
        sizes = f"{median(map(abs, values)):.1%} | {median(values):+.1%}"
        lines.append(f"| {source} | {len(values)} | {sizes} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table; write the residuals where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = os.environ.get("FORESHARD_MEASURED", str(ROOT.parent / "shared/measured/dev"))
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--residuals", action="store_true")
    asked = parser.parse_args()
    skipped: Counter[str] = Counter()
    every, images = residuals(asked.data, skipped)
    tuned = {key: every.pop(key) for key in list(every) if key[0] == TUNED}
    found = {key: values for key, values in every.items() if key[0] == "timm" or key[1] == "resnet50"}
    others = {key: values for key, values in every.items() if key not in found}
    print(table(found, {"source": 0, "device": 2, "precision": 3, "layout": 4}))
    print("\nScaling efficiency:\n")
    print(scaling(found))
    print("\nNetworks that no fit and no interval has seen, on one device:\n")
    alone = {key: values for key, values in others.items() if key[-1] == 1}
    print(table(alone, {"source": 0, "network": 1, "precision": 3}))
    print()
    print(table(alone, {"device": 2, "precision": 3}))
    print("\nScaling efficiency:\n")
    print(scaling(others, by=1))
    print("\nSubmissions whose kernels were fused by hand:\n")
    print(table(tuned, {"source": 0, "network": 1, "device": 2}))
    print("\nLeft out:", "; ".join(f"{reason}: {count}" for reason, count in sorted(skipped.items())))
    if asked.residuals:
        cases = [
            {
                "case": list(key[:-1]),
                "devices": key[-1],
                "images": key[1] in images,
                "residual": round(median(values), 6),
            }
            for key, values in sorted(every.items())
        ]
        source = "scripts/accuracy_networks.py --residuals; log(predicted / measured samples per second)"
        RESIDUALS.write_text(
            json.dumps({"source": source, "cases": cases}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
