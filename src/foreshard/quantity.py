"""How numbers are written for people: one unit each, three significant digits.

Time picks s, ms or us; memory is GiB (2^30 bytes), MiB or KiB only where GiB would show nothing; money is US
dollars. Unknown is a dash, never zero.
"""

from __future__ import annotations

import math

UNKNOWN = "-"
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_MEMORY_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_LEAST_SHOWN = {"GiB": 0.05, "MiB": 0.5, "KiB": 0.0}
_COUNT_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def digits(value: float, significant: int = 3) -> str:
    """Return the number with `significant` digits, never in exponent form, thousands kept whole."""
    if value == 0:
        return "0"
    shown = float(f"{value:.{significant}g}")
    places = significant - 1 - math.floor(math.log10(abs(shown)))
    return f"{shown:.{places}f}" if places > 0 else f"{value:,.0f}"


def _rounded(value: float) -> float:
    """Return the size of a number as it is shown, so that 999.9 million is 1.00 B, not 1,000 M."""
    return abs(float(f"{value:.3g}"))


def seconds(value: float | None) -> str:
    """Return a duration with its unit."""
    if value is None:
        return UNKNOWN
    if value >= 2 * 86400:
        return f"{digits(value / 86400)} days"
    if value >= 3600:
        return f"{digits(value / 3600)} h"
    for scale, unit in _TIME_UNITS:
        if _rounded(value) >= scale:
            return f"{digits(value / scale)} {unit}"
    return f"{digits(value / 1e-6)} us" if value else "0 s"


def seconds_range(low: float, high: float) -> str:
    """Return two durations in the unit of the larger one, as `1.71-1.96 s`."""
    for scale, unit in _TIME_UNITS:
        if _rounded(high) >= scale:
            return f"{digits(low / scale)}-{digits(high / scale)} {unit}"
    return f"{seconds(low)}-{seconds(high)}"


def gib(num_bytes: float | None) -> str:
    """Return bytes in GiB with one decimal, without the unit."""
    return memory_in("GiB", num_bytes)


def memory_unit(most_bytes: float) -> str:
    """Return the unit of a column whose largest entry is `most_bytes`: GiB, of small jobs MiB or KiB."""
    if not most_bytes:
        return "GiB"
    return next(unit for unit, size in _MEMORY_UNITS.items() if abs(most_bytes) >= _LEAST_SHOWN[unit] * size)


def memory_in(unit: str, num_bytes: float | None) -> str:
    """Return bytes in GiB, MiB or KiB with one decimal, without the unit."""
    if num_bytes is None:
        return UNKNOWN
    value = num_bytes / _MEMORY_UNITS[unit]
    return f"{value:,.1f}" if abs(value) >= 0.05 or value == 0 else f"{value:.2g}"


def memory(num_bytes: float) -> str:
    """Return bytes with their unit."""
    if not num_bytes:
        return "0 B"
    unit = memory_unit(num_bytes)
    return f"{memory_in(unit, num_bytes)} {unit}"


def percent(fraction: float | None, places: int = 1) -> str:
    """Return a fraction as a percentage."""
    return UNKNOWN if fraction is None else f"{100 * fraction:.{places}f} %"


def usd(value: float | None) -> str:
    """Return dollars with cents below a thousand, whole above."""
    if value is None:
        return UNKNOWN
    if abs(value) < 0.01 and value:
        return f"${digits(value)}"
    return f"${value:,.2f}" if abs(value) < 1000 else f"${value:,.0f}"


def count(value: float | None) -> str:
    """Return a count with k, M, B or T."""
    if value is None:
        return UNKNOWN
    for scale, unit in _COUNT_UNITS:
        if _rounded(value) >= scale:
            return f"{digits(value / scale)} {unit}"
    return digits(value)


def joules(value: float | None) -> str:
    """Return an energy with its unit."""
    if value is None:
        return UNKNOWN
    for scale, unit in ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ")):
        if _rounded(value) >= scale:
            return f"{digits(value / scale)} {unit}"
    return f"{digits(value)} J"
