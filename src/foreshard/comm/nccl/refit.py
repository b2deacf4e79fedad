"""Constants of NCCL's own model refitted to measured times, as far as these times tell them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foreshard.comm.nccl.choice import nccl_choice
from foreshard.comm.nccl.communicator import Communicator
from foreshard.comm.nccl.constants import OWN, shipped_constants
from foreshard.comm.nccl.estimates import COLLECTIVES, estimate
from foreshard.comm.refit import least_squares, robust
from foreshard.errors import SpecError, unknown

Label = tuple[str, str]
"""An algorithm and a protocol, as `ALGORITHMS` and `PROTOCOLS` name them."""
_LEAST_ROWS = 3  # of an algorithm with a protocol: latency, bandwidth, and one that can contradict
_TOLD = 0.02  # change of times, root mean square, that a change of a constant by its own size must make
_ALIKE = 1e-6  # 1 - cosine between what two constants change
_STEP = 1e-4
_BANDWIDTHS = OWN[2:]


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclRun:
    """Measured times of a collective on a communicator, and which algorithm and protocol each size ran."""

    collective: str
    communicator: Communicator
    num_bytes: NDArray[np.float64]
    time_s: NDArray[np.float64]
    labels: tuple[Label, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclRefit:
    """What measured times tell of NCCL's constants.

    constants : those that moved, in the table's units
    shared : sets of them of which the times tell only a common factor
    kept : of the algorithms and protocols that ran, constants that the times do not tell
    reached : by algorithm and protocol whose bandwidth is that of the channels, no constant: the share of it
        that the times reach
    few : algorithms and protocols with too few sizes
    """

    constants: Mapping[str, float]
    shared: tuple[tuple[str, ...], ...]
    kept: tuple[str, ...]
    reached: Mapping[Label, float]
    few: tuple[Label, ...]
    median_error_before: float
    median_error: float


def labels_of(
    collective: str,
    num_bytes: Sequence[float],
    comm: Communicator,
    stated: Mapping[int, Label] | None = None,
) -> tuple[Label, ...]:
    """Return what ran at each size: as stated, else what NCCL picks by its own constants.

    Raises
    ------
    SpecError
        Of a collective that NCCL has no algorithms for.
    """
    if collective not in COLLECTIVES:
        raise unknown("collective", collective, COLLECTIVES, key="--collective", rule="NCCL has constants of")
    found = []
    for size in num_bytes:
        picked = nccl_choice(collective, size, comm).best
        assert picked is not None
        found.append((stated or {}).get(int(size), (picked.algorithm, picked.protocol)))
    return tuple(found)


def refit_nccl(runs: Sequence[NcclRun]) -> NcclRefit:
    """Return the constants of NCCL's tables with which its estimates are nearest to measured times.

    A constant moves if the times depend on it; those of which they depend in the same way (the latency before
    the first hop and that of the hops, on one communicator) move by one factor. All others stay. Where a
    bandwidth is that of the channels that NCCL finds in the topology, it has no constant: what is reached of
    it is fitted beside them, so that latencies do not take its error. Sum of robust squares of log errors.

    Raises
    ------
    SpecError
        No algorithm with a protocol has three sizes, or one of those stated cannot run.
    """
    rows = [row for run in runs for row in _rows(run)]
    counted = {
        label: sum(row.label == label for row in rows) for label in dict.fromkeys(r.label for r in rows)
    }
    few = tuple(label for label, count in counted.items() if count < _LEAST_ROWS)
    rows = [row for row in rows if row.label not in few]
    if not rows:
        raise SpecError(
            "too few sizes to fit NCCL's constants to",
            key="--fit-nccl",
            rule=f"An algorithm with a protocol needs {_LEAST_ROWS} sizes or more",
            fix="Give the whole output of a sweep, as all_reduce_perf -b 8 -e 8G -f 2",
        )
    release = runs[0].communicator.release
    shipped = {name: value for name, value in shipped_constants(release).items() if value > 0.0}
    base = _log_times(rows, {}, {})
    slopes = {
        name: (_log_times(rows, {name: value * (1.0 + _STEP)}, {}) - base) / _STEP
        for name, value in shipped.items()
    }
    touched = [name for name, slope in slopes.items() if slope.any()]
    told = [name for name in touched if np.sqrt(np.mean(slopes[name] ** 2)) >= _TOLD]
    groups = _alike(told, slopes)
    free = _without_constant(rows, groups, shipped)

    def moved(x: NDArray[np.float64]) -> tuple[dict[str, float], dict[Label, float]]:
        factors = np.exp(x)
        constants = {
            name: shipped[name] * float(factor)
            for group, factor in zip(groups, factors, strict=False)
            for name in group
        }
        shares = factors[len(groups) :]
        return constants, {label: float(share) for label, share in zip(free, shares, strict=True)}

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return robust(_log_times(rows, *moved(x)) - measured)

    measured = np.log([row.time_s for row in rows])
    constants, reached = moved(least_squares(residuals, len(groups) + len(free)))
    before, after = (np.abs(np.expm1(times - measured)) for times in (base, _log_times(rows, constants, {})))
    return NcclRefit(
        constants=constants,
        shared=tuple(group for group in groups if len(group) > 1),
        kept=tuple(name for name in touched if name not in told),
        reached=reached,
        few=few,
        median_error_before=float(np.median(before)),
        median_error=float(np.median(after)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One measured time."""

    collective: str
    communicator: Communicator
    num_bytes: float
    time_s: float
    label: Label


