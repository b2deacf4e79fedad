"""How numbers are written for people: one unit each, three significant digits.

Memory is GiB (2^30 bytes), MiB or KiB only where GiB would show nothing; money is US dollars. Unknown is a
dash, never zero.
"""

from __future__ import annotations

import math

UNKNOWN = "-"
_TIME_UNITS = ((86400.0, "days"), (3600.0, "h"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_DECIMAL_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_COUNT_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_MEMORY_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_BINARY_UNITS = (*((float(size), unit) for unit, size in _MEMORY_UNITS.items()), (1.0, "B"))
_LEAST_SHOWN = {"GiB": 0.05, "MiB": 0.5, "KiB": 0.0}
_LEAST_S = 1e-12  # less is what rounding leaves of a difference
_LEAST_DAYS = 2  # shorter times are told in hours


def digits(value: float, significant: int = 3) -> str:
    """Return the number with `significant` digits, never in exponent form, thousands kept whole."""
    if value == 0:
        return "0"
    shown = float(f"{value:.{significant}g}")
    places = significant - 1 - math.floor(math.log10(abs(shown)))
    return f"{shown:.{places}f}" if places > 0 else f"{value:,.0f}"


def _unit_of(value: float, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    """Return the largest unit of which the number as it is shown has one: 999.9 million is 1.00 B."""
    shown = abs(float(f"{value:.3g}"))
    return next((pair for pair in units if shown >= pair[0]), units[-1])


def _in_units(value: float, units: tuple[tuple[float, str], ...], of: str = "") -> str:
    scale, unit = _unit_of(value, units)
    return f"{digits(value / scale)} {unit}{of}".rstrip()


def _time_units(value: float) -> tuple[tuple[float, str], ...]:
    return _TIME_UNITS if value >= _LEAST_DAYS * 86400 else _TIME_UNITS[1:]


def seconds(value: float | None) -> str:
    """Return a duration with its unit.

    Examples
    --------
    >>> seconds(0.01834)
    '18.3 ms'
    """
    if value is None:
        return UNKNOWN
    if abs(value) < _LEAST_S:
        return "0 s"
    return _in_units(value, _time_units(value))


def seconds_range(low: float, high: float) -> str:
    """Return two durations in the unit of the larger one, as `1.71-1.96 s`."""
    scale, unit = _unit_of(high, _time_units(high))
    return f"{digits(low / scale)}-{digits(high / scale)} {unit}"


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
    """Return bytes with their unit, one decimal."""
    if not num_bytes:
        return "0 B"
    unit = memory_unit(num_bytes)
    return f"{memory_in(unit, num_bytes)} {unit}"


def size(num_bytes: float) -> str:
    """Return bytes with their unit, three digits.

    Examples
    --------
    >>> size(80 * 2**30)
    '80.0 GiB'
    """
    return _in_units(num_bytes, _BINARY_UNITS)


def rate(bytes_per_s: float) -> str:
    """Return a bandwidth in decimal bytes per second.

    Examples
    --------
    >>> rate(50e9)
    '50.0 GB/s'
    """
    return _in_units(bytes_per_s, _DECIMAL_UNITS, "B/s")


def percent(fraction: float | None, places: int = 1) -> str:
    """Return a fraction as a percentage."""
    return UNKNOWN if fraction is None else f"{100 * fraction:.{places}f} %"


def gain(fraction: float | None) -> str:
    """Return a relative change as a percentage with its sign."""
    return UNKNOWN if fraction is None else f"{100 * fraction:+.1f} %"


def longer(ratio: float) -> str:
    """Return how much longer something takes: a percentage, or from ten times on how many times as long."""
    return f"{ratio:,.0f} times as long" if ratio >= 10.0 else f"{percent(ratio - 1.0)} longer"


def usd(value: float | None) -> str:
    """Return dollars with cents below a thousand, whole above."""
    if value is None:
        return UNKNOWN
    if abs(value) < 0.01 and value:
        return f"${digits(value)}"
    return f"${value:,.2f}" if abs(value) < 1000 else f"${value:,.0f}"


def count(value: float | None) -> str:
    """Return a count with k, M, B or T."""
    return UNKNOWN if value is None else _in_units(value, _COUNT_UNITS)


def joules(value: float | None) -> str:
    """Return an energy with its unit."""
    return UNKNOWN if value is None else _in_units(value, _DECIMAL_UNITS[1:], "J")


def watt_hours(value_j: float | None) -> str:
    """Return an energy as it is billed.

    Examples
    --------
    >>> watt_hours(5.4e9)
    '1.50 MWh'
    """
    return UNKNOWN if value_j is None else _in_units(value_j / 3600.0, _DECIMAL_UNITS, "Wh")
