"""Collectives on systems that no constant has seen: errors by system, closed form and NCCL's own estimate.

    python bench/bench_collective_systems.py [--markdown]

Needs comm_collectives.csv.gz (FORESHARD_MEASURED); `foreshard validate comm_collectives.csv.gz --by-system`
prints the same, with the systems of every reason.
"""

from __future__ import annotations

import argparse

from foreshard.validation.collective_cases import CLOSED_FORM, MODELS
from foreshard.validation.collective_systems import collective_systems
from foreshard.validation.tables import measured_folder


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def cells(scores: dict[str, object]) -> str:
    return f"{percent(scores['median_ape'])} / {percent(scores['p90_ape'])}"  # type: ignore[arg-type]


def line(name: str, nodes: object, models: dict[str, dict[str, object]]) -> str:
    first = models[CLOSED_FORM]
    return f"| {name} | {nodes} | {first['rows']} | {first['skipped']} | " + " | ".join(
        cells(models[model]) for model in MODELS
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print the tables of the document alone")
    parser.parse_args()
    found = collective_systems([measured_folder() / "comm_collectives.csv.gz"])
    print("| system left out | nodes | rows | skipped | closed form, median / p90 % | NCCL's estimate |")
    print("|---|---|---|---|---|---|")
    for one in found["systems"]:
        print(line(one["system"], one["nodes"], one["models"]), "|")
    print(line("all", "", found["pooled"]["models"]), "|")
    print("\n| rows | not scored because | systems |\n|---|---|---|")
    for entry in found["skipped"][CLOSED_FORM]:
        print(f"| {entry['rows']} | {entry['reason']} | {len(entry['systems'])} |")


if __name__ == "__main__":
    main()
