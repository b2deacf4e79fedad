"""A schedule as MSCCL XML: thread blocks of each GPU, and their steps.

A thread block sends to one peer and receives from one, in order. Receives stand as late as the sends after
them allow, so that a receive and the send that passes it on become one fused step; where blocks would wait
for each other, all steps stand by rounds. Source: microsoft/msccl-
tools 030a750 (msccl/language/ir.py, collectives.py for what lies where in place); microsoft/msccl msccl.h for
the limit of steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import quoteattr

import numpy as np

from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.schedules.verify import channel_rounds, verify
from foreshard.errors import SpecError
from foreshard.interop.collective_schedules.endpoints import Side, require_ranks_only, waits_at

MAX_STEPS = 256  # of a thread block
COLLECTIVE_NAMES = {
    "all-reduce": "allreduce",
    "all-gather": "allgather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "alltoall",
    "broadcast": "broadcast",
}
BUFFER = {"all-reduce": "i", "reduce-scatter": "i", "broadcast": "i", "all-gather": "o"}
"""Where all chunks of a collective lie in place; an all-to-all has an input, an output and scratch."""

Location = tuple[str, int]
"""Buffer and offset."""


@dataclass(slots=True, eq=False)
class _Step:
    """A step of a thread block."""

    kind: str
    source: Location
    target: Location
    sides: tuple[Side, ...] = ()
    waits: list[Side] = field(default_factory=list)


Block = tuple[int, int, int, int]
"""GPU, peer it sends to, peer it receives from, channel; -1 for no peer."""


def msccl_xml(schedule: Schedule) -> str:
    """Return a schedule as MSCCL XML.

    Parameters
    ----------
    schedule : Schedule
        Of equal chunks, between ranks only; no send.

    Raises
    ------
    SpecError
        For what MSCCL cannot express, with the reason.
    """
    _check(schedule)
    blocks = _Blocks(schedule)
    steps = blocks.steps()
    longest = max((len(one) for one in steps.values()), default=0)
    if longest > MAX_STEPS:
        raise _refused(f"a thread block has {longest} steps", f"A thread block has at most {MAX_STEPS} steps")
    return _text(schedule, blocks, steps)


def _refused(what: str, rule: str) -> SpecError:
    return SpecError(f"MSCCL cannot express the schedule: {what}", key="schedule", value=what, rule=rule)


def _check(schedule: Schedule) -> None:
    """Refuse what MSCCL cannot express."""
    if schedule.collective not in COLLECTIVE_NAMES:
        raise _refused(f"it is a {schedule.collective}", f"Collectives are {', '.join(COLLECTIVE_NAMES)}")
    require_ranks_only(schedule, "MSCCL")
    weights = np.array([chunk.weight for chunk in schedule.chunks])
    if not np.allclose(weights, weights.mean(), rtol=1e-6, atol=0.0):
        raise _refused("chunks have different weights", "Chunks are equal")
    faults = verify(schedule)
    if faults:
        raise _refused(faults[0], "A schedule that is exported has no faults")


class _Blocks:
    """The thread blocks of a schedule: where data lies, which block does what, in which order."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.source, self.target = schedule.source.tolist(), schedule.target.tolist()
        self.chunk, self.adds = schedule.chunk.tolist(), schedule.is_reduced.tolist()
        self.channel = schedule.channel.tolist()
        self.is_exchange = schedule.collective == "all-to-all"
        self.places = _offsets(schedule)
        self.scratch: list[dict[int, int]] = [{} for _ in range(schedule.num_ranks)]
        ends: dict[tuple[int, int], tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
        for a, b, lane in zip(self.source, self.target, self.channel, strict=True):
            ends[a, lane][0].add(b)
            ends[b, lane][1].add(a)
        self.alone = {key for key, (to, of) in ends.items() if len(to) == len(of) == 1}
        self.ends = ends
        self.round_of = channel_rounds(schedule).tolist()
        self.uses: dict[tuple[int, int], list[tuple[int, int, bool]]] = defaultdict(list)
        for send, when in enumerate(self.round_of):  # round, send, and whether it reads
            self.uses[self.source[send], self.chunk[send]].append((when, send, True))
            self.uses[self.target[send], self.chunk[send]].append((when, send, False))

    def location(self, rank: int, chunk: int) -> Location:
        """Return where a chunk lies at a rank."""
        if not self.is_exchange:
            return BUFFER[self.schedule.collective], self.places[chunk]
        one, width = self.schedule.chunks[chunk], self.places[chunk]
        parts = len(self.schedule.chunks) // self.schedule.num_ranks**2
        if rank == one.sources[0]:
            return "i", one.targets[0] * parts + width
        if rank == one.targets[0]:
            return "o", one.sources[0] * parts + width
        slots = self.scratch[rank]
        return "s", slots.setdefault(chunk, len(slots))

    def block(self, side: Side) -> Block:
        """Return the thread block of a step."""
        send, is_out = side
        gpu, peer = self.source[send], self.target[send]
        if not is_out:
            gpu, peer = peer, gpu
        lane = self.channel[send]
        if (gpu, lane) in self.alone:
            to, of = self.ends[gpu, lane]
            return gpu, next(iter(to)), next(iter(of)), lane
        return (gpu, peer, -1, lane) if is_out else (gpu, -1, peer, lane)

    def steps(self) -> dict[Block, list[_Step]]:
        """Return the steps of each block in order, with extra waits as steps that do nothing else."""
        for order in (self._late_receives(), self._by_rounds()):
            plain = {block: self._fused(block, sides) for block, sides in sorted(order.items()) if sides}
            position = {
                side: (block, n)
                for block, some in plain.items()
                for n, step in enumerate(some)
                for side in step.sides
            }
            for block, some in plain.items():
                self._wait(block, some, position)
            if not _is_circular(plain, position):
                break
        else:
            raise AssertionError("steps in the order of their rounds wait for each other in a circle")
        if self.is_exchange:
            self._keep_own(plain)
        return {block: _with_nops(steps) for block, steps in sorted(plain.items())}

    def _late_receives(self) -> dict[Block, list[Side]]:
        """Return what each block does, receives as late as its own sends allow: most fuse with the next send.

        A block may then hold back what another waits for, which holds back what it waits for itself.
        """
        order: dict[Block, list[Side]] = defaultdict(list)
        received: dict[Block, list[int]] = defaultdict(list)  # not yet placed
        placed: dict[Block, int] = defaultdict(int)
        for send in range(self.schedule.num_sends):
            received[self.block((send, False))].append(send)
        # by round, sends of one channel are in the order of their index
        for send in np.argsort(self.round_of, kind="stable").tolist():
            block = self.block((send, True))
            waiting = set(self.schedule.waits_for(send).tolist())
            queue, at = received[block], placed[block]
            need = max((n for n in range(at, len(queue)) if queue[n] in waiting), default=-1) + 1
            order[block] += [(one, False) for one in queue[at:need]]
            placed[block] = max(at, need)
            order[block].append((send, True))
        for block, queue in received.items():
            order[block] += [(one, False) for one in queue[placed[block] :]]
        return order

    def _by_rounds(self) -> dict[Block, list[Side]]:
        """Return what each block does by rounds, sends first: all that a step waits for is earlier."""
        sides = [(send, is_out) for send in range(self.schedule.num_sends) for is_out in (True, False)]
        order: dict[Block, list[Side]] = defaultdict(list)
        for side in sorted(sides, key=lambda side: (self.round_of[side[0]], not side[1], side[0])):
            order[self.block(side)].append(side)
        return order

    def _fused(self, block: Block, sides: Sequence[Side]) -> list[_Step]:
        """Return the steps of a block; a receive and the send that passes its chunk on are one."""
        steps: list[_Step] = []
        for side in sides:
            send, is_out = side
            last = steps[-1] if steps else None
            if is_out and last is not None and self._passes_on(block, last, send):
                received = last.sides[0][0]
                last.kind = "rcs" if last.kind == "r" else "rrs" if self._forgets(received, send) else "rrcs"
                last.sides += (side,)
                last.source = last.target
            else:
                ends = [self.location(one[send], self.chunk[send]) for one in (self.source, self.target)]
                kind = "s" if is_out else "rrc" if self.adds[send] else "r"
                steps.append(_Step(kind, ends[0], ends[1], (side,)))
        return steps

    def _passes_on(self, block: Block, step: _Step, send: int) -> bool:
        """Return whether a send waits for nothing but its block, and sends what a step has just received."""
        return (
            step.kind in ("r", "rrc")
            and not self.is_exchange
            and self.chunk[step.sides[0][0]] == self.chunk[send]
            and all(self.block(one) == block for one in waits_at(self.schedule, (send, True)))
        )

    def _wait(self, block: Block, steps: Sequence[_Step], at: Mapping[Side, tuple[Block, int]]) -> None:
        """Let steps wait for those of other blocks; `at` is the block and position of each step.

        What an earlier step has waited for, later ones need not.
        """
        known: set[tuple[Block, int]] = set()
        for step in steps:
            found = {at[one]: one for side in step.sides for one in waits_at(self.schedule, side)}
            new = sorted(one for one in found if one[0] != block and one not in known)
            known.update(new)
            step.waits = [found[one] for one in new]

    def _forgets(self, received: int, passed: int) -> bool:
        """Return whether nothing but the send that passes a sum on reads it before it is overwritten."""
        place, chunk = self.target[received], self.chunk[received]
        rank_is_target = place in self.schedule.chunks[chunk].targets
        after = [one for one in self.uses[place, chunk] if one[0] > self.round_of[received]]
        writes = [(when, send) for when, send, reads in after if not reads]
        if writes and self.adds[min(writes)[1]]:
            return False
        reads = {send for when, send, reads in after if reads and (not writes or when <= min(writes)[0])}
        return reads == {passed} and (bool(writes) or not rank_is_target)

    def _keep_own(self, blocks: dict[Block, list[_Step]]) -> None:
        """Add the copy of what a rank sends to itself in an all-to-all."""
        parts = len(self.schedule.chunks) // self.schedule.num_ranks**2
        for rank in range(self.schedule.num_ranks):
            offsets = range(rank * parts, (rank + 1) * parts)
            blocks[rank, -1, -1, 0] = [_Step("cpy", ("i", one), ("o", one)) for one in offsets]


def _is_circular(steps: Mapping[Block, Sequence[_Step]], at: Mapping[Side, tuple[Block, int]]) -> bool:
    """Return whether steps wait for each other: for the one before, for messages, or by their waits."""
    ahead: dict[tuple[Block, int], list[tuple[Block, int]]] = defaultdict(list)
    open_waits: dict[tuple[Block, int], int] = {}
    for block, some in steps.items():
        for n, step in enumerate(some):
            before = [at[wait] for wait in step.waits]
            before += [at[send, True] for send, is_out in step.sides if not is_out]
            before += [(block, n - 1)] if n else []
            open_waits[block, n] = len(before)
            for one in before:
                ahead[one].append((block, n))
    ready = [one for one, count in open_waits.items() if not count]
    done = 0
    while ready:
        done += 1
        for one in ahead[ready.pop()]:
            open_waits[one] -= 1
            if not open_waits[one]:
                ready.append(one)
    return done < len(open_waits)


def _offsets(schedule: Schedule) -> list[int]:
    """Return the offset of each chunk: in order, or by owner; of an all-to-all, its part of its pair."""
    if schedule.collective in ("all-reduce", "broadcast"):
        return list(range(len(schedule.chunks)))
    seen: dict[tuple[int, ...], int] = defaultdict(int)
    parts = []
    owners = []
    for chunk in schedule.chunks:
        owner = {
            "all-gather": chunk.sources[:1],
            "reduce-scatter": chunk.targets[:1],
            "all-to-all": chunk.sources[:1] + chunk.targets[:1],
        }[schedule.collective]
        owners.append(owner)
        parts.append(seen[owner])
        seen[owner] += 1
    groups = schedule.num_ranks ** (2 if schedule.collective == "all-to-all" else 1)
    width = len(schedule.chunks) // groups
    if len(seen) != groups or set(seen.values()) != {width}:
        raise _refused("ranks own different numbers of chunks", "Each owner has equally many chunks")
    if schedule.collective == "all-to-all":
        return parts
    return [owner[0] * width + part for owner, part in zip(owners, parts, strict=True)]


def _with_nops(steps: Sequence[_Step]) -> list[_Step]:
    """Return steps that wait for one other step each: further waits are steps of their own."""
    made = []
    for step in steps:
        for wait in step.waits[1:]:
            made.append(_Step("nop", ("i", -1), ("o", -1), (), [wait]))
        step.waits = step.waits[:1]
        made.append(step)
    return made


def _text(schedule: Schedule, blocks: _Blocks, steps: dict[Block, list[_Step]]) -> str:
    """Return the XML of thread blocks."""
    number: dict[Block, int] = {}
    per_gpu: list[list[Block]] = [[] for _ in range(schedule.num_ranks)]
    for block in steps:
        number[block] = len(per_gpu[block[0]])
        per_gpu[block[0]].append(block)
    at = {
        side: (number[block], n)
        for block, some in steps.items()
        for n, step in enumerate(some)
        for side in step.sides
    }
    waited = {at[wait] + (block[0],) for block, some in steps.items() for step in some for wait in step.waits}
    size = len(schedule.chunks) // (schedule.num_ranks if blocks.is_exchange else 1)
    held = {"i": (size, 0), "o": (0, size)}[BUFFER.get(schedule.collective, "i")]
    if blocks.is_exchange:
        held = (size, size)
    channels = 1 + max((block[3] for block in steps), default=0)
    lines = [
        f'<algo name={quoteattr(schedule.algorithm)} proto="Simple" '
        f'nchannels="{channels}" nchunksperloop="{size}" ngpus="{schedule.num_ranks}" '
        f'coll="{COLLECTIVE_NAMES[schedule.collective]}" inplace="{int(not blocks.is_exchange)}">'
    ]
    for gpu, some in enumerate(per_gpu):
        scratch = len(blocks.scratch[gpu])
        lines.append(f'  <gpu id="{gpu}" i_chunks="{held[0]}" o_chunks="{held[1]}" s_chunks="{scratch}">')
        for block in some:
            _, to, of, lane = block
            lines.append(f'    <tb id="{number[block]}" send="{to}" recv="{of}" chan="{lane}">')
            for n, step in enumerate(steps[block]):
                depid, deps = at[step.waits[0]] if step.waits else (-1, -1)
                has = int((number[block], n, gpu) in waited)
                (from_buffer, from_at), (to_buffer, to_at) = step.source, step.target
                lines.append(
                    f'      <step s="{n}" type="{step.kind}" srcbuf="{from_buffer}" srcoff="{from_at}" '
                    f'dstbuf="{to_buffer}" dstoff="{to_at}" cnt="{0 if step.kind == "nop" else 1}" '
                    f'depid="{depid}" deps="{deps}" hasdep="{has}"/>'
                )
            lines.append("    </tb>")
        lines.append("  </gpu>")
    return "\n".join([*lines, "</algo>", ""])
