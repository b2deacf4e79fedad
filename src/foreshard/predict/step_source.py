"""The one interface to the time of a step: plans in, seconds and bytes and predictions out.

Formulas price a model of the catalog (`FormulaSteps`), measured costs a job of the user's own
(`MeasuredSteps`); searches ask either through `StepSource` and do not know which it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from foreshard.catalog.kernels import Tables
from foreshard.catalog.training import Calibration, TrainingConstants
from foreshard.predict.analytical.engine import StepTimes, slowest_parts, step_times
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.measured.costs import MeasuredCosts
from foreshard.predict.measured.engine import predict_measured, step_seconds
from foreshard.predict.measured.memory import measured_memory
from foreshard.predict.memory import plan_memory
from foreshard.predict.step import predict
from foreshard.spec.cluster import Cluster
from foreshard.spec.framework import Framework
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import Memory, Prediction


class StepSource(Protocol):
    """What a step of a plan takes and holds, whatever prices its tasks."""

    def seconds(self, plan: Plan) -> float:
        """Return the time of a step, at the fidelity of a search."""
        ...

    def memory(self, plan: Plan) -> Memory:
        """Return the peak of the fullest rank."""
        ...

    def predict(self, plan: Plan, *, tokens: float | None = None) -> Prediction:
        """Return the whole prediction; `tokens` of the run give its total cost."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaSteps:
    """Steps of a catalog model by formulas: `seconds` by arrays, `predict` by the engine asked for."""

    model: Model
    cluster: Cluster
    framework: Framework
    constants: TrainingConstants
    engine: str = "graph"
    network: str = "closed-form"
    costs: str | Tables = "auto"
    calibration: Calibration | None = None
    usd_per_device_hour: float | None = None

    def _case(self, plan: Plan) -> PlannedRun:
        return PlannedRun(
            model=self.model, cluster=self.cluster, plan=plan, framework=self.framework, costs=self.costs
        )

    def times(self, plan: Plan) -> StepTimes:
        """Return the time of each group of a plan, and its parts."""
        return step_times(build_batch([self._case(plan)], self.constants))

    def seconds(self, plan: Plan) -> float:
        """Return the time of a step."""
        return self.seconds_of([plan])[0]

    def seconds_of(self, plans: Sequence[Plan]) -> list[float]:
        """Return the time of a step of each plan, all of them priced together."""
        if not plans:
            return []
        batch = build_batch([self._case(plan) for plan in plans], self.constants, distinct=True)
        times, first, found = step_times(batch, joined=True), 0, []
        for count in batch.num_groups:
            found.append(sum(slowest_parts(times, first, count).values()))
            first += count
        return found

    def memory(self, plan: Plan) -> Memory:
        """Return the peak of the fullest rank."""
        return plan_memory(self._case(plan))[0]

    def predict(self, plan: Plan, *, tokens: float | None = None) -> Prediction:
        """Return the whole prediction."""
        return predict(
            self.model,
            self.cluster,
            plan,
            framework=self.framework,
            engine=self.engine,
            network=self.network,
            costs=self.costs,
            calibration=self.calibration,
            tokens=tokens,
            usd_per_device_hour=self.usd_per_device_hour,
            timeline=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Steps of a user's own job by measured costs: `seconds` and `predict` execute the schedule."""

    costs: MeasuredCosts
    cluster: Cluster

    def seconds(self, plan: Plan) -> float:
        """Return the time of a step."""
        return step_seconds(self.costs, self.cluster, plan)

    def memory(self, plan: Plan) -> Memory:
        """Return the peak of the fullest rank."""
        return measured_memory(self.costs, self.cluster, plan)

    def predict(self, plan: Plan, *, tokens: float | None = None) -> Prediction:
        """Return the whole prediction."""
        return predict_measured(self.costs, self.cluster, plan, tokens=tokens)
