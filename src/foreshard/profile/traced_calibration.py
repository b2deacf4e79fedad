"""Terms of traced modules fitted to measured steps: of kinds of operations, launches and communication.

The estimator is that of `profile.step_calibration`. A term is how many times as long as by formulas its
operations, or its part of a step, take; steps of several networks on one device tell terms apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshard.predict.measured.costs import MeasuredCosts
from foreshard.predict.measured.engine import TRACED_FRAMEWORK, step_features, step_seconds
from foreshard.predict.measured.traced import EVERY_KERNEL, TERM_OF_KIND, OperationPrices, costs_under
from foreshard.profile.step_calibration import (
    ConstantTerm,
    Floats,
    TimedSteps,
    estimate_object,
    fit_steps,
    no_step,
    range_sd,
)
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Plan
from foreshard.spec.traced_module import TracedModule

KIND_SD = 0.08
"""Error bar of the logarithm of a kind's term, beside that of all kernels, before any step."""


def _term(name: str, meaning: str, sd: float = KIND_SD) -> ConstantTerm:
    return ConstantTerm(name=name, meaning=meaning, constants=(name,), sd=sd)


_BETWEEN_RANKS = ("tensor_comm", "pipeline_comm", "data_comm")
TRACED_TERMS = (
    _term(
        EVERY_KERNEL, "all kernels alike: clocks under load, the device's cooling", range_sd("gemm_derate")
    ),
    _term("products", "matrix products over those of formulas"),
    _term("convolutions", "convolutions on matrix units or by tiles, over those of formulas"),
    _term("grouped_convolutions", "convolutions in groups by direct kernels"),
    _term("depthwise_convolutions", "convolutions of single channels"),
    _term("recurrences", "recurrent layers"),
    _term("attention", "fused attention"),
    _term("channel_norms", "batch norms of images with channels first"),
    _term("streams", "kernels that stream memory: what a share of the bandwidth they miss costs"),
    _term("layouts", "changes of layout between channels first and last"),
    _term("host", "host seconds of a launch", range_sd("host_eager")),
    _term("optimizer", "the update of parameters", range_sd("fused_traffic")),
    _term("tensor_comm", "sums over ranks that compute layers together", range_sd("tensor_comm")),
    _term("pipeline_comm", "messages between stages", range_sd("pipeline_comm")),
    _term("data_comm", "sums and gathers over replicas", range_sd("data_comm")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedModule:
    """One run of a traced module and the seconds of its step; `name` is how a table calls it."""

    name: str
    module: TracedModule
    cluster: Cluster
    plan: Plan
    measured_s: float


class TracedSteps(TimedSteps):
    """Measured steps of traced modules, whose terms are kinds of operations and parts of a step."""

    def __init__(self, steps: Sequence[TimedModule]):
        super().__init__(TRACED_TERMS, [step.name for step in steps], [step.measured_s for step in steps])
        self._steps = tuple(steps)
        self._terms = [_terms_of(step) for step in steps]
        self._priced = OperationPrices()

    def log_predicted(self, log_factors: Floats, chosen: NDArray[np.int_] | None = None) -> Floats:
        """Return the logarithm of each step, or of those chosen, by terms moved by factors."""
        slower = slower_of(log_factors)
        steps = self._steps if chosen is None else [self._steps[i] for i in chosen]
        return np.array([math.log(self._seconds(step, slower)) for step in steps])

    def with_term(self, place: int) -> NDArray[np.int_]:
        """Return the steps in which a term may take time."""
        name = self.terms[place].name
        return np.flatnonzero([name in terms for terms in self._terms])

    def _seconds(self, step: TimedModule, slower: dict[str, float]) -> float:
        costs = costs_under(step.module, step.cluster, step.plan, slower=slower, priced=self._priced)
        return step_seconds(costs, step.cluster, step.plan)


def _terms_of(step: TimedModule) -> frozenset[str]:
    """Return the terms that may take time in a step: of its operations, and between its ranks."""
    chains = [step.module.layers, *(part.layers for part in step.module.parts.values())]
    layers = [layer for chain in chains for layer in chain]
    kinds = {op.kind for layer in layers for op in (*layer.forward, *layer.backward)}
    own = {EVERY_KERNEL, *(TERM_OF_KIND[kind] for kind in kinds), "host", "optimizer"}
    return frozenset(own | (set(_BETWEEN_RANKS) if len(step.plan.ranks) > 1 else set()))


def slower_of(log_factors: Floats) -> dict[str, float]:
    """Return how many times as long as by formulas each term takes."""
    return {term.name: math.exp(factor) for term, factor in zip(TRACED_TERMS, log_factors, strict=True)}


def calibrate_modules(measured: Sequence[TimedModule], *, seeds: int = 20) -> dict[str, Any]:
    """Return the object of a costs file: terms moved to measured steps, error bars, and their curve.

    Raises
    ------
    SpecError
        Without a step.
    """
    if not measured:
        raise no_step()
    steps = TracedSteps(measured)
    made = fit_steps(steps)
    return {
        "devices": sorted(
            {step.cluster.device_of(rank).name for step in measured for rank in step.plan.ranks}
        ),
        "frameworks": [TRACED_FRAMEWORK],
        "slower": {name: float(f"{value:.8g}") for name, value in slower_of(made.log_factors).items()},
        "points": [
            [round(value, 3) for value in step_features(_costs(step), step.plan)] for step in measured
        ],
        **estimate_object(steps, made, seeds),
    }


def _costs(step: TimedModule) -> MeasuredCosts:
    return costs_under(step.module, step.cluster, step.plan)
