"""Few constants of training steps fitted to measured steps: how far from the shipped ones, and how surely.

A term is a physical quantity whose constants move together by one factor. Its logarithm has a normal prior,
from the range that the shipped fit allows it; measured steps move it by what they say of it. What no step
says anything of stays where it was, with the error bar of the prior. How far the terms go together is what
steps bear out that were left out: a run that no such terms describe keeps the shipped constants.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshard.catalog.training import CALIBRATED, TrainingConstants, term_metadata
from foreshard.errors import SpecError
from foreshard.predict.analytical.engine import step_times
from foreshard.predict.batch import PlannedRun, build_batch, with_constants
from foreshard.predict.interval import features_of
from foreshard.predict.rates import devices_of

Floats = NDArray[np.floating[Any]]

NOISE = 0.07
"""Error of a step that no constant explains, before steps say otherwise.

Over nine published sources, each by constants that never saw it, the likelihood is greatest for 0.06 to 0.08
(`scripts/accuracy_shots.py`).
"""
NOISE_WEIGHT = 4.0
"""Steps that this first guess of the error is worth."""
TAIL = 4.0
"""Degrees of freedom of Student's distribution: one odd step does not bend the fit."""
TRUST = 0.5
"""Part of the way that terms go before a second step tells whether the first was like the others."""
TRUST_STEPS = 6.0
"""Steps of `TRUST_SIZE` that this guess is worth. Both make the least error after 1, 2 and 4 steps over nine
published sources, each by constants that never saw it (`scripts/accuracy_shots.py`)."""
TRUST_SIZE = 0.05
ROUNDS = 3
_MOST_WEIGHINGS, _STILL = 20, 1e-6
IDENTIFIED = 0.5
"""A term is identified where its error bar is at most this share of the prior's."""
TIED = 0.9
"""Correlation from which only a combination of two terms is known."""
_STEP = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantTerm:
    """Constants that move by one factor.

    `sd` is of the logarithm of the factor before any step: a quarter of the range, in logarithms, that the
    shipped fit allows the constant it is named for.
    """

    name: str
    meaning: str
    constants: tuple[str, ...]
    sd: float


def range_sd(constant: str) -> float:
    """Return a quarter of the range, in logarithms, that the shipped fit allows a constant."""
    entry = term_metadata()[constant]
    return math.log(entry["high"] / entry["low"]) / 4.0


def _term(name: str, meaning: str = "", constants: tuple[str, ...] = (), *, of: str = "") -> ConstantTerm:
    """Return a term whose error bar is that of a constant: the first of its own unless it is `of` another."""
    own = constants or (name,)
    said = meaning or term_metadata()[name]["meaning"]
    return ConstantTerm(name=name, meaning=said, constants=own, sd=range_sd(of or own[0]))


