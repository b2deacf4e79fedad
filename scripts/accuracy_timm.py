"""Networks of timm's training benchmark that are made by timm's own code: none is in a fit.

    pip install timm
    python scripts/accuracy_timm.py [--data FOLDER] [--every N] [--first K]

Prints for each network and layout the error of a step, then by layout the median, the 90th percentile, the
bias and how many lie in the interval of 90 %. A network is taken at the largest batch that was measured on a
side, the median over versions of PyTorch.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from accuracy_networks import ROOT

from foreshard.errors import SpecError
from foreshard.profile.networks.timm_models import PREFIX
from foreshard.validation.networks.predicted import predicted
from foreshard.validation.networks.run import NetworkRun
from foreshard.validation.networks.tables import run_of
from foreshard.validation.tables import read_table


def measured(folder: Path) -> dict[str, list[list[NetworkRun]]]:
    """Return the runs at the largest batch of each network, side and layout, by network."""
    found: dict[str, dict[tuple[int | None, str], list[NetworkRun]]] = defaultdict(lambda: defaultdict(list))
    table = read_table(folder / "cnn_timm_train.csv")
    for row in table.rows:
        run = run_of(table.layout, row)
        if run.network.startswith(PREFIX):
            found[run.network][run.side, run.layout].append(run)
    return {name: [_largest(runs) for runs in cases.values()] for name, cases in found.items()}


def _largest(runs: list[NetworkRun]) -> list[NetworkRun]:
    most = max(run.batch for run in runs)
    return [run for run in runs if run.batch == most]


def errors(asked: argparse.Namespace, skipped: Counter[str]) -> Iterator[tuple[NetworkRun, float, bool]]:
    """Yield runs with the error of their step and whether it lies in the interval; count the others."""
    for _, cases in sorted(measured(asked.data).items())[asked.first :: asked.every]:
        for runs in cases:
            try:
                made = predicted(runs[0])
            except SpecError as error:
                skipped[error.what] += 1
                continue
            took_s = median(run.step_s for run in runs)
            low, high = made.step_time_interval_s
            yield runs[0], made.step_time_s / took_s - 1.0, low <= took_s <= high


def main() -> None:
    """Print the errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = os.environ.get("FORESHARD_MEASURED", str(ROOT.parent / "shared/measured/dev"))
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--every", type=int, default=1, help="only each so many networks")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    asked = parser.parse_args()
    skipped: Counter[str] = Counter()
    by_layout: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for run, error, inside in errors(asked, skipped):
        by_layout[run.layout].append((error, inside))
        by_layout["all"].append((error, inside))
        print(f"{run.network:44} {run.side} {run.layout} {error:+.1%}", flush=True)
    for layout, found in sorted(by_layout.items()):
        sizes = sorted(abs(error) for error, _ in found)
        p90, bias = sizes[math.ceil(0.9 * len(sizes)) - 1], median(error for error, _ in found)
        covered = sum(inside for _, inside in found) / len(found)
        shown = f"median {median(sizes):.1%}, p90 {p90:.1%}, bias {bias:+.1%}, inside {covered:.0%}"
        print(f"{layout}: {len(sizes)} cases, {shown}")
    print("Left out:", "; ".join(f"{reason}: {count}" for reason, count in skipped.most_common()))


if __name__ == "__main__":
    main()
