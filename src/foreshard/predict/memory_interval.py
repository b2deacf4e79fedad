"""How sure a predicted peak of memory is: intervals, and the probability that it fits.

A residual is log(measured / predicted) of a published run; no constant of memory was fitted to any.
Frameworks that keep memory alike (one memory profile is the base of the other) share residuals; kin with
fewer than 20 take those of all. Allocated and reserved bytes have residuals of their own.
`data/memory_residuals.json` is written by `scripts/memory_residuals.py`.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from foreshard.catalog.shipped import shipped
from foreshard.errors import SpecError
from foreshard.predict.interval import LEVEL, conformal_quantile, signed_quantiles
from foreshard.spec.codec import invalid
from foreshard.spec.framework import Framework

OWN = 20
"""Runs from which kin of frameworks are judged by themselves."""
_ROUNDING = 1e-9


def kin(framework: Framework) -> str:
    """Return the memory profile that a framework's own goes back to.

    Examples
    --------
    >>> from foreshard.catalog.frameworks import load_framework
    >>> kin(load_framework("megatron-bridge"))
    'megatron-core'
    """
    table, name = shipped("memory_profiles.toml"), framework.memory
    while "base" in table[name]:
        name = table[name]["base"]
    return name


@cache
def _of(figure: str, name: str) -> tuple[float, ...]:
    """Return the sorted residuals by which kin are judged."""
    own = shipped("memory_residuals.json")[figure]
    if len(own.get(name, ())) >= OWN:
        return tuple(own[name])
    return tuple(sorted(value for values in own.values() for value in values))


def memory_interval(
    framework: Framework, peak_bytes: float, *, figure: str = "reserved"
) -> tuple[float, float]:
    """Return (low, high) between which the measured peak lies with probability at least `LEVEL`.

    `figure` is what is measured: 'allocated' or 'reserved' bytes.
    """
    low, high = signed_quantiles(_of(figure, kin(framework)), LEVEL)
    return peak_bytes * math.exp(min(low, 0.0)), peak_bytes * math.exp(max(high, 0.0))


def fits_probability(framework: Framework, peak_bytes: float, capacity_bytes: float) -> float:
    """Return the probability, never overstated, that a predicted peak stays within the capacity.

    Of n runs k had a residual within the room that is left: k / (n + 1), the rank of the next run among them.

    Source
    ------
    Vovk, Gammerman, Shafer 2005, section 2.2.
    """
    known = _of("reserved", kin(framework))
    room = math.log(capacity_bytes / peak_bytes) + _ROUNDING if peak_bytes > 0 else math.inf
    return float(np.searchsorted(known, room, side="right")) / (len(known) + 1)


def usable_share(framework: Framework, probability: float) -> float:
    """Return the share of a capacity that a predicted peak may take to fit with this probability.

    Raises
    ------
    SpecError
        For a probability outside [0, 1), or one that so few runs cannot show.
    """
    flag = "--memory-margin"
    is_number = isinstance(probability, int | float) and not isinstance(probability, bool)
    if not is_number or not 0.0 <= probability < 1.0:
        raise invalid(probability, "Must be a probability of at least 0 and below 1", key=flag, name="margin")
    known = _of("reserved", kin(framework))
    most = len(known) / (len(known) + 1)
    if probability > most:
        raise SpecError(
            f"{len(known)} runs of known memory cannot show a probability of {probability:g}",
            key=flag,
            value=probability,
            rule=f"At most {most:.3f} for {framework.label}",
            fix="Lower it, or leave it out",
        )
    if probability == 0.0:
        return 1.0
    return math.exp(-max(0.0, conformal_quantile(known, probability)))
