"""A schedule as GOAL text, the input of LogGOPSim and ATLAHS (through txt2bin).

Each send is a ``send`` at one rank and a ``recv`` at another, matched by a tag of its own; additions are
``calc``. Source: spcl/LogGOPSim README, and spcl/atlahs for the text grammar.
"""

from __future__ import annotations

from collections import defaultdict

from foreshard.comm.schedules.schedule import Schedule
from foreshard.interop.collective_schedules.endpoints import Side, bytes_of, require_ranks_only, waits_at


def goal_text(schedule: Schedule, num_bytes: float, *, add_s_per_byte: float = 0.0) -> str:
    """Return the operations of every rank, and what each requires at that rank.

    Parameters
    ----------
    schedule : Schedule
        Without switches.
    num_bytes : float
        Size of the collective.
    add_s_per_byte : float
        Time that a rank takes to add what arrives, 0 to leave it out.

    Examples
    --------
    >>> from foreshard.comm.schedules.chains import piped_send
    >>> print(goal_text(piped_send("chain", 2), 8))
    num_ranks 2
    <BLANKLINE>
    rank 0 {
    s0: send 8b to 1 tag 0
    }
    <BLANKLINE>
    rank 1 {
    r0: recv 8b from 0 tag 0
    }
    <BLANKLINE>
    """
    require_ranks_only(schedule, "GOAL")
    lines: dict[int, list[str]] = defaultdict(list)
    ends = zip(schedule.source.tolist(), schedule.target.tolist(), strict=True)
    for send, (a, b) in enumerate(ends):
        size = bytes_of(schedule, send, num_bytes)
        lines[a].append(f"s{send}: send {size}b to {b} tag {send}")
        lines[b].append(f"r{send}: recv {size}b from {a} tag {send}")
        for rank, side, name in ((a, (send, True), "s"), (b, (send, False), "r")):
            done = [_done(schedule, one, add_s_per_byte) for one in waits_at(schedule, side)]
            lines[rank] += [f"{name}{send} requires {one}" for one in done]
        if _adds(schedule, send, add_s_per_byte):
            time_ns = max(1, round(1e9 * add_s_per_byte * size))
            lines[b] += [f"c{send}: calc {time_ns}", f"c{send} requires r{send}"]
    blocks = ["\n".join([f"rank {rank} {{", *lines[rank], "}", ""]) for rank in range(schedule.num_ranks)]
    return "\n".join([f"num_ranks {schedule.num_ranks}\n", *blocks])


def _adds(schedule: Schedule, send: int, add_s_per_byte: float) -> bool:
    """Return whether adding what a send brings is an operation."""
    return add_s_per_byte > 0.0 and bool(schedule.is_reduced[send])


def _done(schedule: Schedule, side: Side, add_s_per_byte: float) -> str:
    """Return the operation by which a send is done at one of its ends."""
    send, is_out = side
    if is_out:
        return f"s{send}"
    return f"c{send}" if _adds(schedule, send, add_s_per_byte) else f"r{send}"
