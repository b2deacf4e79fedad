"""Methods of compression by name, and what of a bucket each sends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreshard.errors import SpecError, unknown

METHODS = {"powersgd": "RANK", "topk": "FRACTION", "onebit": "", "int8": "", "fp8": ""}
"""Names and what follows a colon behind them."""
BLOCK = 256
"""Numbers of 8 bits that share a scale of 4 bytes."""
_WIDTH = 4  # bytes of a number that is not compressed
_INDEX = 4


@dataclass(frozen=True, slots=True)
class CompressionMethod:
    """A method and its number: the rank of PowerSGD, the part of the entries that top-k keeps."""

    name: str
    value: float = 0.0

    def __str__(self) -> str:
        """Return it as on the command line."""
        return f"{self.name}:{self.value:g}" if METHODS[self.name] else self.name


@dataclass(frozen=True, slots=True)
class WireBytes:
    """What each rank puts into the collectives of one bucket, in bytes.

    An all-reduce of `summed`, an all-gather of `gathered` from every rank, and an all-to-all of `exchanged`,
    of which every rank gets an equal part. `steps` counts collectives.
    """

    summed: float = 0.0
    gathered: float = 0.0
    exchanged: float = 0.0
    steps: int = 1


def compression_method(text: str, *, key: str = "--compress") -> CompressionMethod:
    """Return the method that a text means.

    Raises
    ------
    SpecError

    Examples
    --------
    >>> compression_method("powersgd:4"), str(compression_method("topk:0.01"))
    (CompressionMethod(name='powersgd', value=4.0), 'topk:0.01')
    """
    name, colon, number = text.partition(":")
    if name not in METHODS:
        raise unknown("method", name, tuple(METHODS), key=key, rule="Methods are")
    try:
        value = float(number) if colon else 0.0
    except ValueError:
        value = math.nan
    legal = {
        "powersgd": 1 <= value <= 1024 and value == value // 1,
        "topk": 0.0 < value <= 1.0,
    }.get(name, not colon)
    if not legal:
        rules = {
            "powersgd": "powersgd:RANK with a whole rank of 1 to 1024",
            "topk": "topk:FRACTION with a part of the entries, above 0 and at most 1",
        }
        raise SpecError(f"{text[:40]!r}", key=key, value=text[:40], rule=f"Write {rules.get(name, name)}")
    return CompressionMethod(name, value)


def is_low_rank(shape: Sequence[int], rank: int) -> bool:
    """Return whether factors of a rank are smaller than a matrix, of the first dimension by the rest.

    Examples
    --------
    >>> is_low_rank((64, 64), 4), is_low_rank((64,), 4), is_low_rank((8, 8), 4)
    (True, False, False)
    """
    if len(shape) < 2:
        return False
    rows, columns = shape[0], math.prod(shape[1:])
    return rank * (rows + columns) < rows * columns and rank <= min(rows, columns)


def wire_bytes(method: CompressionMethod, shapes: Sequence[Sequence[int]], num_ranks: int) -> WireBytes:
    """Return what a rank sends of a bucket of float32 parameters.

    Parameters
    ----------
    method : CompressionMethod
    shapes : sequence of shapes
    num_ranks : int

    Examples
    --------
    >>> wire_bytes(CompressionMethod("powersgd", 4), [(1024, 1024), (1024,)], 8).summed
    36864.0
    """
    sizes = [math.prod(shape) for shape in shapes]
    count = sum(sizes)
    if method.name == "powersgd":
        rank = int(method.value)
        small = [is_low_rank(shape, rank) for shape in shapes]
        factors = sum(
            rank * (s[0] + math.prod(s[1:])) for s, is_small in zip(shapes, small, strict=True) if is_small
        )
        whole = sum(size for size, is_small in zip(sizes, small, strict=True) if not is_small)
        return WireBytes(summed=float(_WIDTH * (factors + whole)), steps=1 + any(small))
    if method.name == "topk":
        return WireBytes(gathered=float(max(1, math.ceil(method.value * count)) * (_WIDTH + _INDEX)))
    if method.name == "onebit":
        return WireBytes(gathered=float(-(-count // 8) + _WIDTH * len(sizes)))
    blocks = -(-count // (num_ranks * BLOCK))
    part = blocks * (BLOCK + 4)
    return WireBytes(gathered=float(part), exchanged=float(part * num_ranks), steps=2)
