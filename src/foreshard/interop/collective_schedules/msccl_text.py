"""MSCCL XML as thread blocks and steps, checked as text from anywhere must be.

Source of the fields: microsoft/msccl-tools 030a750 (msccl/language/ir.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from xml.etree import ElementTree

from foreshard.errors import SpecError, unknown
from foreshard.interop.collective_schedules.msccl import MAX_STEPS, Location

MAX_CHARS = 64 * 2**20
MAX_GPUS = 4096
MAX_MOVES = 4_000_000  # chunks that all steps move
_LANES = 1024  # channels
SENDS = frozenset({"s", "rcs", "rrs", "rrcs"})
RECEIVES = frozenset({"r", "rrc", "rcs", "rrs", "rrcs"})
ADDS = frozenset({"rrc", "rrs", "rrcs"})
LOCAL = frozenset({"cpy", "re", "nop"})


@dataclass(slots=True, eq=False)
class MscclStep:
    """A step of one chunk; it waits for steps of its GPU, given as (thread block, step)."""

    kind: str
    source: Location
    target: Location
    waits: tuple[tuple[int, int], ...]
    sent: int = -1  # number of the send that it starts
    received: int = -1  # and of the one that it ends, or whose arrival it adds
    addition: MscclStep | None = None  # the step that adds what this one receives


@dataclass(slots=True, eq=False)
class MscclBlock:
    """A thread block; `ends` has the position after each step of the file, which may move several chunks."""

    to: int
    of: int
    lane: int
    steps: list[MscclStep] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


def wrong(what: str, rule: str, file: str | None, key: str = "algo") -> SpecError:
    """Return the error of a place in a file."""
    return SpecError(what, file=file, key=key, value=what, rule=rule)


def root_of(text: str, file: str | None) -> ElementTree.Element:
    """Return the root of an XML text without document type, entities or processing instructions."""
    if len(text) > MAX_CHARS:
        raise wrong(f"{len(text)} characters", f"A file has at most {MAX_CHARS}", file)
    if re.search(r"<!(?!--)", text) or re.search(r"<\?(?!xml\s)", text):
        raise wrong("it declares a document type or entities", "MSCCL XML has elements alone", file)
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as error:
        raise wrong(f"not valid XML: {error}", "The file must be XML", file) from None
    if root.tag != "algo":
        raise wrong(f"its root is {root.tag[:40]!r}", "The root is 'algo'", file)
    return root


def number_of(element: ElementTree.Element, name: str, low: int, high: int, file: str | None) -> int:
    """Return a whole number of an attribute, within limits."""
    text = element.get(name, "")
    if not re.fullmatch(r"-?[0-9]{1,9}", text) or not low <= int(text) <= high:
        key = f"{element.tag}.{name}"
        raise wrong(f"{key} is {text[:40]!r}", f"It is a whole number from {low} to {high}", file, key)
    return int(text)


def _ordered_gpus(algo: ElementTree.Element, ranks: int, file: str | None) -> list[ElementTree.Element]:
    """Return the GPUs in order."""
    found = {number_of(gpu, "id", 0, ranks - 1, file): gpu for gpu in algo}
    if any(gpu.tag != "gpu" for gpu in algo) or len(algo) != ranks or len(found) != ranks:
        raise wrong(f"{len(algo)} GPUs of {ranks}", "Each GPU of 'ngpus' is there once", file, "gpu")
    return [found[rank] for rank in range(ranks)]


def _blocks(gpu: ElementTree.Element, ranks: int, file: str | None) -> list[MscclBlock]:
    """Return the thread blocks of a GPU in the order of their numbers."""
    found: dict[int, MscclBlock] = {}
    for tb in gpu:
        block = MscclBlock(
            to=number_of(tb, "send", -1, ranks - 1, file),
            of=number_of(tb, "recv", -1, ranks - 1, file),
            lane=number_of(tb, "chan", 0, _LANES - 1, file),
        )
        for n, step in enumerate(tb):
            if n >= MAX_STEPS or number_of(step, "s", 0, MAX_STEPS - 1, file) != n:
                raise wrong(f"step {n} of a thread block", f"Steps count up, below {MAX_STEPS}", file, "step")
            block.steps += _steps(step, file)
            block.ends.append(len(block.steps))
        found[number_of(tb, "id", 0, len(gpu) - 1, file)] = block
    if len(found) != len(gpu):
        raise wrong("two thread blocks have one number", "Thread blocks count up", file, "tb.id")
    return [found[n] for n in range(len(found))]


def _steps(step: ElementTree.Element, file: str | None) -> list[MscclStep]:
    """Return a step for each chunk that a step of the file moves; the first one waits."""
    kind = step.get("type", "")
    kinds = SENDS | RECEIVES | LOCAL
    if kind not in kinds:
        raise unknown("step", kind, sorted(kinds), key="step.type", file=file)
    ends = []
    for side in ("src", "dst"):
        buffer = step.get(f"{side}buf", "")
        if buffer not in ("i", "o", "s"):
            raise unknown("buffer", buffer, ("i", "o", "s"), key=f"step.{side}buf", file=file)
        ends.append((buffer, number_of(step, f"{side}off", -1, 10**8, file)))
    count = 1 if kind == "nop" else number_of(step, "cnt", 1, MAX_STEPS, file)
    wait = number_of(step, "depid", -1, 10**6, file), number_of(step, "deps", -1, 10**6, file)
    (from_buffer, first), (to_buffer, to) = ends
    return [
        MscclStep(
            kind, (from_buffer, first + n), (to_buffer, to + n), (wait,) if wait[0] >= 0 and not n else ()
        )
        for n in range(count)
    ]


def blocks_of(algo: ElementTree.Element, ranks: int, file: str | None) -> list[list[MscclBlock]]:
    """Return the thread blocks of each GPU."""
    gpus = [_blocks(gpu, ranks, file) for gpu in _ordered_gpus(algo, ranks, file)]
    moves = sum(len(block.steps) for blocks in gpus for block in blocks)
    if moves > MAX_MOVES:
        raise wrong(f"steps move {moves} chunks", f"A file moves at most {MAX_MOVES}", file)
    return gpus
