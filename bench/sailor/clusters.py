"""Sailor's clusters as planning problems, and plans of ours in the judge's words.

The all-reduce waits for the stage that reduces longest, so plans are sorted into *bands* by the most bytes
any device reduces: in a band no stage holds more than the upper limit, and every step takes at least the
all-reduce of the lower. A bound that holds in all bands holds for every plan.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

import judge
import numpy as np
from judge import GPU_BYTES, NUM_LAYERS, Group, Stage

from foreshard.planner.solver.problem import Arrangement, Problem, Template

GPUS = tuple(GPU_BYTES)
GLOBAL_BATCH = 1024
NODE = 4
WIDTH = 2.6
NEVER_S = 1e4
CROWDED = 0.6
"""Part of the most pipelines there is room for above which their number is not told apart."""
ALL_BYTES = judge.gradient_bytes(0, NUM_LAYERS)
ONE_LAYER_BYTES = tuple(judge.gradient_bytes(i, i + 1) for i in range(NUM_LAYERS))


@dataclass(frozen=True, slots=True)
class Band:
    """Plans whose longest all-reduce is that of so many bytes over a link between two devices of a kind.

    Attributes
    ----------
    gpu : str
        The last kind when the stage that reduces longest has it among those it reduces with, otherwise the
        first: then some layers are on the first kind in every pipeline.
    least, most : float, bytes
        Of the stage that reduces longest; those of slower kinds count `_slowness` times.
    """

    gpu: str
    least: float
    most: float

    def split(self) -> tuple[Band, Band]:
        """Return the lower and the upper half."""
        middle = (self.least * self.most) ** 0.5
        return replace(self, most=middle), replace(self, least=middle)


def bands_of(counts: tuple[int, ...]) -> list[Band]:
    """Return bands that every plan is in one of."""
    least = max(ONE_LAYER_BYTES) / NODE
    bands = []
    for gpu in _kinds(counts):
        most = ALL_BYTES * max(_slowness(kind, gpu, counts) for kind in _kinds(counts))
        edges = [least]
        while edges[-1] < most:
            edges.append(edges[-1] * WIDTH)
        bands += [Band(gpu, low, high) for low, high in pairwise(edges)]
    return bands


def slowest_kind(counts: tuple[int, ...]) -> str:
    """Return the kind of the slowest links there are."""
    return _kinds(counts)[-1]


def _kinds(counts: tuple[int, ...]) -> list[str]:
    return [gpu for gpu, count in zip(GPUS, counts, strict=True) if count]


@functools.cache
def _slowness(gpu: str, than: str, counts: tuple[int, ...]) -> float:
    """Return the least factor on bytes by which one kind's link reduces as long as another's.

    The stage that reduces longest has at least all gradients over all devices in each piece of its ring,
    since every pipeline holds them all: smaller pieces, less the factor itself, need not be looked at.
    """
    if gpu == than or than != _kinds(counts)[0]:
        return 1.0
    factors = []
    for pieces in np.geomspace(0.6 * ALL_BYTES / sum(counts), ALL_BYTES / 2, 60):
        seconds = judge.transfer_seconds(pieces, gpu, 1, gpu, 1)
        grid = pieces * np.linspace(1.0, 2.0, 101)
        slower = [judge.transfer_seconds(size, than, 1, than, 1) for size in grid]
        factors.append(
            float(grid[np.searchsorted(slower, seconds) - 1] / pieces) if slower[0] < seconds else 1.0
        )
    return min(factors)


def _least_sync_s(counts: tuple[int, ...], band: Band, num_pipelines: int) -> float:
    """Return the shortest all-reduce of a stage that may be the longest of a plan of the band."""
    return min(
        (
            judge.all_reduce_seconds(size, num_pipelines, link, link)
            for gpu, link in _links(counts, band)
            for size in _stage_bytes()
            if band.least <= size * _slowness(gpu, band.gpu, counts) <= band.most
        ),
        default=NEVER_S,
    )


def _links(counts: tuple[int, ...], band: Band) -> list[tuple[str, str]]:
    """Return kinds of devices and the links that the stage that reduces longest waits for on them."""
    return [(gpu, gpu if band.gpu == _kinds(counts)[0] else band.gpu) for gpu in _kinds(counts)]


@functools.cache
def _stage_bytes() -> tuple[float, ...]:
    """Return what a device of a stage can have to reduce."""
    firsts = _types()[1]
    return tuple(sorted({judge.gradient_bytes(*at) / tp for at in firsts for tp in judge.RESERVED_BYTES}))


def _weight(gpu: str, band: Band, counts: tuple[int, ...]) -> float:
    """Return what bytes of a kind count in a band; plainly where it would else not run every layer."""
    factor = _slowness(gpu, band.gpu, counts)
    return factor if max(ONE_LAYER_BYTES) / NODE * factor <= band.most else 1.0


def problem_of(counts: tuple[int, ...], band: Band) -> Problem:
    """Return the planning problem of a cluster, for the plans of one band.

    Parameters
    ----------
    counts : tuple of int
        Devices by kind, in the order of `GPUS`.
    band : Band
    """
    names = [key for key in judge.times() if counts[GPUS.index(key[0])]]
    types, firsts = _types()
    room = sum(counts) * band.most / ALL_BYTES
    copies = _copies(max(1, int(CROWDED * room)), min(1.6, 1.0 + (band.most / band.least - 1.0) * 1.25))
    held = np.array(
        [
            [judge.gradient_bytes(*at) / tp * _weight(gpu, band, counts) for at in firsts]
            for gpu, tp, _ in names
        ]
    )
    time_s = np.array([[_stage_s(name, *at) for at in firsts] for name in names])
    most_copies = counts[0] if band.gpu == GPUS[0] else sum(counts)
    sync_s = np.array([_least_sync_s(counts, band, n) if n <= most_copies else NEVER_S for n in copies])
    update_s = np.array([judge.times()[name]["update_s"] for name in names])
    return Problem(
        counts=counts,
        global_batch=GLOBAL_BATCH,
        max_stages=NUM_LAYERS,
        types=types,
        takes=np.array([[tp * (gpu == kind) for kind in GPUS] for gpu, tp, _ in names]),
        micro_batch=np.array([size for _, _, size in names]),
        grain=np.array([size for _, _, size in names]),
        time_s=np.where(held <= band.most, time_s, np.inf),
        copies=copies,
        tail_s=np.broadcast_to(
            sync_s[:, None, None] + update_s[:, None], (len(copies), *time_s.shape)
        ).copy(),
        max_in_flight=np.array([[_rooms(name, *at) for at in firsts] for name in names]),
        hop_s=np.array([[_hop_s(a, b) for b in names] for a in names]),
        names=tuple(names),
    )


def _copies(most: int, ratio: float) -> tuple[int, ...]:
    """Return numbers of pipelines a ratio apart."""
    copies = [1]
    while copies[-1] < most:
        copies.append(max(copies[-1] + 1, int(copies[-1] * ratio)))
    return tuple(copies[:-1] if copies[-1] > most else copies)


@functools.cache
def _types() -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return the type of every interval and one interval of each: alike in kinds of layers and in ends."""
    intervals = [(i, j) for i in range(NUM_LAYERS) for j in range(i + 1, NUM_LAYERS + 1)]
    table = np.full((NUM_LAYERS + 1, NUM_LAYERS + 1), -1)
    seen: dict[tuple, int] = {}
    firsts = []
    for start, stop in intervals:
        kinds = Counter(judge.kind_of(layer) for layer in range(start, stop))
        key = (tuple(sorted(kinds.items())), start == 0, stop == NUM_LAYERS)
        if key not in seen:
            seen[key] = len(firsts)
            firsts.append((start, stop))
        table[start, stop] = seen[key]
    return table, firsts


