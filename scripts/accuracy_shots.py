"""Error against measured steps on published sources: python scripts/accuracy_shots.py [-o OUT.svg].

Each source is calibrated from constants that never saw it (`foreshard calibrate --steps`); the last half of
20 random orders of its configurations judges. Prints a table in markdown, and the likelihood of the error of
a step that no constant explains; draws the mean over sources. About a minute.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from accuracy_rows import markdown
from fit_training import Runs, formula_run, load_runs, training_tables

from foreshard.profile.step_calibration import TERMS, Steps, TimedStep, shot_errors
from foreshard.report.pages.line_chart import Line, chart
from foreshard.validation.predictors import left_out_constants
from foreshard.validation.tables import measured_folder

MOST = 150  # configurations of a source; others are drawn
LEAST = 16
SEEDS = 20
NOISES = (0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.1)
_FAR = 0.3  # log error beyond which a step counts as this far


def sources(runs: Runs) -> dict[str, Steps]:
    """Return the steps of every source with enough configurations, by constants that never saw it."""
    found = {}
    for family in sorted(set(runs.families)):
        index = np.flatnonzero(runs.families == family)
        if len(index) < LEAST:
            continue
        if len(index) > MOST:
            index = np.random.default_rng(0).choice(index, MOST, replace=False)
        steps = [
            TimedStep(name=str(i), run=formula_run(runs.rows[i]), measured_s=float(runs.measured_s[i]))
            for i in index
        ]
        found[str(family)] = Steps(steps, left_out_constants(str(family)))
    return found


def log_likelihood(steps: Steps, noise: float) -> float:
    """Return the log likelihood of steps a step, the terms integrated out."""
    zero = np.zeros(len(TERMS))
    slopes = steps.slopes(zero)
    rest = np.clip(steps.log_measured - steps.log_predicted(zero), -_FAR, _FAR)
    variances = np.array([term.sd**2 for term in TERMS])
    covariance = (slopes * variances) @ slopes.T + noise**2 * np.eye(len(rest))
    _, log_det = np.linalg.slogdet(covariance)
    return float(-0.5 * (rest @ np.linalg.solve(covariance, rest) + log_det) / len(rest))


def _percents(errors: np.ndarray) -> list[str]:
    return [f"{100 * error:.1f}" for error in errors]


def main() -> None:
    """Print the table, draw the curve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", help="an SVG file")
    asked = parser.parse_args()
    every = sources(load_runs(training_tables(measured_folder())))
    found = {name: shot_errors(steps, seeds=SEEDS) for name, steps in every.items()}
    common = min(len(counts) for counts, _ in found.values())
    counts = next(iter(found.values()))[0][:common]
    lines = [
        (name, len(every[name].log_measured), *_percents(np.median(errors[:, :common], axis=0)))
        for name, (_, errors) in found.items()
    ]
    means = np.median(np.mean([errors[:, :common] for _, errors in found.values()], axis=0), axis=0)
    lines.append(("mean of sources", "", *_percents(means)))
    print("\n".join(markdown(("source", "configurations", *(f"{k} steps" for k in counts)), lines)))
    for noise in NOISES:
        print(f"noise {noise:g}: {sum(log_likelihood(steps, noise) for steps in every.values()):.2f}")
    if asked.output:
        drawn = chart(
            [Line(name="mean of sources", points=list(zip(counts, means.tolist(), strict=True)))],
            x="measured steps",
            y="median error of steps not measured",
            percent=True,
        )
        head = '<svg xmlns="http://www.w3.org/2000/svg" '
        Path(asked.output).write_text(drawn.replace("<svg ", head, 1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
