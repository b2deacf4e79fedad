"""Time of a compressed sum against the plain one, and the bandwidth below which it is faster.

A sum takes what it takes to encode and decode, the latency of its collectives and its bytes over the
bandwidth. Only what no computation hides counts: where the plain sum ends within the backward, no compression
gains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreshard.comm.compression.methods import CompressionMethod, wire_bytes


@dataclass(frozen=True, slots=True)
class LinearTime:
    """Seconds as a function of bandwidth: fixed seconds, and bytes that pass the link of a rank."""

    fixed_s: float
    num_bytes: float

    def at(self, bytes_per_s: float) -> float:
        """Return the seconds at a bandwidth of each rank's link."""
        return self.fixed_s + self.num_bytes / bytes_per_s


def plain_time(num_bytes: float, num_ranks: int, latency_s: float) -> LinearTime:
    """Return the time of a ring all-reduce of so many bytes.

    Source
    ------
    Thakur, Rabenseifner, Gropp 2005: 2 (p - 1) messages of 1/p of the bytes.

    Examples
    --------
    >>> plain_time(8.0, 4, 1.0)
    LinearTime(fixed_s=6.0, num_bytes=12.0)
    """
    messages = 2 * (num_ranks - 1)
    return LinearTime(messages * latency_s, messages / num_ranks * num_bytes)


def compressed_time(
    method: CompressionMethod,
    shapes: Sequence[Sequence[int]],
    num_ranks: int,
    latency_s: float,
    *,
    encode_s: float,
) -> LinearTime:
    """Return the time of a compressed sum of a bucket of float32 parameters.

    All-reduces and all-gathers go in rings (2 (p - 1) and p - 1 messages), an all-to-all directly.

    Parameters
    ----------
    method : CompressionMethod
    shapes : sequence of shapes
    num_ranks : int
    latency_s : float, seconds
        Of a message.
    encode_s : float, seconds
        To encode and decode, on a rank.
    """
    wire, others = wire_bytes(method, shapes, num_ranks), num_ranks - 1
    sums = wire.steps if wire.summed else 0
    messages = others * (2 * sums + (wire.gathered > 0) + (wire.exchanged > 0))
    moved = (
        2 * others / num_ranks * wire.summed + others * wire.gathered + others / num_ranks * wire.exchanged
    )
    return LinearTime(encode_s + messages * latency_s, moved)


def crossover_bytes_per_s(plain: LinearTime, compressed: LinearTime) -> float:
    """Return the bandwidth below which the compressed sum is faster; 0 for none, infinity for any.

    A method that moves more bytes is never preferred, though fewer messages may make it faster on links that
    are fast.

    Examples
    --------
    >>> crossover_bytes_per_s(LinearTime(0.0, 100.0), LinearTime(1.0, 20.0))
    80.0
    """
    saved, added_s = plain.num_bytes - compressed.num_bytes, compressed.fixed_s - plain.fixed_s
    if saved <= 0.0:
        return 0.0
    return saved / added_s if added_s > 0.0 else math.inf


def exposed_s(seconds: float, hidden_s: float) -> float:
    """Return what of a sum is not hidden by so many seconds of computation beside it.

    Examples
    --------
    >>> exposed_s(0.5, 0.2), exposed_s(0.1, 0.2)
    (0.3, 0.0)
    """
    return max(0.0, seconds - hidden_s)


def touched_bytes(method: CompressionMethod, num_bytes: float, num_ranks: int) -> float:
    """Return the bytes that a device reads and writes to compress, sum and decode a bucket of so many.

    Counted in passes over the bucket: three to add what was left out before and three to keep what is left
    out now, and those of the method. PowerSGD: two products read, two are written. Top-k: magnitudes,
    selection twice, one zeroed and one scattered. Signs: magnitudes and signs read once, and of every rank
    one unpacked and one added. 8 bits: largest numbers, numbers scaled and rounded, both sums decoded.

    Examples
    --------
    >>> touched_bytes(CompressionMethod("powersgd", 4), 8.0, 2)
    80.0
    """
    own = {"powersgd": 4.0, "topk": 5.0, "onebit": 2.0 + 3.0 * num_ranks, "int8": 6.0, "fp8": 6.0}
    return (6.0 + own[method.name]) * num_bytes
