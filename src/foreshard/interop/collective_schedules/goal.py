"""A schedule as GOAL text, the input of LogGOPSim and ATLAHS (through txt2bin).

Each send is a ``send`` at one rank and a ``recv`` at another, matched by a tag of its own; additions are
left out. Source: spcl/LogGOPSim README, and spcl/atlahs for the text grammar.
"""

from __future__ import annotations

from collections import defaultdict

from foreshard.comm.schedules.schedule import Schedule
from foreshard.interop.collective_schedules.endpoints import bytes_of, require_ranks_only, waits_at


def goal_text(schedule: Schedule, num_bytes: float) -> str:
    """Return the operations of every rank, and what each requires at that rank.

    Parameters
    ----------
    schedule : Schedule
        Without switches.
    num_bytes : float
        Size of the collective.

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
            waits = waits_at(schedule, side)
            lines[rank] += [f"{name}{send} requires {'s' if is_out else 'r'}{one}" for one, is_out in waits]
    blocks = ["\n".join([f"rank {rank} {{", *lines[rank], "}", ""]) for rank in range(schedule.num_ranks)]
    return "\n".join([f"num_ranks {schedule.num_ranks}\n", *blocks])
