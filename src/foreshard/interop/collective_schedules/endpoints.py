"""The two ends of a send: formats without global dependencies order operations of one rank only."""

from __future__ import annotations

from foreshard.comm.schedules.schedule import Schedule
from foreshard.errors import SpecError

Side = tuple[int, bool]
"""A send, and whether its source's operation is meant, not its target's."""


def waits_at(schedule: Schedule, side: Side) -> list[Side]:
    """Return the operations of the same rank that one end of a send waits for.

    What a send waits for at other ranks reaches it through messages, or only spaces pieces out.
    """
    send, is_out = side
    rank = (schedule.source if is_out else schedule.target)[send]
    found = []
    for other in schedule.waits_for(send).tolist():
        if schedule.target[other] == rank:
            found.append((other, False))
        elif schedule.source[other] == rank:
            found.append((other, True))
    return found


def require_ranks_only(schedule: Schedule, tool: str) -> None:
    """Refuse a schedule with switches, for a tool in which only ranks hold data."""
    if schedule.switches:
        raise SpecError(
            f"{tool} cannot express the schedule: switches take part",
            key="schedule",
            value=schedule.algorithm,
            rule="Only ranks send and receive",
        )


def bytes_of(schedule: Schedule, send: int, num_bytes: float) -> int:
    """Return the bytes of a send of a collective of some size, at least 1."""
    return max(1, round(float(schedule.weight[send]) * num_bytes))
