"""How well the law of batch sizes gives published numbers of samples to a target, each batch left out.

    python bench/bench_targets.py [--markdown]

For each task of the catalog: the two constants, the error of the law at its own points, and at each batch
when the law is fitted to the others.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from foreshard.catalog.shipped import shipped
from foreshard.catalog.targets import TargetFile, curve_of
from foreshard.spec.codec import decode

COLUMNS = (
    "task",
    "batches",
    "min samples",
    "critical batch",
    "error at its points",
    "left out: median",
    "worst",
)


def row(task: str) -> tuple[str, ...]:
    """Return the cells of one task."""
    entry = decode(TargetFile, shipped("targets.toml")[task])
    curve = curve_of(entry, name=task)
    errors = []
    for i, point in enumerate(entry.points):
        others = replace(entry, points=(*entry.points[:i], *entry.points[i + 1 :]))
        errors.append(abs(curve_of(others, name=task).samples(point.batch) / float(point.samples or 0) - 1))
    low, high = curve.batches
    return (
        f"`{task}`",
        f"{len(entry.points)}, {low:,.0f} to {high:,.0f}",
        f"{curve.min_samples:.3g}",
        f"{curve.critical_batch:,.0f}",
        f"{curve.worst_error or 0:.1%}",
        f"{sorted(errors)[len(errors) // 2]:.1%}",
        f"{max(errors):.1%}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="a table for the documentation")
    edge = "| " if parser.parse_args().markdown else ""
    rows = [COLUMNS, *([("---",) * len(COLUMNS)] if edge else []), *map(row, shipped("targets.toml"))]
    for cells in rows:
        print(edge + " | ".join(cells) + (" |" if edge else ""))


if __name__ == "__main__":
    main()
