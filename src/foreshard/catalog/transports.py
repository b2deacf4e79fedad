"""What carries messages between nodes: transports whose latency is not that of InfiniBand or RoCE."""

from __future__ import annotations

import re

from foreshard.catalog.shipped import shipped


def transport_of(network: str) -> tuple[str, float] | None:
    """Return the transport that a network's name tells, and one hop of a collective over it in seconds.

    Software is included. None for the default (RDMA) and unknown names.

    Examples
    --------
    >>> transport_of("EFA v2 32x100"), transport_of("InfiniBand NDR 8x400")
    (('EFA', 7.5e-05), None)
    """
    for row in shipped("transports.toml")["transports"]:
        if re.search(row["pattern"], network, re.IGNORECASE):
            return row["name"], row["latency_us"] * 1e-6
    return None
