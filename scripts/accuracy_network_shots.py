"""Error against measured steps of classic networks: python scripts/accuracy_network_shots.py [-o OUT.svg].

timm's rows on RTX 3090, each release of PyTorch by itself: its terms of kernels are fitted to one step of
each of k networks (`foreshard calibrate --steps`), and the other networks are predicted. Of 20 random orders
the last half of the networks judges. Prints a table in markdown; draws the median over orders and releases.
About five minutes.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
from accuracy_rows import markdown
from accuracy_shots import SEEDS

from foreshard.api import load_cluster
from foreshard.predict.measured.traced_step import plan_of
from foreshard.profile.networks.catalog import NETWORKS
from foreshard.profile.step_calibration import fit_steps
from foreshard.profile.traced_calibration import TimedModule, TracedSteps
from foreshard.report.pages.line_chart import Line, chart
from foreshard.validation.networks.predicted import traced_of
from foreshard.validation.networks.run import NetworkRun
from foreshard.validation.networks.tables import timm
from foreshard.validation.tables import measured_folder

COUNTS = (0, 1, 2, 4, 8, 16)


def timed(row: NetworkRun) -> TimedModule:
    """Return a row as a step."""
    module, cluster = traced_of(row), load_cluster(f"1x{row.num_devices}x{row.device}")
    asked = {"micro_batch": row.batch, "global_batch": row.batch, "optimizer": row.optimizer}
    return TimedModule(
        name=row.network,
        module=module,
        cluster=cluster,
        plan=plan_of(module, cluster, asked),
        measured_s=row.batch / row.samples_per_s,
    )


def releases(folder: Path) -> dict[str, list[TimedModule]]:
    """Return the steps of networks of the catalog by release of PyTorch."""
    found: dict[str, list[TimedModule]] = defaultdict(list)
    with open(folder / "cnn_timm_train.csv", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            made = timm(row)
            if made.network in NETWORKS:
                found[row["framework"]].append(timed(made))
    return found


def network_errors(steps: TracedSteps, seeds: int) -> np.ndarray:
    """Return the median error of networks not measured, shape (seeds, `COUNTS`)."""
    names = np.array(steps.names)
    zero = np.zeros(len(steps.terms))
    slopes = steps.slopes(zero)
    errors = np.empty((seeds, len(COUNTS)))
    for seed in range(seeds):
        drawn = np.random.default_rng(seed)
        order = drawn.permutation(sorted(set(steps.names)))
        first = np.array([drawn.choice(np.flatnonzero(names == name)) for name in order])
        judged = np.flatnonzero(np.isin(names, order[len(order) // 2 :]))
        for place, count in enumerate(COUNTS):
            made = fit_steps(steps, first[:count], slopes).log_factors if count else zero
            off = steps.log_predicted(made, judged) - steps.log_measured[judged]
            errors[seed, place] = np.median(np.abs(np.expm1(off)))
    return errors


def main() -> None:
    """Print the tables, draw the curve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", help="an SVG file")
    parser.add_argument("--data", type=Path, default=measured_folder())
    asked = parser.parse_args()
    every = {name: TracedSteps(steps) for name, steps in sorted(releases(Path(asked.data)).items())}
    found = {name: network_errors(steps, SEEDS) for name, steps in every.items()}
    low, medians, high = np.quantile(np.concatenate(list(found.values())), (0.1, 0.5, 0.9), axis=0)
    lines = [
        (name, len(set(every[name].names)), *(f"{100 * error:.1f}" for error in np.median(errors, axis=0)))
        for name, errors in found.items()
    ]
    lines.append(("all orders of all releases", "", *(f"{100 * error:.2f}" for error in medians)))
    print("\n".join(markdown(("release", "networks", *(f"{k} steps" for k in COUNTS)), lines)))
    if asked.output:
        curves = {"median": medians, "worse orders": high, "better orders": low}
        drawn = chart(
            [
                Line(
                    name=name, points=list(zip(COUNTS, errors.tolist(), strict=True)), dashed=name != "median"
                )
                for name, errors in curves.items()
            ],
            x="measured networks, a step each",
            y="median error of networks not measured",
            percent=True,
        )
        head = '<svg xmlns="http://www.w3.org/2000/svg" '
        Path(asked.output).write_text(drawn.replace("<svg ", head, 1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