def _stage_s(name: tuple[str, int, int], start: int, stop: int) -> float:
    """Return the seconds of a micro-batch on a stage between neighbours of its own kind."""
    gpu, tp, size = name
    seconds = judge.compute_seconds(gpu, tp, start, stop, size)
    messages = 2 - (start == 0) if stop - start < NUM_LAYERS else 0
    back = judge.message_bytes(start, size)
    return seconds + messages * judge.transfer_seconds(back, gpu, tp, gpu, tp)


def _hop_s(before: tuple[str, int, int], after: tuple[str, int, int]) -> float:
    """Return what the message between two stages costs both beyond what each assumes."""
    size = judge.message_bytes(1, after[2])
    between = judge.transfer_seconds(size, *before[:2], *after[:2])
    assumed = [judge.transfer_seconds(size, *one[:2], *one[:2]) for one in (before, after)]
    return sum(max(0.0, between - one) for one in assumed)


def _rooms(name: tuple[str, int, int], start: int, stop: int) -> int:
    """Return how many micro-batches fit by Sailor's memory check."""
    gpu, tp, size = name
    states = judge.memory_bytes(tp, start, stop, size, 0)
    each = judge.memory_bytes(tp, start, stop, size, 1) - states
    return max(0, int((GPU_BYTES[gpu] - states) // each))


def groups_of(problem: Problem, arrangement: Arrangement) -> tuple[Group, ...]:
    """Return an arrangement in the judge's words: replicas alike in stages and micro-batches together."""
    alike = Counter(
        (template, -(-share // int(problem.micro_batch[template[0].option])))
        for template, share in zip(arrangement.templates, arrangement.shares, strict=True)
    )
    groups = [
        Group((_replica(problem, template),) * number, int(problem.micro_batch[template[0].option]), rounds)
        for (template, rounds), number in alike.items()
    ]
    return tuple(sorted(groups, key=lambda group: str(group.replicas[0])))


def _replica(problem: Problem, template: Template) -> tuple[Stage, ...]:
    return tuple(Stage(*problem.names[part.option][:2], part.start, part.stop) for part in template)
