"""MSCCL XML as a schedule: what thread blocks send each other, and what each send waits for.

The n-th receive of a thread block from a peer on a channel takes the n-th send to it. Steps of a block follow
each other; a step also waits for the one it names. What arrives in scratch to be added by a later step is
added as it arrives: a schedule has no local steps.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree

from foreshard.comm.schedules.schedule import Chunk, Schedule, ScheduleBuilder, chunks_of
from foreshard.comm.schedules.verify import verify
from foreshard.errors import unknown
from foreshard.interop.collective_schedules.msccl import BUFFER, COLLECTIVE_NAMES, Location
from foreshard.interop.collective_schedules.msccl_text import (
    ADDS,
    LOCAL,
    MAX_GPUS,
    RECEIVES,
    SENDS,
    MscclBlock,
    MscclStep,
    blocks_of,
    number_of,
    root_of,
    wrong,
)

_ONE_OFFSET = "In place, a chunk has one offset on all GPUs"


@dataclass(slots=True, eq=False)
class _Sent:
    """A send and the steps of both ends."""

    source: int
    target: int
    lane: int
    start: MscclStep
    end: MscclStep
    chunk: int = -1
    after: set[int] = field(default_factory=set)
    order: set[int] = field(default_factory=set)  # sends that come before it in the list


def schedule_of_msccl(text: str, *, file: str | None = None) -> Schedule:
    """Return the schedule of an MSCCL XML text.

    Raises
    ------
    SpecError
        For what is no MSCCL XML, declares a document type or entities, or computes something else than its
        collective.
    """
    algo = root_of(text, file)
    ranks = number_of(algo, "ngpus", 2, MAX_GPUS, file)
    names = {name: collective for collective, name in COLLECTIVE_NAMES.items()}
    if algo.get("coll", "") not in names:
        raise unknown("collective", algo.get("coll", ""), names, key="algo.coll", file=file)
    collective = names[algo.get("coll", "")]
    gpus = blocks_of(algo, ranks, file)
    _absorb_additions(gpus, file)
    sends = _paired(gpus, file)
    chunks = _chunks(collective, gpus, algo, sends, file)
    _dependencies(gpus, sends, file)
    order = _ordered(sends, file)
    schedule = _built(collective, algo.get("name", "msccl")[:80], ranks, chunks, sends, order)
    faults = verify(schedule)
    if faults:
        raise wrong(faults[0], "It computes what its collective promises", file)
    return schedule


def _paired(gpus: Sequence[Sequence[MscclBlock]], file: str | None) -> list[_Sent]:
    """Return all sends: the n-th one to a peer on a channel with the n-th receive there."""
    out: dict[tuple[int, int, int], list[MscclStep]] = defaultdict(list)
    into: dict[tuple[int, int, int], list[MscclStep]] = defaultdict(list)
    owner: dict[tuple[str, int, int, int], MscclBlock] = {}
    for gpu, blocks in enumerate(gpus):
        for block in blocks:
            for step in block.steps:
                for kinds, peer, side in ((SENDS, block.to, out), (RECEIVES, block.of, into)):
                    if step.kind not in kinds:
                        continue
                    source, target = (gpu, peer) if side is out else (peer, gpu)
                    key = ("s" if side is out else "r", source, target, block.lane)
                    if peer in (-1, gpu) or owner.setdefault(key, block) is not block:
                        rule = "One thread block sends, and one receives, for each peer and channel"
                        raise wrong(f"GPU {gpu} and peer {peer}", rule, file, "tb")
                    side[source, target, block.lane].append(step)
    sends: list[_Sent] = []
    for way in sorted(out.keys() | into.keys()):
        if len(out[way]) != len(into[way]):
            a, b, lane = way
            what = f"{len(out[way])} sends and {len(into[way])} receives from {a} to {b} on channel {lane}"
            raise wrong(what, "Every send is received", file, "step")
        for start, end in zip(out[way], into[way], strict=True):
            start.sent = end.received = len(sends)
            if end.addition is not None:
                end.addition.received = len(sends)
            sends.append(_Sent(*way, start, end))
    return sends


def _chunks(
    collective: str,
    gpus: Sequence[Sequence[MscclBlock]],
    algo: ElementTree.Element,
    sends: Sequence[_Sent],
    file: str | None,
) -> list[Chunk]:
    """Return the chunks of a collective, after naming that of each send."""
    ranks = len(gpus)
    size = number_of(algo, "nchunksperloop", 1, 10**7, file)
    if size * (ranks if collective == "all-to-all" else 1) > 2 * len(sends):
        what = f"{size} chunks and {len(sends)} sends"
        raise wrong(what, "Every chunk that is not kept is sent", file, "algo.nchunksperloop")
    if collective in ("all-reduce", "broadcast"):
        every = tuple(range(ranks))
        sources = every if collective == "all-reduce" else (_only_source(ranks, sends, file),)
        chunks = [Chunk(weight=1.0 / size, sources=sources, targets=every)] * size
    else:
        if size % ranks:
            rule = "Each GPU owns equally many chunks"
            raise wrong(f"{size} chunks for {ranks} GPUs", rule, file, "algo.nchunksperloop")
        chunks = chunks_of(collective, ranks, size // ranks)
    if collective == "all-to-all":
        _name_exchanged(gpus, size // ranks, sends, file)
        return chunks
    for sent in sends:
        buffer, at = sent.end.target
        if buffer != BUFFER[collective] or not 0 <= at < size:
            rule = f"In place, all {size} chunks lie in buffer '{BUFFER[collective]}'"
            raise wrong(f"a step at {buffer}{at}", rule, file, "step")
        if sent.start.kind == "s" and sent.start.source != sent.end.target:
            raise wrong(f"a step moves {sent.start.source} to {sent.end.target}", _ONE_OFFSET, file, "step")
        sent.chunk = at
    return chunks


def _only_source(ranks: int, sends: Sequence[_Sent], file: str | None) -> int:
    """Return the GPU that receives nothing."""
    roots = set(range(ranks)) - {sent.target for sent in sends}
    if len(roots) != 1:
        raise wrong(f"{len(roots)} GPUs receive nothing", "A broadcast has one root", file, "gpu")
    return roots.pop()


def _name_exchanged(
    gpus: Sequence[Sequence[MscclBlock]], parts: int, sends: Sequence[_Sent], file: str | None
) -> None:
    """Name the chunks of an all-to-all: by input or output offset, or by what was put into scratch."""
    ranks = len(gpus)
    slots: dict[tuple[int, int], int] = {}
    for gpu, blocks in enumerate(gpus):
        for step in (one for block in blocks for one in block.steps if one.kind == "cpy"):
            (buffer, at), (to_buffer, to) = step.source, step.target
            if buffer == "i" and to_buffer == "s":
                slots[gpu, to] = (gpu * ranks + at // parts) * parts + at % parts
    left = list(sends)
    while left:
        later = []
        for sent in left:
            (buffer, at), (to_buffer, to) = sent.start.source, sent.end.target
            size = ranks * parts
            if buffer == "i" and 0 <= at < size:
                sent.chunk = (sent.source * ranks + at // parts) * parts + at % parts
            elif to_buffer == "o" and 0 <= to < size:
                sent.chunk = (to // parts * ranks + sent.target) * parts + to % parts
            elif buffer == "s" and (sent.source, at) in slots:
                sent.chunk = slots[sent.source, at]
            else:
                later.append(sent)
                continue
            if to_buffer == "s" and slots.setdefault((sent.target, to), sent.chunk) != sent.chunk:
                raise wrong(f"scratch {to} of GPU {sent.target}", "Scratch holds one chunk", file, "step")
        if len(later) == len(left):
            raise wrong(f"{len(left)} sends of unknown chunks", "Chunks come from the input", file, "step")
        left = later


def _dependencies(gpus: Sequence[Sequence[MscclBlock]], sends: Sequence[_Sent], file: str | None) -> None:
    """Find what each send waits for, and what comes before it in the list of sends."""
    for blocks in gpus:
        for block in blocks:
            received = -1  # last receive
            read: dict[int, int] = {}  # last send of each chunk
            added: set[int] = set()  # what steps of their own have added
            open_waits: set[tuple[int, int]] = set()
            carried: set[tuple[int, int]] = set()  # of the sends since the last receive
            previous = -1
            for step in block.steps:
                open_waits |= _waited(blocks, step, file)
                if step.kind == "re":
                    _let_addition_wait(sends, step.received, open_waits)
                    added.add(step.received)
                    open_waits = set()
                carried |= open_waits
                if step.kind in RECEIVES:
                    end = sends[step.received]
                    _let_wait(sends, step.received, carried)
                    carried = set()
                    if end.chunk in read:
                        end.after.add(read[end.chunk])
                    if previous >= 0:
                        end.order.add(previous)
                    received = previous = step.received
                    open_waits = set()
                if step.kind in SENDS:
                    start = sends[step.sent]
                    if step.kind == "s":
                        start.after |= {one for one, _ in open_waits}
                    start.after |= added | ({received} if received >= 0 else set())
                    if previous >= 0:
                        start.order.add(previous)
                    read[start.chunk] = previous = step.sent
                    open_waits = set()


def _let_wait(sends: Sequence[_Sent], send: int, waits: set[tuple[int, int]]) -> None:
    """Let a send whose receive waits for steps wait for what they do, if it overwrites what one passed on."""
    for one, passed_on in waits:
        sends[send].after.add(one)
        if passed_on >= 0 and sends[passed_on].chunk == sends[send].chunk:
            sends[send].after.add(passed_on)
    sends[send].after.discard(send)


def _let_addition_wait(sends: Sequence[_Sent], send: int, waits: set[tuple[int, int]]) -> None:
    """Let a send whose addition waits for steps wait for those on its chunk; other additions commute."""
    for one in {each for wait in waits for each in wait if each >= 0}:
        other = sends[one]
        adds_too = other.target == sends[send].target and other.end.kind in ADDS
        if other.chunk == sends[send].chunk and not adds_too:
            sends[send].after.add(one)


def _waited(blocks: Sequence[MscclBlock], step: MscclStep, file: str | None) -> set[tuple[int, int]]:
    """Return what is done once the steps that a step waits for are: (send, one that also passes it on or -1).

    The send has ended here, or else it has started here.
    """
    found: set[tuple[int, int]] = set()
    seen: set[tuple[int, int]] = set()
    open_steps = [_position(blocks, wait, file) for wait in step.waits]
    while open_steps:
        number, at = open_steps.pop()
        if (number, at) in seen:
            continue
        seen.add((number, at))
        other = blocks[number].steps[at]
        if other.received >= 0 or other.sent >= 0:
            ended = other.received >= 0
            found.add((other.received, other.sent) if ended else (other.sent, -1))
        if other.kind in LOCAL:  # it has waited itself, and for the steps before it
            open_steps += [_position(blocks, wait, file) for wait in other.waits]
            open_steps += [(number, at - 1)] if at else []
    return found


def _position(blocks: Sequence[MscclBlock], wait: tuple[int, int], file: str | None) -> tuple[int, int]:
    """Return the thread block and position of a step that is waited for."""
    number, at = wait
    if number >= len(blocks) or not 0 <= at < len(blocks[number].ends):
        raise wrong(f"step {at} of thread block {number}", "A step waits for one there is", file, "deps")
    return number, blocks[number].ends[at] - 1


def _absorb_additions(gpus: Sequence[Sequence[MscclBlock]], file: str | None) -> None:
    """Let what arrives in scratch and is then added by a step of its own be added as it arrives."""
    for blocks in gpus:
        steps = [step for block in blocks for step in block.steps]
        arrives: dict[Location, list[MscclStep]] = defaultdict(list)
        for step in steps:
            if step.kind in RECEIVES:
                arrives[step.target].append(step)
        for step in (one for one in steps if one.kind == "re"):
            into = arrives.get(step.source, [])
            if len(into) != 1 or into[0].kind != "r" or step.source[0] != "s":
                rule = "A reduction adds what has arrived in scratch once"
                raise wrong(f"a step reduces {step.source}", rule, file, "step.type")
            into[0].kind, into[0].target, into[0].addition = "rrc", step.target, step
            arrives[step.source] = []


def _ordered(sends: Sequence[_Sent], file: str | None) -> list[int]:
    """Return sends after those they wait for and, if possible, as thread blocks order them."""
    full = [sent.after | sent.order for sent in sends]
    lanes: dict[tuple[int, int, int], int] = {}
    fifo: list[set[int]] = []
    for n, sent in enumerate(sends):
        way = (sent.source, sent.target, sent.lane)
        fifo.append({lanes[way]} if way in lanes else set())
        lanes[way] = n
    for before in (full, [sent.after | one for sent, one in zip(sends, fifo, strict=True)]):
        order = _topological(before)
        if len(order) == len(sends):
            return order
    raise wrong("thread blocks wait for each other", "Steps can be done in some order", file, "deps")


def _topological(before: Sequence[set[int]]) -> list[int]:
    """Return numbers in an order that respects what comes before each; fewer if there is a circle."""
    after: list[list[int]] = [[] for _ in before]
    left = [len(some) for some in before]
    for n, some in enumerate(before):
        for one in some:
            after[one].append(n)
    ready = [n for n, count in enumerate(left) if not count]
    order = []
    while ready:
        n = heapq.heappop(ready)
        order.append(n)
        for then in after[n]:
            left[then] -= 1
            if not left[then]:
                heapq.heappush(ready, then)
    return order


def _built(
    collective: str,
    name: str,
    ranks: int,
    chunks: Sequence[Chunk],
    sends: Sequence[_Sent],
    order: Sequence[int],
) -> Schedule:
    """Return the schedule of sends in an order."""
    number = {n: at for at, n in enumerate(order)}
    build = ScheduleBuilder(collective, name, ranks, chunks)
    for n in order:
        sent = sends[n]
        build.send(
            sent.source,
            sent.target,
            sent.chunk,
            reduce=sent.end.kind in ADDS,
            channel=sent.lane,
            after=sorted(number[one] for one in sent.after - {n}),
        )
    return build.schedule()
