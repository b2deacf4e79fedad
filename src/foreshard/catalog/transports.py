"""What carries messages between nodes: transports whose latency is not that of InfiniBand or RoCE."""

from __future__ import annotations

import re
from dataclasses import dataclass

from foreshard.catalog.shipped import shipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """A transport and one hop of a collective over it, software included."""

    name: str
    latency_s: float
    source: str


def transport_of(network: str) -> Transport | None:
    """Return the transport that a network's name tells; None for the default (RDMA) and unknown names.

    Examples
    --------
    >>> transport_of("EFA v2 32x100").latency_s, transport_of("InfiniBand NDR 8x400")
    (7.5e-05, None)
    """
    for row in shipped("transports.toml")["transports"]:
        if re.search(row["pattern"], network, re.IGNORECASE):
            return Transport(name=row["name"], latency_s=row["latency_us"] * 1e-6, source=row["source"])
    return None
