"""Constants of collectives refitted to what was measured on a cluster, by few factors on the shipped ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshard.comm.fabric import Fabric, fabric_between
from foreshard.comm.prediction import collective_s
from foreshard.errors import SpecError
from foreshard.spec.cluster import Cluster

_LATENCIES = ("launch_s", "hop_s", "exchange_launch_s", "exchange_hop_s", "switch_launch_s")
_RAMPS = ("ramp", "exchange_ramp", "switch_ramp")
_EXCHANGES = ("all-to-all", "send")
_PULL = 0.3  # to the shipped constants, in residuals per e-fold, as in the fit of those
_ROBUST = 0.1  # error from which a row counts less
_TURNS, _STEP = 60, 1e-4
_LEAST_ROWS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Measured times of one collective over so many ranks; arrays of equal length."""

    collective: str
    num_ranks: int
    num_bytes: NDArray[np.float64]
    time_s: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """The constants that measured runs ask for, and the median error before and after."""

    constants: Mapping[str, float]  # that moved, by the names of `Fabric`
    factors: Mapping[str, float]  # on the shipped constants, by what they describe
    median_error_before: float
    median_error: float


def refit(cluster: Cluster, runs: Sequence[MeasuredRun]) -> Refit:
    """Return the constants of collectives that fit measured runs on the first devices of a cluster best.

    A few factors move: on all latencies, all ramps, the bandwidth shares of rings, of the switch, of
    exchanges; with ranks on several nodes those on the network's latency and bandwidth share. Each is pulled
    to 1, so that what the runs do not tell stays as shipped. Sum of robust squares of log errors.

    Raises
    ------
    SpecError
        Fewer than three rows, or ranks that the cluster does not have.
    """
    if sum(len(run.num_bytes) for run in runs) < _LEAST_ROWS:
        raise SpecError(
            "too few rows to fit constants to",
            key="--fit",
            rule=f"A fit needs {_LEAST_ROWS} rows or more, of several sizes",
            fix="Give the whole output of a sweep, as all_reduce_perf -b 1K -e 1G -f 2",
        )
    fabrics = [fabric_between(cluster, range(run.num_ranks)) for run in runs]
    factors = _factors(runs, fabrics)
    found = least_squares(lambda x: _residuals(x, factors, runs, fabrics), len(factors))
    before = _median_error(runs, fabrics)
    moved = [_moved(fabric, found, factors) for fabric in fabrics]
    names = [name for group in factors.values() for name in group]
    return Refit(
        constants={name: float(getattr(moved[-1], name)) for name in names},
        factors={name: float(np.exp(value)) for name, value in zip(factors, found, strict=True)},
        median_error_before=before,
        median_error=_median_error(runs, moved),
    )


def _factors(runs: Sequence[MeasuredRun], fabrics: Sequence[Fabric]) -> dict[str, tuple[str, ...]]:
    """Return the constants that move together, by what their factor describes; those that runs can tell."""
    collectives = {run.collective for run in runs}
    found = {"latency": _LATENCIES, "ramp": _RAMPS}
    if collectives - set(_EXCHANGES):
        found["ring bandwidth"] = ("ring_eff", "gather_eff")
    if "all-reduce" in collectives and any(fabric.in_network for fabric in fabrics):
        found["switch bandwidth"] = ("switch_eff",)
    if collectives & set(_EXCHANGES):
        found["exchange bandwidth"] = ("exchange_eff",)
    if any(run.num_ranks > fabric.domain for run, fabric in zip(runs, fabrics, strict=True)):
        found["network latency"] = ("nic_latency_s", "nic_launch_s")
        found["network bandwidth"] = ("nic_ring_eff", "nic_tree_eff", "nic_exchange_eff")
    return found


def _moved(fabric: Fabric, x: NDArray[np.float64], factors: Mapping[str, tuple[str, ...]]) -> Fabric:
    """Return the fabric with its constants times the factors; no share of a datasheet rate passes 1."""
    changed: dict[str, Any] = {}
    for value, names in zip(np.exp(x), factors.values(), strict=True):
        for name in names:
            moved = getattr(fabric, name) * value
            changed[name] = min(moved, 1.0) if name.endswith("_eff") else moved
    return replace(fabric, **changed)


def _residuals(
    x: NDArray[np.float64],
    factors: Mapping[str, tuple[str, ...]],
    runs: Sequence[MeasuredRun],
    fabrics: Sequence[Fabric],
) -> NDArray[np.float64]:
    """Return weighted robust log errors and the pull to the shipped constants."""
    errors = np.concatenate(
        [
            np.log(_times(run, _moved(fabric, x, factors)) / run.time_s)
            for run, fabric in zip(runs, fabrics, strict=True)
        ]
    )
    return np.concatenate((robust(errors) * 4.0 / np.sqrt(len(errors)), _PULL * x))


def robust(errors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return residuals whose squares sum to the soft L1 of log errors."""
    small = _ROBUST * np.sqrt(2.0 * (np.sqrt(1.0 + (errors / _ROBUST) ** 2) - 1.0))
    return np.asarray(small * np.sign(errors))


def _times(run: MeasuredRun, fabric: Fabric) -> NDArray[np.float64]:
    return np.asarray(collective_s(run.collective, run.num_bytes, run.num_ranks, fabric), dtype=float)


def _median_error(runs: Sequence[MeasuredRun], fabrics: Sequence[Fabric]) -> float:
    errors = [
        np.abs(_times(run, fabric) / run.time_s - 1.0) for run, fabric in zip(runs, fabrics, strict=True)
    ]
    return float(np.median(np.concatenate(errors)))


def least_squares(residuals: Any, size: int) -> NDArray[np.float64]:
    """Return where the sum of squares is least, by Levenberg's and Marquardt's method from 0."""
    x, damping = np.zeros(size), 1e-2
    left = residuals(x)
    for _ in range(_TURNS):
        slope = np.stack([(residuals(x + _STEP * unit) - left) / _STEP for unit in np.eye(size)], axis=1)
        step = np.linalg.solve(slope.T @ slope + damping * np.eye(size), -slope.T @ left)
        tried = residuals(x + step)
        if tried @ tried < left @ left:
            x, left, damping = x + step, tried, damping / 3.0
        else:
            damping *= 4.0
        if np.abs(step).max() < 1e-7:
            break
    return x
