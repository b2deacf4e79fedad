"""Rings: every rank sends to the next one, on several channels and in both directions.

Source: Patarasuk and Yuan 2009 (bandwidth-optimal all-reduce). Columns are built whole with numpy: a ring of
1,024 ranks has two million sends.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreshard.comm.schedules.schedule import Schedule, chunks_of
from foreshard.errors import SpecError

_ID = np.int32  # of places, chunks and sends: half the memory of a large ring


def ring(
    collective: str,
    num_ranks: int,
    *,
    channels: int = 1,
    parts: int | None = None,
    weights: Sequence[float] | None = None,
    bidirectional: bool = False,
    orders: Sequence[Sequence[int]] | None = None,
) -> Schedule:
    """Return a ring all-reduce, all-gather or reduce-scatter.

    Each part of a rank's share goes round on one channel, part q on channel ``q % channels``.

    Parameters
    ----------
    parts : int, optional
        Parts of each rank's share, `channels` unless given.
    weights : sequence of float, optional
        Share of the size of each rank.
    bidirectional : bool
        Odd channels go round the other way.
    orders : sequence of sequence of int, optional
        The ranks along the ring of each channel.

    Examples
    --------
    >>> ring("all-reduce", 4).num_sends
    24
    """
    name = "bidirectional-ring" if bidirectional else "ring"
    parts = channels if parts is None else parts
    chunks = tuple(chunks_of(collective, num_ranks, parts, weights=weights))
    order = _orders(num_ranks, channels, bidirectional, orders)[np.arange(parts) % channels]
    position = np.arange(num_ranks, dtype=_ID)
    phases = {"all-reduce": (1, 0), "reduce-scatter": (1,), "all-gather": (0,)}[collective]
    steps = num_ranks - 1
    # one row for each step, part and place; the chunk sent is that of the rank `behind` places back
    behind = np.concatenate([np.arange(steps, dtype=_ID) + phase for phase in phases])
    owner = (position[None, :] - behind[:, None]) % num_ranks
    source = np.broadcast_to(order, (len(behind), parts, num_ranks))
    target = np.broadcast_to(np.roll(order, -1, axis=1), source.shape)
    chunk = np.stack([order[part][owner] * _ID(parts) + _ID(part) for part in range(parts)], axis=1)
    per_step = parts * num_ranks
    channel = np.repeat(np.arange(parts, dtype=_ID) % channels, num_ranks)
    first = np.arange(parts, dtype=_ID)[:, None] * num_ranks + np.roll(position, 1)
    start = np.arange(len(behind) - 1, dtype=_ID) * _ID(per_step)
    indices = (start[:, None] + first.ravel().astype(_ID)).ravel()
    num_sends = len(behind) * per_step
    return Schedule(
        collective=collective,
        algorithm=name,
        num_ranks=num_ranks,
        chunks=chunks,
        source=source.reshape(-1),
        target=target.reshape(-1),
        chunk=chunk.reshape(-1),
        is_reduced=np.repeat(np.array([phase == 1 for phase in phases]), steps * per_step),
        channel=np.tile(channel, len(behind)),
        indptr=np.maximum(np.arange(num_sends + 1, dtype=_ID) - _ID(per_step), 0),
        indices=indices,
    )


def _orders(
    num_ranks: int, channels: int, bidirectional: bool, orders: Sequence[Sequence[int]] | None
) -> np.ndarray:
    """Return the ranks along each ring, shape (channels, num_ranks)."""
    if orders is None:
        ranks = np.arange(num_ranks, dtype=_ID)
        return np.stack([ranks[::-1] if bidirectional and c % 2 else ranks for c in range(channels)])
    if len(orders) != channels or any(sorted(one) != list(range(num_ranks)) for one in orders):
        rule = f"Each of the {channels} channels has every rank once"
        raise SpecError("no rings", key="orders", value=str(orders), rule=rule)
    return np.array(orders, dtype=_ID)


def chain_broadcast(
    num_ranks: int, *, channels: int = 1, parts: int | None = None, root: int = 0, bidirectional: bool = False
) -> Schedule:
    """Return a broadcast in which each rank passes pieces on to the next; channels take turns.

    Examples
    --------
    >>> int(chain_broadcast(5, parts=3).rounds().max())
    5
    """
    parts = channels if parts is None else parts
    piece, hop = (grid.ravel() for grid in np.indices((parts, num_ranks - 1)))
    channel = piece % channels
    turn = np.where(channel % 2, -1, 1) if bidirectional else np.ones_like(piece)
    index = np.arange(len(piece))
    # the hop before of the same piece, and the piece before on the same hop
    waits = np.stack([np.where(hop > 0, index - 1, -1), index - channels * (num_ranks - 1)], axis=1)
    has = waits >= 0
    return Schedule(
        collective="broadcast",
        algorithm="bidirectional-ring" if bidirectional else "ring",
        num_ranks=num_ranks,
        chunks=tuple(chunks_of("broadcast", num_ranks, parts, root=root)),
        source=(root + turn * hop) % num_ranks,
        target=(root + turn * (hop + 1)) % num_ranks,
        chunk=piece,
        is_reduced=np.zeros(len(piece), dtype=bool),
        channel=channel,
        indptr=np.concatenate([[0], np.cumsum(has.sum(axis=1))]),
        indices=waits[has],
    )
