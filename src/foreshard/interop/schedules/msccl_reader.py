"""MSCCL XML as a schedule: what thread blocks send each other, and what each send waits for.

The n-th receive of a thread block from a peer on a channel takes the n-th send to it. Steps of a block follow
each other; a step also waits for the one it names. Local reductions are not understood: a schedule has none.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree

from foreshard.comm.schedules.schedule import Chunk, Schedule, ScheduleBuilder, chunks_of
from foreshard.comm.schedules.verify import verify
from foreshard.errors import SpecError, unknown
from foreshard.interop.schedules.msccl import BUFFER, COLLECTIVE_NAMES, MAX_STEPS, Location

MAX_BYTES = 64 * 2**20
MAX_GPUS = 4096
_LANES = 1024  # channels
_SENDS = frozenset({"s", "rcs", "rrs", "rrcs"})
_RECEIVES = frozenset({"r", "rrc", "rcs", "rrs", "rrcs"})
_ADDS = frozenset({"rrc", "rrs", "rrcs"})
_LOCAL = frozenset({"cpy", "nop"})
_ONE_OFFSET = "In place, a chunk has one offset on all GPUs"


@dataclass(slots=True, eq=False)
class _Step:
    """A step of a thread block, with what it waits for as (thread block, step)."""

    kind: str
    source: Location
    target: Location
    waits: list[tuple[int, int]]
    sent: int = -1  # number of the send that it starts
    received: int = -1  # and of the one that it ends


@dataclass(slots=True, eq=False)
class _Block:
    """A thread block."""

    to: int
    of: int
    lane: int
    steps: list[_Step] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Sent:
    """A send and the steps of both ends."""

    source: int
    target: int
    lane: int
    start: _Step
    end: _Step
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
    algo = _root(text, file)
    ranks = _number(algo, "ngpus", 2, MAX_GPUS, file)
    names = {name: collective for collective, name in COLLECTIVE_NAMES.items()}
    if algo.get("coll", "") not in names:
        raise unknown("collective", algo.get("coll", ""), names, key="algo.coll", file=file)
    collective = names[algo.get("coll", "")]
    gpus = [_blocks(gpu, ranks, file) for gpu in _gpus(algo, ranks, file)]
    sends = _paired(gpus, file)
    chunks = _chunks(collective, ranks, algo, sends, file)
    _dependencies(gpus, sends, file)
    order = _ordered(sends, file)
    schedule = _built(collective, algo.get("name", "msccl")[:80], ranks, chunks, sends, order)
    faults = verify(schedule).faults
    if faults:
        raise _wrong(faults[0], "It computes what its collective promises", file)
    return schedule


def _wrong(what: str, rule: str, file: str | None, key: str = "algo") -> SpecError:
    return SpecError(what, file=file, key=key, value=what, rule=rule)


def _root(text: str, file: str | None) -> ElementTree.Element:
    """Return the root of an XML text without document type, entities or processing instructions."""
    if len(text) > MAX_BYTES:
        raise _wrong(f"{len(text)} characters", f"A file has at most {MAX_BYTES}", file)
    if re.search(r"<!(?!--)", text) or re.search(r"<\?(?!xml\s)", text):
        raise _wrong("it declares a document type or entities", "MSCCL XML has elements alone", file)
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as error:
        raise _wrong(f"not valid XML: {error}", "The file must be XML", file) from None
    if root.tag != "algo":
        raise _wrong(f"its root is {root.tag[:40]!r}", "The root is 'algo'", file)
    return root


def _number(element: ElementTree.Element, name: str, low: int, high: int, file: str | None) -> int:
    """Return a whole number of an attribute, within limits."""
    text = element.get(name, "")
    if not re.fullmatch(r"-?[0-9]{1,9}", text) or not low <= int(text) <= high:
        key = f"{element.tag}.{name}"
        raise _wrong(f"{key} is {text[:40]!r}", f"It is a whole number from {low} to {high}", file, key)
    return int(text)


def _gpus(algo: ElementTree.Element, ranks: int, file: str | None) -> list[ElementTree.Element]:
    """Return the GPUs in order."""
    found = {_number(gpu, "id", 0, ranks - 1, file): gpu for gpu in algo}
    if any(gpu.tag != "gpu" for gpu in algo) or len(algo) != ranks or len(found) != ranks:
        raise _wrong(f"{len(algo)} GPUs of {ranks}", "Each GPU of 'ngpus' is there once", file, "gpu")
    return [found[rank] for rank in range(ranks)]


def _blocks(gpu: ElementTree.Element, ranks: int, file: str | None) -> list[_Block]:
    """Return the thread blocks of a GPU in the order of their numbers."""
    found: dict[int, _Block] = {}
    for tb in gpu:
        block = _Block(
            to=_number(tb, "send", -1, ranks - 1, file),
            of=_number(tb, "recv", -1, ranks - 1, file),
            lane=_number(tb, "chan", 0, _LANES - 1, file),
        )
        for n, step in enumerate(tb):
            if n >= MAX_STEPS or _number(step, "s", 0, MAX_STEPS - 1, file) != n:
                raise _wrong(
                    f"step {n} of a thread block", f"Steps count up, below {MAX_STEPS}", file, "step"
                )
            block.steps.append(_step(step, file))
        found[_number(tb, "id", 0, len(gpu) - 1, file)] = block
    if len(found) != len(gpu):
        raise _wrong("two thread blocks have one number", "Thread blocks count up", file, "tb.id")
    return [found[n] for n in range(len(found))]


def _step(step: ElementTree.Element, file: str | None) -> _Step:
    """Return a step."""
    kind = step.get("type", "")
    kinds = _SENDS | _RECEIVES | _LOCAL
    if kind not in kinds:
        raise unknown("step", kind, sorted(kinds), key="step.type", file=file)
    ends = []
    for side in ("src", "dst"):
        buffer = step.get(f"{side}buf", "")
        if buffer not in ("i", "o", "s"):
            raise unknown("buffer", buffer, ("i", "o", "s"), key=f"step.{side}buf", file=file)
        ends.append((buffer, _number(step, f"{side}off", -1, 10**8, file)))
    count = _number(step, "cnt", 0, 10**8, file)
    if kind != "nop" and count != 1:
        raise _wrong(f"a step of {count} chunks", "A step moves one chunk", file, "step.cnt")
    block, at = _number(step, "depid", -1, 10**6, file), _number(step, "deps", -1, 10**6, file)
    return _Step(kind, ends[0], ends[1], [(block, at)] if block >= 0 else [])


def _paired(gpus: Sequence[Sequence[_Block]], file: str | None) -> list[_Sent]:
    """Return all sends: the n-th one to a peer on a channel with the n-th receive there."""
    out: dict[tuple[int, int, int], list[_Step]] = defaultdict(list)
    into: dict[tuple[int, int, int], list[_Step]] = defaultdict(list)
    owner: dict[tuple[str, int, int, int], _Block] = {}
    for gpu, blocks in enumerate(gpus):
        for block in blocks:
            for step in block.steps:
                for kinds, peer, side in ((_SENDS, block.to, out), (_RECEIVES, block.of, into)):
                    if step.kind not in kinds:
                        continue
                    source, target = (gpu, peer) if side is out else (peer, gpu)
                    key = ("s" if side is out else "r", source, target, block.lane)
                    if peer in (-1, gpu) or owner.setdefault(key, block) is not block:
                        rule = "One thread block sends, and one receives, for each peer and channel"
                        raise _wrong(f"GPU {gpu} and peer {peer}", rule, file, "tb")
                    side[source, target, block.lane].append(step)
    sends: list[_Sent] = []
    for way in sorted(out.keys() | into.keys()):
        if len(out[way]) != len(into[way]):
            a, b, lane = way
            what = f"{len(out[way])} sends and {len(into[way])} receives from {a} to {b} on channel {lane}"
            raise _wrong(what, "Every send is received", file, "step")
        for start, end in zip(out[way], into[way], strict=True):
            start.sent = end.received = len(sends)
            sends.append(_Sent(*way, start, end))
    return sends


def _chunks(
    collective: str, ranks: int, algo: ElementTree.Element, sends: Sequence[_Sent], file: str | None
) -> list[Chunk]:
    """Return the chunks of a collective, after naming that of each send."""
    size = _number(algo, "nchunksperloop", 1, 10**7, file)
    if collective in ("all-reduce", "broadcast"):
        every = tuple(range(ranks))
        sources = every if collective == "all-reduce" else (_only_source(ranks, sends, file),)
        chunks = [Chunk(weight=1.0 / size, sources=sources, targets=every)] * size
    else:
        if size % ranks:
            rule = "Each GPU owns equally many chunks"
            raise _wrong(f"{size} chunks for {ranks} GPUs", rule, file, "algo.nchunksperloop")
        chunks = chunks_of(collective, ranks, size // ranks)
    if collective == "all-to-all":
        _name_exchanged(ranks, size // ranks, sends, file)
        return chunks
    for sent in sends:
        buffer, at = sent.end.target
        if buffer != BUFFER[collective] or not 0 <= at < size:
            rule = f"In place, all {size} chunks lie in buffer '{BUFFER[collective]}'"
            raise _wrong(f"a step at {buffer}{at}", rule, file, "step")
        if sent.start.kind == "s" and sent.start.source != sent.end.target:
            raise _wrong(f"a step moves {sent.start.source} to {sent.end.target}", _ONE_OFFSET, file, "step")
        sent.chunk = at
    return chunks


def _only_source(ranks: int, sends: Sequence[_Sent], file: str | None) -> int:
    """Return the GPU that receives nothing."""
    roots = set(range(ranks)) - {sent.target for sent in sends}
    if len(roots) != 1:
        raise _wrong(f"{len(roots)} GPUs receive nothing", "A broadcast has one root", file, "gpu")
    return roots.pop()


def _name_exchanged(ranks: int, parts: int, sends: Sequence[_Sent], file: str | None) -> None:
    """Name the chunks of an all-to-all: by input or output offset, or by what was put into scratch."""
    slots: dict[tuple[int, int], int] = {}
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
                raise _wrong(f"scratch {to} of GPU {sent.target}", "Scratch holds one chunk", file, "step")
        if len(later) == len(left):
            raise _wrong(f"{len(left)} sends of unknown chunks", "Chunks come from the input", file, "step")
        left = later


def _dependencies(gpus: Sequence[Sequence[_Block]], sends: Sequence[_Sent], file: str | None) -> None:
    """Find what each send waits for, and what comes before it in the list of sends."""
    for blocks in gpus:
        for block in blocks:
            received = -1  # last receive
            read: dict[int, int] = {}  # last send of each chunk
            open_waits: list[int] = []
            previous = -1
            for step in block.steps:
                open_waits += list(_waited(blocks, step, file))
                if step.kind in _RECEIVES:
                    end = sends[step.received]
                    end.after.update(open_waits)
                    if end.chunk in read:
                        end.after.add(read[end.chunk])
                    if previous >= 0:
                        end.order.add(previous)
                    received = previous = step.received
                    open_waits = []
                if step.kind in _SENDS:
                    start = sends[step.sent]
                    start.after.update([*open_waits, *([received] if received >= 0 else [])])
                    if previous >= 0:
                        start.order.add(previous)
                    read[start.chunk] = previous = step.sent
                    open_waits = []


def _waited(blocks: Sequence[_Block], step: _Step, file: str | None) -> Iterator[int]:
    """Yield the sends that a step names as those to wait for."""
    for block, at in step.waits:
        if block >= len(blocks) or not 0 <= at < len(blocks[block].steps):
            raise _wrong(f"step {at} of thread block {block}", "A step waits for one there is", file, "deps")
        other = blocks[block].steps[at]
        if other.received >= 0:
            yield other.received
        elif other.sent >= 0:
            yield other.sent


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
    raise _wrong("thread blocks wait for each other", "Steps can be done in some order", file, "deps")


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
            reduce=sent.end.kind in _ADDS,
            channel=sent.lane,
            after=sorted(number[one] for one in sent.after - {n}),
        )
    return build.schedule()
