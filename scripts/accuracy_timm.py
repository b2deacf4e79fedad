"""Networks of timm's benchmarks that no fit has seen: trained by its own code, or any forward alone.

    pip install timm
    python scripts/accuracy_timm.py [--data FOLDER] [--every N] [--first K] [--forward-only [--residuals]]

Prints for each network, device and layout the error of a step, then by device and layout the median, the 90th
percentile, the bias and how many lie in the interval of 90 %. A network is taken at the largest batch that
was measured on a side, the median over versions of PyTorch.

With --residuals writes `data/forward_residuals.json`, of which intervals of a forward alone come, and prints
how many lie in an interval of the other devices' residuals.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from accuracy_networks import ROOT

from foreshard.errors import InfeasibleError, SpecError
from foreshard.predict.interval import absolute_bounds
from foreshard.profile.networks.timm_models import PREFIX
from foreshard.validation.networks.predicted import predicted
from foreshard.validation.networks.run import NetworkRun
from foreshard.validation.networks.tables import run_of
from foreshard.validation.tables import read_table

RESIDUALS = ROOT / "src/foreshard/catalog/data/forward_residuals.json"


def measured(folder: Path, forward_only: bool, skipped: Counter[str]) -> dict[str, list[list[NetworkRun]]]:
    """Return the runs at the largest batch of each network, device, side and layout, by network."""
    found: dict[str, dict[tuple[object, ...], list[NetworkRun]]] = defaultdict(lambda: defaultdict(list))
    table = read_table(folder / ("cnn_timm_infer.csv.gz" if forward_only else "cnn_timm_train.csv"))
    for row in table.rows:
        try:
            run = run_of(table.layout, row)
        except SpecError as error:
            skipped[error.what] += 1
            continue
        if forward_only or run.network.startswith(PREFIX):
            found[run.network][run.device, run.side, run.layout].append(run)
    return {name: [_largest(runs) for runs in cases.values()] for name, cases in found.items()}


def _largest(runs: list[NetworkRun]) -> list[NetworkRun]:
    most = max(run.batch for run in runs)
    return [run for run in runs if run.batch == most]


def errors(asked: argparse.Namespace, skipped: Counter[str]) -> Iterator[tuple[NetworkRun, float, bool]]:
    """Yield runs with the log error of their step and whether it lies in the interval; count the others."""
    cases = sorted(measured(asked.data, asked.forward_only, skipped).items())
    for _, of_network in cases[asked.first :: asked.every]:
        for runs in of_network:
            try:
                made = predicted(runs[0])
            except (SpecError, InfeasibleError) as error:
                skipped[str(error)] += 1
                continue
            took_s = median(run.step_s for run in runs)
            low, high = made.step_time_interval_s
            yield runs[0], math.log(made.step_time_s / took_s), low <= took_s <= high


def left_out_coverage(cases: list[tuple[NetworkRun, float, bool]]) -> float:
    """Return the share of cases inside an interval of the residuals of other devices."""
    inside = 0
    for run, error, _ in cases:
        low, high = absolute_bounds([other for one, other, _ in cases if one.device != run.device])
        inside += low <= error <= high
    return inside / len(cases)


def main() -> None:
    """Print the errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = os.environ.get("FORESHARD_MEASURED", str(ROOT.parent / "shared/measured/dev"))
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--every", type=int, default=1, help="only each so many networks")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--forward-only", action="store_true", help="the benchmark of a forward alone")
    parser.add_argument("--residuals", action="store_true", help="write what intervals come from")
    asked = parser.parse_args()
    if asked.residuals and not asked.forward_only:
        parser.error("--residuals are those of --forward-only")
    skipped: Counter[str] = Counter()
    by_group: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    cases = []
    for case in errors(asked, skipped):
        run, error, inside = case
        cases.append(case)
        for group in (f"{run.device} {run.layout}", run.layout, "all"):
            by_group[group].append((math.expm1(error), inside))
        print(f"{run.network:44} {run.device} {run.side} {run.layout} {math.expm1(error):+.1%}", flush=True)
    for group, found in sorted(by_group.items()):
        sizes = sorted(abs(error) for error, _ in found)
        p90, bias = sizes[math.ceil(0.9 * len(sizes)) - 1], median(error for error, _ in found)
        covered = sum(inside for _, inside in found) / len(found)
        shown = f"median {median(sizes):.1%}, p90 {p90:.1%}, bias {bias:+.1%}, inside {covered:.0%}"
        print(f"{group}: {len(sizes)} cases, {shown}")
    print("Left out:", "; ".join(f"{reason}: {count}" for reason, count in skipped.most_common()))
    if asked.residuals:
        print(f"Inside an interval of other devices' residuals: {left_out_coverage(cases):.0%}")
        written = [{"case": list(run.case), "residual": round(error, 6)} for run, error, _ in cases]
        source = "scripts/accuracy_timm.py --forward-only --residuals; log(predicted / measured seconds)"
        text = json.dumps({"source": source, "cases": written}, indent=1)
        RESIDUALS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
