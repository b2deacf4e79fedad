"""Routes from rank to rank."""

from __future__ import annotations

from foreshard.comm.topology.routing import Route, Routing


def between_ranks(routing: Routing, source: int, target: int, *, flow: int | None = None) -> Route:
    """Return the shortest path from rank to rank, or with a `flow` the one of its hash."""
    ends = [int(routing.topology.devices[rank]) for rank in (source, target)]
    return routing.shortest(*ends) if flow is None else routing.ecmp(*ends, flow=flow)
