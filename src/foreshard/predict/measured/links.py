"""Links as they were measured: a message or a sum takes a least time, and no less than its bytes need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """What ranks of one host, or of several, were measured to need.

    Attributes
    ----------
    floor_s, bytes_per_s : float
        A message takes max(floor_s, bytes / bytes_per_s).
    hop_s, ring_bytes_per_s : float
        A sum over m ranks takes max(2 (m - 1) hop_s, 2 (m - 1)/m bytes / ring_bytes_per_s).
    relative_error : float
        Median error of both fits over the sizes measured.
    """

    floor_s: float
    bytes_per_s: float
    hop_s: float
    ring_bytes_per_s: float
    relative_error: float

    def message_s(self, num_bytes: Any) -> Any:
        """Return the seconds of a message one way; `num_bytes` is a number or an array."""
        return np.maximum(self.floor_s, num_bytes / self.bytes_per_s)

    def ring_s(self, num_ranks: int, num_bytes: Any) -> Any:
        """Return the seconds of an all-reduce over two or more ranks."""
        hops = 2 * (num_ranks - 1)
        return np.maximum(hops * self.hop_s, hops / num_ranks * num_bytes / self.ring_bytes_per_s)

    def to_dict(self) -> dict[str, float]:
        """Return it as a costs file holds it."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """Links between ranks of one host and between hosts; None where not measured."""

    within: LinkCost | None = None
    across: LinkCost | None = None

    @classmethod
    def parsed(cls, data: Mapping[str, Any] | None) -> MeasuredLinks:
        """Return the links of a costs file.

        Raises
        ------
        KeyError, TypeError, ValueError
            For what is not links.
        """
        made = {}
        for name in ("within", "across"):
            fitted = (data or {}).get(name)
            if fitted is not None:
                cost = LinkCost(**{key: float(value) for key, value in fitted.items()})
                if min(cost.bytes_per_s, cost.ring_bytes_per_s) <= 0 or min(cost.floor_s, cost.hop_s) < 0:
                    raise ValueError("links with positive rates")
                made[name] = cost
        return cls(**made)

    def between(self, *, apart: bool) -> LinkCost | None:
        """Return the link of ranks on one host or on several."""
        return self.across if apart else self.within