def _rows(run: NcclRun) -> list[_Row]:
    for algorithm, protocol in dict.fromkeys(run.labels):
        reason = estimate(run.collective, 1.0, algorithm, protocol, run.communicator).reason
        if reason:
            raise SpecError(
                f"{algorithm}/{protocol} of an {run.collective} on these ranks",
                key="--algorithm",
                value=f"{algorithm}/{protocol}",
                rule=f"It cannot run here: {reason}",
                fix="State what ran, or leave it out",
            )
    return [
        _Row(
            collective=run.collective, communicator=run.communicator, num_bytes=size, time_s=time, label=label
        )
        for size, time, label in zip(run.num_bytes.tolist(), run.time_s.tolist(), run.labels, strict=True)
    ]


def _log_times(
    rows: Sequence[_Row], constants: Mapping[str, float], reached: Mapping[Label, float]
) -> NDArray[np.float64]:
    """Return the logarithms of NCCL's estimates with some constants, and shares of some bandwidths."""
    own = {id(row.communicator): replace(row.communicator, constants=constants) for row in rows}
    times = []
    for row in rows:
        found = estimate(row.collective, row.num_bytes, *row.label, own[id(row.communicator)])
        share = reached.get(row.label, 1.0)
        times.append(found.latency_s + row.num_bytes / (found.bytes_per_s * share))
    return np.log(times)


def _alike(told: Sequence[str], slopes: Mapping[str, NDArray[np.float64]]) -> list[tuple[str, ...]]:
    """Return the constants in groups that change all times in the same proportions."""
    groups: list[tuple[str, ...]] = []
    for name in told:
        slope = slopes[name]
        for i, group in enumerate(groups):
            other = slopes[group[0]]
            cosine = float(slope @ other / np.sqrt((slope @ slope) * (other @ other)))
            if cosine >= 1.0 - _ALIKE:
                groups[i] = (*group, name)
                break
        else:
            groups.append((name,))
    return groups


def _without_constant(
    rows: Sequence[_Row], groups: Sequence[tuple[str, ...]], shipped: Mapping[str, float]
) -> list[Label]:
    """Return the algorithms and protocols whose bandwidth no constant that moves bounds."""
    names = [name for group in groups for name in group if name.split(".")[0] in _BANDWIDTHS]
    bounded = set()
    for name in names:
        less = {name: shipped[name] * (1.0 - _STEP)}  # a limit that is just reached binds from here on
        changed = np.abs(_log_times(rows, less, {}) - _log_times(rows, {}, {})) > 0.0
        bounded |= {row.label for row, change in zip(rows, changed.tolist(), strict=True) if change}
    return [label for label in dict.fromkeys(row.label for row in rows) if label not in bounded]
