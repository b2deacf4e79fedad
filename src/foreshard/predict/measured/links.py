"""Links as they were measured: a message or a sum takes a least time, and no less than its bytes need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from foreshard.spec.codec import Range

Seconds = Annotated[float, Range(0.0)]
Rate = Annotated[float, Range(1e-9, 1e30)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """What ranks of one host, or of several, were measured to need."""

    # a message takes max(floor_s, bytes / bytes_per_s)
    floor_s: Seconds
    bytes_per_s: Rate
    # a sum over m ranks takes max(2 (m - 1) hop_s, 2 (m - 1)/m bytes / ring_bytes_per_s)
    hop_s: Seconds
    ring_bytes_per_s: Rate
    relative_error: float  # median error of both fits over the sizes measured

    def message_s(self, num_bytes: Any) -> Any:
        """Return the seconds of a message one way; `num_bytes` is a number or an array."""
        return np.maximum(self.floor_s, num_bytes / self.bytes_per_s)

    def ring_s(self, num_ranks: int, num_bytes: Any) -> Any:
        """Return the seconds of an all-reduce over two or more ranks."""
        hops = 2 * (num_ranks - 1)
        return np.maximum(hops * self.hop_s, hops / num_ranks * num_bytes / self.ring_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """Links between ranks of one host and between hosts; None where not measured."""

    within: LinkCost | None = None
    across: LinkCost | None = None

    def between(self, *, apart: bool) -> LinkCost | None:
        """Return the link of ranks on one host or on several."""
        return self.across if apart else self.within
