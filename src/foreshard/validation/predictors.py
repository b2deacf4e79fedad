"""Predictors side by side: our engines, other tools and a user's own file, all with the same inputs.

A predictor is a name and a function of a `RunInputs`; it returns seconds of a step or a `StepAnswer`, and
raises `RefusedRun` for a run that it cannot express. It never sees what was measured.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from foreshard.catalog.kernels import Tables
from foreshard.catalog.shipped import shipped
from foreshard.catalog.training import Calibration, TrainingConstants, training_constants
from foreshard.errors import SpecError
from foreshard.predict.step import ENGINES
from foreshard.spec.cluster import Cluster
from foreshard.spec.framework import Framework
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import Prediction
from foreshard.validation.rows import TrainingRow

SIBLING = {"megatronbridge_memory": "megatronbridge"}
"""Families of the same code and machines as another, whose constants they take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """A run to predict; `family` is the source of a measured row, empty for a run of one's own."""

    model: Model
    cluster: Cluster
    plan: Plan
    framework: Framework
    family: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnswer:
    """Seconds of a step; what else a predictor knows: an interval, peak bytes, counted as in `Memory`."""

    step_time_s: float
    interval_s: tuple[float, float] | None = None
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None
    device_bytes: float | None = None


class RefusedRun(SpecError):
    """A run that a predictor cannot express."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPredictor:
    """A predictor under its name; `note` says what it was given beside the inputs."""

    name: str
    predict: Callable[[RunInputs], StepAnswer | float]
    note: str = ""

    def __call__(self, run: RunInputs) -> StepAnswer:
        """Return the answer; seconds alone become one."""
        made = self.predict(run)
        return made if isinstance(made, StepAnswer) else StepAnswer(step_time_s=float(made))


@cache
def fitted_families() -> tuple[str, ...]:
    """Return the families that take part in the fit, each with constants that never saw it."""
    return tuple(shipped("training_constants.json")["without"])


def left_out_constants(family: str) -> TrainingConstants:
    """Return constants that never saw a family; families outside every fit use all constants."""
    family = SIBLING.get(family, family)
    return training_constants(family if family in fitted_families() else None)


def engine_predictors() -> tuple[StepPredictor, ...]:
    """Return every engine and cost source of ours, by constants that never saw the family of a row."""
    formulas = [_engine(engine, "formula", "zero-shot") for engine in ENGINES]
    return (*formulas, _engine("graph", "learned", "zero-shot"), _engine("graph", "formula", "datasheet"))


def predict_run(
    run: RunInputs | TrainingRow,
    *,
    constants: TrainingConstants,
    engine: str = "graph",
    costs: str | Tables = "formula",
    fidelity: str = "zero-shot",
    calibration: Calibration | None = None,
) -> Prediction:
    """Predict a run, or a measured one, as it is: what a plan may not be is not asked, nothing is drawn."""
    from foreshard.predict import predict

    return predict(
        run.model,
        run.cluster,
        run.plan,
        framework=run.framework,
        engine=engine,
        costs=costs,
        fidelity=fidelity,
        constants=None if fidelity == "datasheet" else constants,
        calibration=calibration,
        timeline=False,
        checked=False,
    )


def _engine(engine: str, costs: str, fidelity: str) -> StepPredictor:
    def answer(run: RunInputs) -> StepAnswer:
        made = predict_run(
            run, constants=left_out_constants(run.family), engine=engine, costs=costs, fidelity=fidelity
        )
        return StepAnswer(
            step_time_s=made.step_time_s,
            interval_s=made.step_time_interval_s,
            allocated_bytes=made.memory.peak_allocated_bytes,
            reserved_bytes=made.memory.peak_reserved_bytes,
            device_bytes=made.memory.peak_bytes,
        )

    seen = "no fitted constant" if fidelity == "datasheet" else "constants fitted without the row's family"
    source = "" if costs == "formula" else f"/{costs}"
    name = f"foreshard {engine}{source}" + (", datasheet" if fidelity == "datasheet" else "")
    return StepPredictor(name=name, predict=answer, note=seen)


def load_predictor(path: str) -> StepPredictor:
    """Return the predictor of a Python file that defines ``NAME`` and ``predict(run)``.

    Raises
    ------
    SpecError
        For a file that cannot be imported or lacks one of them.
    """
    rule = "A predictor is a .py file with NAME = '...' and a function predict(run)"
    fix = "See docs/benchmark.md"
    if not path.endswith(".py") or not Path(path).is_file():
        raise SpecError("no Python file", file=path, key="--predictor", rule=rule, fix=fix)
    spec = importlib.util.spec_from_file_location(f"foreshard_predictor_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of the file look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        what = f"cannot be imported: {type(error).__name__}: {error}"
        raise SpecError(what, file=path, key="--predictor", rule=rule, fix=fix) from error
    name, function = getattr(module, "NAME", None), getattr(module, "predict", None)
    if not isinstance(name, str) or not name or not callable(function):
        missing = "predict" if isinstance(name, str) and name else "NAME"
        raise SpecError(f"no {missing}", file=path, key=missing, rule=rule, fix=fix)
    return StepPredictor(name=name, predict=function, note=str(getattr(module, "NOTE", "")))
