"""Training steps on devices taken for unknown (extras learn, plan).

    python scripts/accuracy_learned_steps.py                prints a table in markdown, in about two minutes
    python scripts/accuracy_learned_steps.py --residuals    also writes docs/data/learned_steps.json

For each of three fitted devices, its kernels in 16 bit are priced as if it had never been timed: by formulas
with the constants of other devices, and by learned costs trained without it; beside its own constants.
Constants between kernels and a step are those fitted without the family of the run. Intervals of formulas are
of the class `architecture` where another device of the architecture was timed, else `datasheet`. The runs by
learned costs are residuals of the class `learned` (scripts/accuracy.py --residuals).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import numpy as np
from accuracy_intervals import LEARNED
from accuracy_rows import markdown
from fit_kernels import donors, figures, middle
from fit_learned import (
    NOMINAL,
    Kernels,
    attention_tables,
    gemm_tables,
    grouped_tables,
    regression,
    trees,
    with_share,
)
from fit_training import takes_part
from kernel_tables import DATA
from residual_classes import LeftOut

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import KernelModel, kernel_constants, kernel_model
from foreshard.catalog.learned import NATIVE_ATTENTION, datasheet_features, share_of
from foreshard.predict.batch import PlannedRun
from foreshard.predict.interval import LEVEL, class_of, features_of, step_intervals
from foreshard.validation.kernels.cases import attention_kernel
from foreshard.validation.predictors import fitted_families, left_out_constants, predict_run
from foreshard.validation.rows import TrainingRow
from foreshard.validation.validate import validate

DEVICES = ("a100-sxm-80gb", "b200-sxm", "h100-sxm")
TABLES = (
    *("llm_torchtitan_2024.csv", "llm_llmfoundry.csv", "llm_simumax_b200.csv", "llm_internevo.csv"),
    *("llm_misc_fsdp.csv", "llm_bigscience.csv"),
)
Change = Callable[[KernelModel, bool], KernelModel]
"""Kernels of a device from its own; true where the attention kernel is the one of its architecture."""


class Fits:
    """Kernel tables with their shares of the peak, and fits without one device."""

    def __init__(self) -> None:
        self.sixteen = [with_share(kernels) for kernels in gemm_tables(fp32=False)]
        self.single = [with_share(kernels) for kernels in gemm_tables(fp32=True)]
        self.attention = [with_share(kernels) for kernels in attention_tables()]
        full = [kernels for kernels in self.sixteen if kernels.device not in ("t4", "v100-sxm-16gb")]
        self.grouped = grouped_tables(full)

    def formula(self, device: str) -> Change:
        """Return what gives a device the constants of others."""
        constants = kernel_constants()
        known = {k.device: constants["gemm"]["16bit"]["devices"][k.device] for k in self.sixteen}
        known.pop(device)
        gemm = middle([known[name] for name in donors(device, known)])
        gemm["eff"] /= 1.0 + gemm.pop("sag")
        attention = {
            k.device: constants["attention"][attention_kernel(k.device, "")]["devices"][k.device]
            for k in self.attention
        }
        attention.pop(device)
        flash = middle([attention[name] for name in donors(device, attention)])
        return lambda kernels, native: _with(kernels, gemm, flash if native else {})

    def learned(self, device: str) -> tuple[Change, dict[str, Any]]:
        """Return what gives a device learned costs that never saw it, and their trees."""

        def rest(tables: list[Kernels]) -> list[Kernels]:
            return [kernels for kernels in tables if kernels.device != device]

        made = {
            kind: trees(kind, rest(tables))
            for kind, tables in (
                ("gemm_16bit", self.sixteen),
                ("attention", self.attention),
                ("grouped", self.grouped),
            )
        }
        sheet = datasheet_features(resolve_device(device), "bf16")
        assert sheet is not None
        gemm = dict(NOMINAL["gemm"])
        gemm["eff"] = share_of(regression(rest([*self.sixteen, *self.single])), (*sheet, 0.0))
        gemm["eff"] /= 1.0 + gemm.pop("sag")
        flash = NOMINAL["attention"] | {"fwd_eff": share_of(regression(rest(self.attention)), (*sheet, 0.0))}
        flags = {"gemm_learned": 1.0, "gemm16_learned": 1.0, "grouped_learned": 1.0, "grouped_eff": 1.0}

        def change(kernels: KernelModel, native: bool) -> KernelModel:
            own = flags | ({"attn_learned": 1.0} if native else {})
            return replace(_with(kernels, gemm, flash if native else {}), **own)

        return change, {kind: found[0] for kind, found in made.items() if found}


def _with(kernels: KernelModel, gemm: dict[str, float], flash: dict[str, float]) -> KernelModel:
    values = {f"gemm_{n}": v for n, v in gemm.items()}
    values |= {f"gemm16_{n}": gemm[n] for n in ("eff", "k0", "split_k")}
    # How much slower a backward is was never fitted on kernels.
    values |= {f"attn_{n}": v for n, v in flash.items() if n != "bwd_ratio"}
    return replace(kernels, **values)


def errors(
    device: str, change: Change | None, forest: dict[str, Any], evidence: str
) -> tuple[np.ndarray, float, list[LeftOut]]:
    """Return log predicted over measured of 16-bit runs on a device alone, the share inside intervals, and
    those of families that take part in the fit.
    """
    mine: dict[str, tuple[float, float]] = {}
    runs: dict[Any, LeftOut] = {}

    def kernels_of(asked: Any, precision: str, attention: str, fidelity: str, _: str) -> KernelModel:
        kernels = kernel_model(asked, precision, attention=attention, fidelity=fidelity)
        if change is None or asked.name != device or precision not in ("bf16", "fp16"):
            return kernels
        native = attention != "fa2" or asked.arch not in NATIVE_ATTENTION
        return change(kernels, native)

    def predicted(row: TrainingRow) -> Any:
        constants = left_out_constants(row.family)
        found = predict_run(row, constants=constants, engine="analytical", costs="auto")
        alone = {nodes.device.name for nodes in row.cluster.nodes} == {device}
        if alone and row.plan.precision in ("bf16", "fp16"):
            case = PlannedRun(model=row.model, cluster=row.cluster, plan=row.plan, framework=row.framework)
            parts = found.time_breakdown_s
            mine[row.id] = step_intervals(case, found.step_time_s, parts, evidence=evidence)[LEVEL]
            if row.family in fitted_families() and takes_part(row) and row.config_key not in runs:
                runs[row.config_key] = LeftOut(
                    family=row.family,
                    measured_s=row.measured_s,
                    predicted_s=found.step_time_s,
                    classes=class_of(case.model, case.plan, case.framework, parts, evidence=evidence),
                    features=features_of(case.model, case.plan),
                )
        return found

    with (
        patch("foreshard.predict.run_setup._kernel_model", kernels_of),
        patch("foreshard.cost.learned.shipped_trees", lambda: forest),
    ):
        found = validate([str(DATA / name) for name in TABLES], exclude_calibration=None, predictor=predicted)
    rows = [row for row in found["rows"] if row["id"] in mine and row["status"] == "ok" and row["measured_s"]]
    inside = [mine[row["id"]][0] <= row["measured_s"] <= mine[row["id"]][1] for row in rows]
    log_ratios = np.log([row["predicted_s"] / row["measured_s"] for row in rows])
    return log_ratios, float(np.mean(inside)), list(runs.values())


def main() -> None:
    """Print one line a device; write the runs by learned costs where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--residuals", action="store_true")
    asked = parser.parse_args()
    fits, lines = Fits(), []
    left_out: list[LeftOut] = []
    for device in DEVICES:
        learned, forest = fits.learned(device)
        arch = resolve_device(device).arch
        relatives = [k for k in fits.sixteen if k.device != device and k.arch == arch]
        evidence = "architecture" if relatives else "datasheet"
        found = [errors(device, None, {}, "fitted"), errors(device, fits.formula(device), {}, evidence)]
        found.append(errors(device, learned, forest, "learned"))
        left_out += found[-1][2]
        cells = []
        for log_ratio, covered, _ in found:
            s = figures(log_ratio)
            text = f"{100 * s['median']:.1f} / {100 * s['p90']:.1f} ({100 * s['bias']:+.1f})"
            cells.append(f"{text}, {100 * covered:.0f}")
        lines.append((device, len(found[0][0]), evidence, *cells))
    header = ("device", "runs", "evidence", "own constants", "formula of others", "learned without it")
    print("\n".join(markdown(header, lines)))
    if asked.residuals:
        rows = [
            asdict(run)
            | {
                "predicted_s": float(f"{run.predicted_s:.6g}"),
                "features": [round(value, 3) for value in run.features],
            }
            for run in left_out
        ]
        lines_of = ",\n".join(json.dumps(row) for row in rows)
        LEARNED.write_text(f'{{"rows": [\n{lines_of}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
