"""A schedule as GOAL text, the input of LogGOPSim and ATLAHS (through txt2bin).

Each send is a ``send`` at one rank and a ``recv`` at another, matched by a tag of its own; additions are
``calc``. Source: spcl/LogGOPSim README, and spcl/atlahs for the text grammar.
"""

from __future__ import annotations

from collections import defaultdict

from foreshard.comm.schedules.schedule import Schedule
from foreshard.errors import SpecError


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
    >>> from foreshard.comm.schedules.chains import chain_send
    >>> print(goal_text(chain_send(2), 8))
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
    if schedule.switches:
        raise SpecError(
            "GOAL cannot express the schedule: switches take part",
            key="schedule",
            value=schedule.algorithm,
            rule="Only ranks send and receive",
        )
    source, target = schedule.source.tolist(), schedule.target.tolist()
    lines: dict[int, list[str]] = defaultdict(list)
    for send, (a, b) in enumerate(zip(source, target, strict=True)):
        size = max(1, round(float(schedule.weight[send]) * num_bytes))
        adds_ns = round(1e9 * add_s_per_byte * size) if schedule.is_reduced[send] else 0
        waits = schedule.waits_for(send).tolist()
        lines[a].append(f"s{send}: send {size}b to {b} tag {send}")
        lines[a] += [
            f"s{send} requires {_done(schedule, one, a, add_s_per_byte)}" for one in _at(schedule, waits, a)
        ]
        lines[b].append(f"r{send}: recv {size}b from {a} tag {send}")
        # what the receive overwrites must have been read, and written before
        lines[b] += [
            f"r{send} requires {_done(schedule, one, b, add_s_per_byte)}" for one in _at(schedule, waits, b)
        ]
        if adds_ns:
            lines[b] += [f"c{send}: calc {adds_ns}", f"c{send} requires r{send}"]
    blocks = ["\n".join([f"rank {rank} {{", *lines[rank], "}", ""]) for rank in range(schedule.num_ranks)]
    return "\n".join([f"num_ranks {schedule.num_ranks}\n", *blocks])


def _at(schedule: Schedule, sends: list[int], rank: int) -> list[int]:
    """Return the sends that begin or end at a rank; GOAL orders operations of one rank only."""
    return [one for one in sends if rank in (schedule.source[one], schedule.target[one])]


def _done(schedule: Schedule, send: int, rank: int, add_s_per_byte: float) -> str:
    """Return the operation by which a send is done at one of its ends."""
    if schedule.source[send] == rank:
        return f"s{send}"
    return f"c{send}" if add_s_per_byte > 0.0 and schedule.is_reduced[send] else f"r{send}"
