"""Human quantities in, SI floats out.

Inside foreshard every quantity is an SI float whose unit is in its name. Strings with units exist only
at the edge: this file reads those of TOML and flags, `quantity` writes them. Bits appear only here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from typing import NamedTuple

from foreshard.errors import SpecError

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_MILLI = {"m": 1e-3}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60}
_TIME = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_TIME |= dict.fromkeys(("sec", "secs", "second", "seconds"), 1.0)
_TIME |= dict.fromkeys(("mins", "minute", "minutes"), 60.0)
_TIME |= dict.fromkeys(("hr", "hrs", "hour", "hours"), 3600.0)
_TIME |= dict.fromkeys(("d", "day", "days"), 86400.0) | dict.fromkeys(("w", "week", "weeks"), 7 * 86400.0)
_TIME |= dict.fromkeys(("msec", "millisecond", "milliseconds"), 1e-3)
_TIME |= dict.fromkeys(("yr", "year", "years"), 365.25 * 86400.0)
_QUANTITY = re.compile(
    r"\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(\S(?:.*\S)?)?\s*", re.DOTALL
)
_COUNTED = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE]\+?([0-9]{1,2}))?\s*([a-z]*)", re.IGNORECASE)
# Powers of a thousand that words and letters stand for; "m" of a count is a million, never a thousandth.
_MAGNITUDES = {"": 0, "k": 1, "m": 2, "b": 3, "t": 4, "thousand": 1, "bn": 3, "tn": 4}
_MAGNITUDES |= {"mn": 2, "mio": 2, "million": 2, "billion": 3, "trillion": 4}
_BINARY_COUNTS = {"ki": 1, "mi": 2}
# Longer text is never a quantity; echoing it would drown the error message.
_MAX_CHARS = 64


def _scaled(prefixes: Mapping[str, float], *units: str) -> dict[str, float]:
    return {prefix + unit: scale for unit in units for prefix, scale in prefixes.items()}


class _Dimension(NamedTuple):
    what: str
    example: str
    units: Mapping[str, float]  # as written -> factor to SI


@cache
def _dimensions() -> Mapping[str, _Dimension]:
    sizes = _scaled(_DECIMAL | _BINARY, "B")
    bits = _scaled(_DECIMAL | _BINARY, "b", "bit")
    rates = {unit + "/s": scale for unit, scale in sizes.items()}
    rates |= {unit + "/s": scale / 8 for unit, scale in bits.items()}
    rates |= {unit: scale / 8 for unit, scale in _scaled(_DECIMAL, "bps").items()}
    rates |= {unit: 1e9 / 8 for unit in ("GbE", "GigE")}  # Ethernet is named by its Gb/s
    joules = _scaled(_DECIMAL | _MILLI, "J") | {"Wh": 3600.0, "kWh": 3.6e6, "MWh": 3.6e9}
    prices = {f"{coin}/{hour}": 1.0 for coin in ("USD", "$") for hour in ("h", "hr", "hour")}
    prices |= {f"{coin} per hour": 1.0 for coin in ("USD", "$")}
    flop_rates = _scaled(_DECIMAL, "FLOP/s", "FLOPS", "FLOPs", "FLOPs/s")
    return {
        "bytes": _Dimension("A size", "80 GiB", sizes),
        "bytes_per_s": _Dimension("A rate", "400 Gb/s", rates),
        "s": _Dimension("A time", "5 us", _TIME),
        "flops": _Dimension("A number of operations", "6 TFLOP", _scaled(_DECIMAL, "FLOP", "FLOPs")),
        "flops_per_s": _Dimension("A rate of operations", "312 TFLOP/s", flop_rates),
        "w": _Dimension("A power", "700 W", _scaled(_DECIMAL | _MILLI, "W")),
        "j": _Dimension("An energy", "3.6 MJ", joules),
        "hz": _Dimension("A frequency", "1980 MHz", _scaled(_DECIMAL, "Hz")),
        "kg": _Dimension("A mass", "0.5 kg", {"g": 1e-3, "kg": 1.0, "t": 1e3}),
        "part": _Dimension("A part", "50 %", {"%": 0.01}),
        "usd": _Dimension("A price", "20 USD", {"USD": 1.0, "$": 1.0}),
        "usd_per_h": _Dimension("A price per hour", "98.32 USD/h", prices),
    }


def parse(text: object, dimension: str) -> float:
    """Return a quantity written with its unit as a float in SI units.

    Case carries meaning: ``Gb/s`` is bits, ``GB/s`` bytes. Written in one case throughout, a unit is read
    where it can be one only: ``gbps`` and ``gb`` are, ``gb/s`` is not. ``GB`` is 1e9 bytes, ``GiB`` 2**30.

    Parameters
    ----------
    text : str
        A non-negative number and a unit, for instance ``"80 GiB"``, ``"400 Gb/s"``, ``"5 us"``.
    dimension : str
        ``bytes``, ``bytes_per_s``, ``s``, ``flops``, ``flops_per_s``, ``w``, ``j``, ``hz``, ``kg``, ``part``,
        ``usd`` or ``usd_per_h``.

    Returns
    -------
    float, in the unit the dimension names

    Raises
    ------
    SpecError
        If the text is no such quantity, has no unit, is negative or is not finite.

    Examples
    --------
    >>> parse("400 Gb/s", "bytes_per_s")
    50000000000.0
    >>> parse("2 KiB", "bytes")
    2048.0
    """
    kind = _dimensions()[dimension]
    rule = f"{kind.what} is a non-negative number with a unit"
    fix = f"Write it like '{kind.example}'"
    if not isinstance(text, str):
        raise SpecError(f"{text!r:.{_MAX_CHARS}} has no unit", value=text, rule=rule, fix=fix)
    match = _QUANTITY.fullmatch(text) if len(text) <= _MAX_CHARS else None
    if match is None:
        raise SpecError(f"cannot read '{text:.{_MAX_CHARS}}'", value=text[:_MAX_CHARS], rule=rule, fix=fix)
    number, unit = match.groups()
    if unit is None:
        raise SpecError(f"'{text.strip()}' has no unit", value=text, rule=rule, fix=fix)
    scale = kind.units.get(unit)
    near = {kind.units[name] for name in _in_any_case(unit, kind)}
    if scale is None and len(near) == 1 and (unit.islower() or unit.isupper()):
        (scale,) = near
    if scale is None:
        raise SpecError(f"unknown unit '{unit}'", value=text, rule=rule, fix=_unit_fix(unit, kind))
    value = float(number) * scale
    if not math.isfinite(value) or value < 0:
        raise SpecError(f"'{text.strip()}' is out of range", value=text, rule=rule, fix=fix)
    return value


def _in_any_case(unit: str, kind: _Dimension) -> list[str]:
    return [name for name in kind.units if name.lower() == unit.lower()]


def _unit_fix(unit: str, kind: _Dimension) -> str:
    near = _in_any_case(unit, kind)
    near = near or get_close_matches(unit, kind.units, n=2)
    meant = " or ".join(f"'{name}'" for name in near[:2])
    return f"Did you mean {meant}?" if near else f"Write it like '{kind.example}'"


def count(text: str, *, thousand: int = 1000) -> float | None:
    """Return a number of things written with k, M, B or T or as a word, None where the text is none.

    Parameters
    ----------
    text : str
        As ``8192``, ``2e9``, ``2B``, ``1.5 trillion`` or ``128k``, in any case.
    thousand : {1000, 1024}
        What each of these letters multiplies by. ``Ki`` and ``Mi`` always mean powers of 1,024.

    Returns
    -------
    float or None

    Examples
    --------
    >>> count("2B"), count("128k", thousand=1024), count("8Ki")
    (2000000000.0, 131072.0, 8192.0)
    """
    match = _COUNTED.fullmatch(text.strip()) if len(text) <= _MAX_CHARS else None
    if match is None:
        return None
    number, ten, letters = float(match[1]) * 10.0 ** int(match[2] or 0), match[2], match[3].lower()
    if letters in _BINARY_COUNTS and not ten:
        return number * 1024.0 ** _BINARY_COUNTS[letters]
    if letters not in _MAGNITUDES or (letters and ten):
        return None
    return number * float(thousand) ** _MAGNITUDES[letters]


_GROUPED = re.compile(r"[0-9]{1,3}(,[0-9]{3})+|[0-9]{1,3}(_[0-9]{3})+|[0-9]{1,3}( [0-9]{3})+")
_TOKENS = re.compile(r"\s+tokens?$|(?<=[0-9][kmbt])t$", re.IGNORECASE)
"""What may follow a number of tokens: the word, or a T as in 300BT."""
_COIN = re.compile(r"\s*(?:\$|usd)$", re.IGNORECASE)
_PER_DEVICE_HOUR = re.compile(
    r"\s*(?:/|per )\s*(?:(?:gpu|device|chip)\s*(?:-|/|per)?\s*)?h(?:r|our)?$", re.IGNORECASE
)


def ungrouped(text: str) -> str:
    """Return a number without the marks between its thousands, other text as it is.

    Examples
    --------
    >>> ungrouped("1,000,000"), ungrouped("8k"), ungrouped("1,00")
    ('1000000', '8k', '1,00')
    """
    text = text.strip()
    return re.sub("[,_ ]", "", text) if _GROUPED.fullmatch(text) else text


def num_tokens(text: str, *, thousand: int = 1000) -> float | None:
    """Return a number of tokens as `count` reads it, the word itself allowed, None where the text is none.

    Examples
    --------
    >>> num_tokens("8k tokens", thousand=1024), num_tokens("2,000,000"), num_tokens("3BT"), num_tokens("long")
    (8192.0, 2000000.0, 3000000000.0, None)
    """
    return count(ungrouped(_TOKENS.sub("", text.strip())), thousand=thousand)


def amount(text: str, dimension: str | None = None, unit: str | None = None) -> float | None:
    """Return an amount as people write it, with its unit or without, None where the text is none.

    Parameters
    ----------
    text : str
        As ``1,000``, ``1.5 d``, ``2B tokens`` or ``$2.50 per GPU hour``.
    dimension : str, optional
        As of :func:`parse`, or ``tokens``. Tokens and dollars may be counted in k, M, B and T.
    unit : str, optional
        What a number without a unit is in, and the result; default the unit that `dimension` names.

    Returns
    -------
    float or None

    Examples
    --------
    >>> amount("2d", "s", "h"), amount("250ms", "s"), amount("$2.5/h", "usd_per_h", "USD/h")
    (48.0, 0.25, 2.5)
    >>> amount("2B tokens", "tokens"), amount("fast", "s")
    (2000000000.0, None)
    """
    text = ungrouped(text)
    if dimension in ("usd", "usd_per_h"):
        text = ungrouped(_COIN.sub("", _PER_DEVICE_HOUR.sub("", text.removeprefix("$").strip())))
    with suppress(ValueError, OverflowError):
        return float(text)
    if dimension == "tokens":
        return num_tokens(text)
    if dimension in ("usd", "usd_per_h"):
        return count(text)
    with suppress(SpecError):
        if dimension is not None:
            return parse(text, dimension) / parse(f"1 {unit or dimension}", dimension)
    return None


def number_of(number: int, noun: str) -> str:
    """Write how many of a thing whose plural is an s, or es.

    Examples
    --------
    >>> number_of(1, "plan"), number_of(1043, "plan"), number_of(2, "batch")
    ('1 plan', '1,043 plans', '2 batches')
    """
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"