_HOST = tuple(
    name
    for name in term_metadata()
    if name.startswith("host_") and name not in ("host_sharpness", "host_arm", "host_backward", "host_tensor")
)
_PRODUCTS = ("gemm_derate", "gemm_derate_8bit", "gemm_derate_4bit")
_ATTENTION = ("flash_forward", "flash_backward", "unfused")
_STREAMS = (
    "eager_traffic",
    "fused_traffic",
    "cast_traffic",
    "cast_blocks",
    "grad_accumulate",
    "loss_traffic",
)
TERMS = (
    _term("products", "matrix products in training over isolated ones", _PRODUCTS),
    _term("attention", "attention in training over isolated kernels", _ATTENTION),
    _term("memory_bound", "traffic of kernels that stream memory", _STREAMS, of="fused_traffic"),
    _term("experts", "grouped products of experts over other products", ("expert_products",)),
    _term("host", "host seconds of launches", _HOST, of="host_eager"),
    _term("tensor_comm"),
    _term("pipeline_comm", "messages between stages in training over isolated"),
    _term("data_comm"),
    _term("expert_comm"),
    ConstantTerm(
        name="fixed",
        meaning="seconds of a step outside layers, and of the optimizer per layer",
        constants=("step_fixed", "step_per_layer"),
        sd=0.5,  # the ranges begin at 0; their tops are four times the usual value, two of these
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TermEstimate:
    """Logarithms of the terms' factors, their covariance, and the error of a step that they leave."""

    log_factors: Floats
    covariance: Floats
    noise: float

    @property
    def sds(self) -> Floats:
        """Return the error bars of the logarithms."""
        return np.sqrt(np.diag(self.covariance))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One run and the seconds of its step; `name` is how a table calls it."""

    name: str
    run: PlannedRun
    measured_s: float


class TimedSteps(ABC):
    """Measured steps, and what terms moved by factors predict of them.

    Attributes
    ----------
    terms : tuple of ConstantTerm
    names : list of str
    log_measured : ndarray, shape (steps,)
        Logarithms of seconds.
    """

    def __init__(self, terms: tuple[ConstantTerm, ...], names: list[str], measured_s: Sequence[float]):
        self.terms = terms
        self.names = names
        self.log_measured = np.log(np.array(measured_s))

    @abstractmethod
    def log_predicted(self, log_factors: Floats, chosen: NDArray[np.int_] | None = None) -> Floats:
        """Return the logarithm of each step, or of those chosen, by terms moved by factors."""

    @property
    def sds(self) -> Floats:
        """Return the error bars of the logarithms of the factors before any step."""
        return np.array([term.sd for term in self.terms])

    def slopes(self, log_factors: Floats) -> Floats:
        """Return how the logarithm of each step moves with that of each factor, shape (steps, terms)."""
        found = np.zeros((len(self.names), len(self.terms)))
        for place in range(len(self.terms)):
            up, down = log_factors.copy(), log_factors.copy()
            up[place] += _STEP
            down[place] -= _STEP
            which = self.with_term(place)
            rise = self.log_predicted(up, which) - self.log_predicted(down, which)
            found[which, place] = rise / (2 * _STEP)
        return found

    def with_term(self, place: int) -> NDArray[np.int_]:
        """Return the steps in which a term may take time."""
        return np.arange(len(self.names))


class Steps(TimedSteps):
    """Measured steps of models of layers, whose terms are constants of training."""

    def __init__(self, steps: Sequence[TimedStep], start: TrainingConstants):
        super().__init__(TERMS, [step.name for step in steps], [step.measured_s for step in steps])
        self.start = start
        self._batch = build_batch([step.run for step in steps], start)

    def log_predicted(self, log_factors: Floats, chosen: NDArray[np.int_] | None = None) -> Floats:
        """Return the logarithm of each step, or of those chosen, by constants moved by factors."""
        moved = scaled(self.start, log_factors)
        found: Floats = np.log(step_times(with_constants(self._batch, moved)).total)
        return found if chosen is None else found[chosen]


def scaled(start: TrainingConstants, log_factors: Floats) -> TrainingConstants:
    """Return constants with each term's moved by its factor."""
    values = asdict(start)
    for term, log_factor in zip(TERMS, log_factors, strict=True):
        for name in term.constants:
            values[name] *= math.exp(log_factor)
    return TrainingConstants(**values)


def fit(log_measured: Floats, log_predicted: Floats, slopes: Floats, at: Floats, sds: Floats) -> TermEstimate:
    """Return the estimate from steps whose logarithms are linear in those of the factors around `at`.

    Maximum a posteriori with normal priors of error bars `sds`; the errors are Student's, by weights that are
    found with them, and their scale is estimated along, the first guess counting as a few steps. What the
    terms are not known by counts as error too, so that few steps are not taken for exact because the terms
    can follow them.

    Source
    ------
    Expectation maximisation for Student's errors: Lange, Little, Taylor 1989.
    """
    prior = np.diag(1.0 / sds**2)
    rest = log_measured - log_predicted + slopes @ at
    noise, weights = NOISE, np.ones(len(rest))
    for _ in range(_MOST_WEIGHINGS):
        precision = slopes.T @ (weights[:, None] * slopes) / noise**2 + prior
        covariance = np.linalg.inv(precision)
        factors = covariance @ (slopes.T @ (weights * rest)) / noise**2
        square = (rest - slopes @ factors) ** 2 + ((slopes @ covariance) * slopes).sum(1)
        weights = (TAIL + 1.0) / (TAIL + square / noise**2)
        last, noise = (
            noise,
            math.sqrt((NOISE_WEIGHT * NOISE**2 + float(weights @ square)) / (NOISE_WEIGHT + len(rest))),
        )
        if abs(noise - last) < _STILL:
            break
    return TermEstimate(log_factors=factors, covariance=covariance, noise=noise)


def trust(rest: Floats, slopes: Floats, sds: Floats) -> float:
    """Return which part of the way terms go, from 0 to 1, by steps that are left out one by one.

    The least squares factor of what the other steps say of each, `TRUST` where they say nothing: a ridge
    towards it that is worth `TRUST_STEPS` steps.

    Parameters
    ----------
    rest : ndarray, shape (steps,)
        log(measured / predicted) by the constants of the start.
    slopes : ndarray, shape (steps, terms)
    sds : ndarray, shape (terms,)
        Error bars of the terms before any step.

    Source
    ------
    Stacked regression by leaving one out: Breiman 1996.
    """
    ridge = TRUST_STEPS * TRUST_SIZE**2
    zero = np.zeros(slopes.shape[1])
    said = np.zeros(len(rest))
    for i in range(len(rest) if len(rest) > 1 else 0):
        others = np.arange(len(rest)) != i
        said[i] = slopes[i] @ fit(rest[others], zero[:1], slopes[others], zero, sds).log_factors
    part = (TRUST * ridge + float(rest @ said)) / (ridge + float(said @ said))
    return min(max(part, 0.0), 1.0)


def fit_steps(
    steps: TimedSteps, chosen: NDArray[np.int_] | None = None, slopes: Floats | None = None
) -> TermEstimate:
    """Return the estimate from measured steps, or those chosen, by linear fits each about the last one.

    With `slopes`, of all steps, these are kept from fit to fit.
    """
    index = np.arange(len(steps.log_measured)) if chosen is None else chosen
    at: Floats = np.zeros(len(steps.terms))
    for _ in range(ROUNDS):
        found = steps.slopes(at) if slopes is None else slopes
        predicted = steps.log_predicted(at, index)
        made = fit(steps.log_measured[index], predicted, found[index], at, steps.sds)
        rest = steps.log_measured[index] - predicted + found[index] @ at
        at = made.log_factors
    return replace(made, log_factors=at * trust(rest, found[index], steps.sds))


def left_out_residuals(steps: TimedSteps, at: Floats) -> Floats:
    """Return log(measured / predicted) of each step by factors fitted to all others, linear about `at`.

    They go the part of the way that all steps together bear out.
    """
    predicted, slopes = steps.log_predicted(at), steps.slopes(at)
    part = trust(steps.log_measured - predicted + slopes @ at, slopes, steps.sds)
    found = []
    for i in range(len(predicted)):
        others = np.arange(len(predicted)) != i
        made = fit(steps.log_measured[others], predicted[others], slopes[others], at, steps.sds)
        found.append(steps.log_measured[i] - predicted[i] - slopes[i] @ (part * made.log_factors - at))
    return np.array(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """Median error of steps not fitted, after `steps` were: the median over orders, 10 % and 90 % of them."""

    steps: int
    median_ape: float
    low: float
    high: float


def shot_errors(steps: TimedSteps, *, seeds: int = 20) -> tuple[tuple[int, ...], Floats]:
    """Return numbers of measured steps, and the median error of steps not measured, shape (seeds, numbers).

    In each order, drawn at random, the first steps are fitted and the last half judges every number. None
    with fewer than `LEAST` steps.
    """
    total = len(steps.log_measured)
    counts = tuple(k for k in (0, *(2**power for power in range(20))) if k <= total // 2)
    if total < LEAST:
        return (), np.empty((seeds, 0))
    zero = np.zeros(len(steps.terms))
    slopes = steps.slopes(zero)
    errors = np.empty((seeds, len(counts)))
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(total)
        judged = order[total // 2 :]
        for place, count in enumerate(counts):
            made = fit_steps(steps, order[:count], slopes).log_factors if count else zero
            off = steps.log_predicted(made, judged) - steps.log_measured[judged]
            errors[seed, place] = np.median(np.abs(np.expm1(off)))
    return counts, errors


def shots(steps: TimedSteps, *, seeds: int = 20) -> tuple[Shot, ...]:
    """Return the curve of error against the number of measured steps, over orders of `shot_errors`."""
    counts, errors = shot_errors(steps, seeds=seeds)
    if not counts:
        return ()
    low, median, high = np.quantile(errors, (0.1, 0.5, 0.9), axis=0)
    return tuple(
        Shot(steps=count, median_ape=float(median[i]), low=float(low[i]), high=float(high[i]))
        for i, count in enumerate(counts)
    )


LEAST = 8
"""Steps from which there is a curve: half of them judge it."""


def calibrate_steps(
    measured: Sequence[TimedStep], *, start: TrainingConstants, seeds: int = 20
) -> dict[str, Any]:
    """Return the object of a costs file: constants moved to measured steps, error bars, and their curve.

    Raises
    ------
    SpecError
        Without a step.
    """
    if not measured:
        raise no_step()
    steps = Steps(measured, start)
    made = fit_steps(steps)
    return {
        "devices": sorted({device.name for step in measured for device, _ in devices_of(step.run)}),
        "frameworks": sorted({step.run.framework.label for step in measured}),
        "constants": {
            name: float(f"{value:.8g}") for name, value in asdict(scaled(start, made.log_factors)).items()
        },
        "points": [
            [round(value, 3) for value in features_of(step.run.model, step.run.plan)] for step in measured
        ],
        **estimate_object(steps, made, seeds),
    }


def no_step() -> SpecError:
    """Return the error of a calibration without a step."""
    rule = "Constants are fitted to measured steps"
    return SpecError("no measured step", key="--steps", rule=rule, fix="Give a table with some")


def estimate_object(steps: TimedSteps, made: TermEstimate, seeds: int) -> dict[str, Any]:
    """Return what a costs file says of an estimate: terms, errors, curve, residuals of steps left out."""
    after, before = steps.log_predicted(made.log_factors), steps.log_predicted(np.zeros(len(steps.terms)))
    several = len(steps.names) > 1
    alone = left_out_residuals(steps, made.log_factors) if several else steps.log_measured - before
    return {
        "schema_version": 1,
        "kind": CALIBRATED,
        "date": datetime.now(UTC).date().isoformat(),
        "steps": len(steps.names),
        "noise": made.noise,
        "error": {
            "before": _error(before - steps.log_measured),
            "after": _error(after - steps.log_measured),
            "left_out": _error(-alone) if several else None,
        },
        "terms": _terms(steps, made),
        "curve": [asdict(shot) for shot in shots(steps, seeds=seeds)],
        "residuals": [round(float(value), 5) for value in alone],
    }


def _error(log_ratio: Floats) -> dict[str, float]:
    off = np.abs(np.expm1(log_ratio))
    return {"median_ape": float(np.median(off)), "p90_ape": float(np.quantile(off, 0.9))}


_TAIL_90 = 1.6449  # of a normal distribution, 5 % on each side
_SHOWN = 3


def _terms(steps: TimedSteps, made: TermEstimate) -> list[dict[str, Any]]:
    """Return each term: factor, 90 % interval, whether it is known and by which steps, what it is tied to."""
    slopes, sds = steps.slopes(made.log_factors), made.sds
    correlation = made.covariance / np.outer(sds, sds)
    found = []
    for place, (term, log_factor, sd) in enumerate(zip(steps.terms, made.log_factors, sds, strict=True)):
        order = np.argsort(-slopes[:, place], kind="stable")[:_SHOWN]
        tied = [
            other.name
            for n, other in enumerate(steps.terms)
            if n != place and abs(correlation[place, n]) >= TIED
        ]
        found.append(
            {
                "name": term.name,
                "meaning": term.meaning,
                "constants": list(term.constants),
                "factor": math.exp(log_factor),
                "interval": [math.exp(log_factor - _TAIL_90 * sd), math.exp(log_factor + _TAIL_90 * sd)],
                "prior_interval": [math.exp(-_TAIL_90 * term.sd), math.exp(_TAIL_90 * term.sd)],
                "identified": bool(sd <= IDENTIFIED * term.sd),
                "share_of_step": float(np.median(slopes[:, place])),
                "by": [
                    {"step": steps.names[i], "share_of_step": float(slopes[i, place])}
                    for i in order
                    if slopes[i, place] >= _LEAST_SHARE
                ],
                "tied_to": tied,
            }
        )
    return found


_LEAST_SHARE = 1e-3
