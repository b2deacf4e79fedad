"""Tables of docs/accuracy.md: families, memory, order, constants and what identifies them, peers, blanks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from accuracy_rows import APART, Run, markdown, number, pair, percent
from fit_part import all_names, from_unit, to_unit
from fit_training import HOLD, Runs, robust_residuals, weights

from foreshard.catalog.training import term_metadata, training_constants
from foreshard.validation.rows import Skipped, TrainingRow
from foreshard.validation.scoring import LEAST_IN_GROUP, distinct, kendall_tau_b, summarise

MOVE = 0.2  # of a constant's range
SAME = 1e-9  # log difference of predictions of one configuration
REPEATS = 0.05  # log difference within which repeats of one configuration fall

Sets = dict[str, list[Run]]


def family_table(sets: Sets) -> list[str]:
    """Per family: rows, errors by kind of constants, order, coverage."""
    header = (
        "family",
        "rows",
        "skipped",
        "datasheet",
        "left out",
        "in the fit",
        "bias left out",
        "bias in the fit",
        "tau left out",
        "regret left out",
        "tau in the fit",
        "coverage left out",
        "half width",
    )
    lines = []
    for family in dict.fromkeys(run.row.family for run in sets["fit"]):
        made = {
            name: summarise([run.outcome for run in runs if run.row.family == family])
            for name, runs in sets.items()
        }
        fit, out = made["fit"], made["out"]
        width = out["relative_width_median"]
        lines.append(
            (
                family,
                fit["rows"],
                fit["skipped"],
                pair(made["datasheet"]),
                pair(out),
                pair(fit),
                percent(out["bias"]),
                percent(fit["bias"]),
                number(out["kendall_tau"]),
                percent(out["regret_mean"]),
                number(fit["kendall_tau"]),
                percent(out["coverage"], 0),
                percent(None if width is None else width / 2),
            )
        )
    return markdown(header, lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryScores:
    """Error of peak memory by what the row states, and the confusion of "does not fit"."""

    allocated: float | None
    elsewhere: float | None
    allocated_rows: int
    elsewhere_rows: int
    confusion: dict[str, int]

    @property
    def wrong_oom(self) -> float | None:
        """Share of rows labelled OOM that were said to fit."""
        c = self.confusion
        return c["fn"] / (c["fn"] + c["tp"]) if c["fn"] + c["tp"] else None

    @property
    def wrong_ran(self) -> float | None:
        """Share of rows that ran and state memory that were said not to fit."""
        c = self.confusion
        return c["fp"] / (c["fp"] + c["tn"]) if c["fp"] + c["tn"] else None


def memory_scores(runs: Sequence[Run]) -> MemoryScores:
    """Return how well memory is met; rows with identical inputs count once."""
    parts = [
        [r.outcome for r in runs if (r.row.memory_kind == "allocated") is wanted] for wanted in (True, False)
    ]
    stated = [[o for o in distinct(part) if o.measured_peak_bytes] for part in parts]
    medians = [summarise(part)["memory_median_ape"] if part else None for part in stated]
    return MemoryScores(
        allocated=medians[0],
        elsewhere=medians[1],
        allocated_rows=len(stated[0]),
        elsewhere_rows=len(stated[1]),
        confusion=summarise([r.outcome for r in runs])["feasibility"],
    )


def memory_table(runs: Sequence[Run]) -> list[str]:
    """Per family and kind of figure: rows, median error, bias, worst; and judged OOM or not."""
    lines = []
    for family, kind in dict.fromkeys((r.row.family, r.row.memory_kind) for r in runs):
        mine = [r.outcome for r in runs if r.row.family == family and r.row.memory_kind == kind]
        known = [o for o in distinct(mine) if o.measured_peak_bytes and o.predicted_peak_bytes]
        counts = summarise(mine)["feasibility"]
        if not known and not counts["tp"] + counts["fn"]:
            continue
        error = np.array([o.predicted_peak_bytes / o.measured_peak_bytes - 1.0 for o in known])
        figures = ("-", "-", "-")
        if len(error):
            figures = tuple(
                percent(float(v)) for v in (np.median(abs(error)), np.median(error), abs(error).max())
            )
        judged = ", ".join(f"{name} {value}" for name, value in counts.items() if value)
        lines.append((family, kind or "no figure (OOM)", len(known), *figures, judged or "-"))
    return markdown(
        (
            "family",
            "figure",
            "rows",
            "median error (%)",
            "bias (%)",
            "worst (%)",
            "does not fit: tp fn, fits: tn fp",
        ),
        lines,
    )


def order_line(runs: Sequence[Run]) -> dict[str, Any]:
    """Return tau of all families but vTrain: of all pairs, and of pairs further apart than repeats are.

    `most` is what a prediction could reach that is right on average wherever ours are equal: releases and
    submitters that measured one configuration differ, and a tie counts half.
    """
    rows = [r.outcome for r in runs if r.row.family != APART]
    groups: dict[Any, list[tuple[float, float]]] = {}
    for row in distinct(rows):
        if row.rank_key is not None and row.measured_s and row.predicted_s:
            groups.setdefault(row.rank_key, []).append((row.measured_s, row.predicted_s))
    signs, most, equal = [], [], 0
    for group in (np.log(g) for g in groups.values() if len(g) >= LEAST_IN_GROUP):
        first, second = np.triu_indices(len(group), 1)
        same = np.abs(group[:, 1, None] - group[:, 1]) < SAME
        equal += int(same[first, second].sum())
        best = kendall_tau_b(group[:, 0], np.round((same * group[:, 0]).sum(1) / same.sum(1), 12))
        if best is not None:
            most.append((best, len(first)))
        apart = group[first] - group[second]
        apart = apart[np.abs(apart[:, 0]) > REPEATS]
        signs.append(np.sign(apart[:, 0] * apart[:, 1]))
    return {
        "tau": summarise(rows)["kendall_tau"],
        "tau_apart": float(np.mean(np.concatenate(signs))) if signs else None,
        "groups": len(signs),
        "most": sum(best * n for best, n in most) / sum(n for _, n in most) if most else None,
        "equal": equal,
        "pairs": sum(pairs for _, pairs in most),
    }


def identification(runs: Runs) -> dict[str, tuple[float, list[str]]]:
    """Return, per constant, by how much the data's part of the objective rises, and for which families.

    The rise is the mean of moving the fitted constant up and down by a fifth of its range, the others held;
    at a bound only the way inside counts.
    """
    names, whole = all_names(), training_constants()
    point = to_unit(whole, names)
    row_weights = weights(runs)

    def objective(constants: Any) -> np.ndarray:
        return 0.5 * robust_residuals(runs.log_error(constants), row_weights) ** 2

    base = objective(whole)
    out = {}
    for i, name in enumerate(names):
        rises = []
        for step in (-MOVE, MOVE):
            moved = point.copy()
            moved[i] = np.clip(point[i] + step, 0.0, 1.0)
            if abs(moved[i] - point[i]) > MOVE / 2:
                rises.append(objective(from_unit(moved, names, whole)) - base)
        rise = np.mean(rises, axis=0)
        shares = {f: float(abs(rise[runs.families == f]).sum()) for f in sorted(set(runs.families))}
        total = sum(shares.values())
        main = sorted((f for f in shares if shares[f] >= 0.1 * total), key=lambda f: -shares[f])[:3]
        out[name] = (float(rise.sum()), main)
    return out


def constants_table(runs: Runs) -> list[str]:
    """Return every constant with its range, meaning, and the data that identify it."""
    fitted, found = training_constants(), identification(runs)
    hold = 0.5 * (HOLD * MOVE) ** 2
    lines = []
    for name, meta in term_metadata().items():
        rise, families = found[name]
        verdict = "identified" if rise >= 1.0 else "weakly identified" if rise > hold else "held at its start"
        value = getattr(fitted, name)
        edge = 0.01 * (meta["high"] - meta["low"])
        if verdict != "held at its start" and min(value - meta["low"], meta["high"] - value) < edge:
            verdict += ", at its bound"
        lines.append(
            (
                f"`{name}`",
                f"{value:.4g}",
                f"{meta['low']:g} to {meta['high']:g}",
                meta["meaning"],
                verdict,
                f"{rise:.2g}",
                ", ".join(families) if rise > hold else "-",
            )
        )
    return markdown(
        ("constant", "value", "range", "meaning", "data", f"rise at {MOVE:.0%} of the range", "families"),
        lines,
    )


PEERS = (
    # tool; Korthikanti, SC21, vTrain (1,440 rows): mean / median / largest error (%); regret
    (
        "10-line formula at half of peak",
        "17.0 / 16.3 / 27.5",
        "9.0 / 8.9 / 17.3",
        "53.2 / 55.2 / 97.9",
        "89.8",
    ),
    ("Calculon caa4b11", "3.65 / 2.5 / 8.9", "10.3 / 10.7 / 17.8", "39.0 / 35.8 / 86.6", "10.0"),
    ("llm-analysis d841e40", "25.9 / 23.8 / 70.9", "46.4 / 15.2 / 137", "56.8 / 59.3 / 95.9", "33.2"),
    ("SimuMax 4dcaae5", "4.60 / 3.9 / 10.5", "5.68 / 4.5 / 17.1", "27.7 / 28.8 / 60.1", "4.0"),
    ("vTrain f8dda84 (claimed, profiles a GPU)", "-", "-", "8.4 mean", "-"),
)
PEER_CAVEATS = (
    "Peers were run on CPU from published system files, once, untuned; SimuMax has no A100-SXM "
    "file, one was composed and one input corrected after its first errors were seen. Korthikanti's rows are "
    "Calculon's own validation set. vTrain's cluster beyond its configuration files (80 GB devices, NVLink "
    "300 GB/s, 12.5 GB/s per GPU, vocabulary) is assumed. Peers' vTrain figures are on 1,440 rows and 136 "
    "groups of the whole source; ours are on the rows here. `in the fit` is not comparable with tools that "
    "were never fitted; `left out` is, except that our terms were chosen after looking at residuals of these "
    "rows."
)


def peer_table(sets: Sets, vtrain: dict[str, Any] | None) -> list[str]:
    """Return peers' figures beside ours."""
    lines = list(PEERS)
    for title, name, key in (
        ("foreshard, left out", "out", "left_out"),
        ("foreshard, in the fit", "fit", "in_fit"),
    ):
        cells = [_three(sets[name], family) for family in ("korthikanti", "sc21", APART)]
        regret = percent(vtrain[key]["groups_of_2"]["regret_mean"]) if vtrain else "-"
        lines.append((title, *cells, regret))
    if vtrain:
        crossed = vtrain["cross_validated"]
        text = f"{percent(crossed['median_ape'])} median"
        lines.append(
            (
                "foreshard, cross-validated by cell",
                "-",
                "-",
                text,
                percent(crossed["groups_of_2"]["regret_mean"]),
            )
        )
    header = ("tool", "Korthikanti (8)", "SC21 (10)", "vTrain single node", "mean regret on vTrain (%)")
    return markdown(header, lines)


def _three(runs: Sequence[Run], family: str) -> str:
    rows = [
        r
        for r in distinct([r.outcome for r in runs if r.row.family == family])
        if r.measured_s and r.predicted_s
    ]
    error = np.array([abs(r.predicted_s / r.measured_s - 1.0) for r in rows])
    return " / ".join(percent(float(v)) for v in (error.mean(), np.median(error), error.max()))


def blank_table(rows: Sequence[TrainingRow]) -> list[str]:
    """Return what blank cells were read as."""
    found = Counter((row.family, line) for row in rows for line in row.assumptions)
    return markdown(("family", "assumed", "rows"), [(f, line, n) for (f, line), n in sorted(found.items())])


def skip_table(skipped: Sequence[Skipped], runs: Sequence[Run]) -> list[str]:
    """Return why rows are not predicted."""
    found = Counter((row.family, row.reason) for row in skipped)
    found.update((r.row.family, r.outcome.reason) for r in runs if r.outcome.status != "ok")
    return markdown(("family", "reason", "rows"), [(f, why, n) for (f, why), n in sorted(found.items())])
