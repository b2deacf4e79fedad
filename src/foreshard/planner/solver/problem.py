"""The abstract planning problem: options of stages with their times, and pipelines put together from them.

Engines, published profiles and brute-force oracles all speak through this; nothing here knows what an option
stands for. A layer is a place in the chain 0..num_layers-1; a stage holds layers [start, stop) and is of a
*type*: intervals of one type cost the same whatever option runs them, so times are kept by type.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from foreshard.graph.pace import pipeline_pace


class PipelineFamily(NamedTuple):
    """Pipelines of one micro-batch: wherever they lie, or within one link domain of a kind of devices."""

    micro_batch: int
    kind: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Devices, samples and priced stage options.

    Attributes
    ----------
    counts : tuple of int
        Devices of each kind.
    global_batch, max_stages : int
    types : ndarray of int, shape (num_layers + 1, num_layers + 1)
        Type of the stage that holds layers [start, stop); -1 where stop <= start.
    takes : ndarray of int, shape (options, kinds)
        Devices of each kind an option occupies.
    micro_batch : ndarray of int, shape (options,), samples
        That pass a stage together; stages of one pipeline agree on it.
    grain : ndarray of int, shape (options,), samples
        A micro-batch shortened to n samples costs as one of the next multiple of `grain` (inner data-parallel
        ranks round up); divides `micro_batch`.
    shortest : ndarray, shape (options, types), or None
        Part of a micro-batch's time that the shortest takes: the host launches as much for it.
    time_s : ndarray, shape (options, types)
        Forward and backward of one micro-batch with all that recurs with it; inf where it cannot run.
    copies : tuple of int
        Numbers of pipelines from which on each row of `tail_s` holds, rising from 1.
    tail_s : ndarray, shape (len(copies), options, types)
        What follows the last micro-batch: gradient synchronisation left exposed, the optimizer.
    max_in_flight : ndarray of int, shape (options, types)
        Micro-batches whose activations fit beside the states, 0 where not even one does.
    hop_s : ndarray, shape (options, options)
        Seconds that a message between neighbours [before, after] adds to the stage after it, per micro-batch
        and both directions, on top of what `time_s` holds.
    jitter : float
        A step on D devices takes 1 + jitter * max(0, log2(D / 8)) times as long.
    names : tuple
        What the caller needs to make a stage of each option.
    leave_s : ndarray, shape (options, types), or None
        Seconds that a stage takes longer unless all of its pipeline lies within one link domain.
    leave_tail_s : ndarray, shape (options, types), or None
        As `leave_s`, of tails.
    domains : tuple of int
        Devices of each kind that share a link domain; empty where `leave_s` is None.
    bands : ndarray of int, shape (num_layers, num_layers)
        `types` by start and length less one; -1 past the end.
    lengths : ndarray of int, shape (types,)
        Layers of the longest stage of each type.
    far_s : ndarray, shape (options, types)
        Times of stages of pipelines that no link domain holds.
    """

    counts: tuple[int, ...]
    global_batch: int
    max_stages: int
    types: np.ndarray
    takes: np.ndarray
    micro_batch: np.ndarray
    grain: np.ndarray
    time_s: np.ndarray
    copies: tuple[int, ...]
    tail_s: np.ndarray
    max_in_flight: np.ndarray
    hop_s: np.ndarray
    jitter: float = 0.0
    names: tuple[Hashable, ...] = ()
    leave_s: np.ndarray | None = None
    leave_tail_s: np.ndarray | None = None
    domains: tuple[int, ...] = ()
    shortest: np.ndarray | None = None
    bands: np.ndarray = field(init=False)
    lengths: np.ndarray = field(init=False)
    far_s: np.ndarray = field(init=False)
    _by_family: dict[PipelineFamily, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        """Lay types out by start and length, shape (num_layers, num_layers); -1 past the end."""
        size = len(self.types) - 1
        stop = np.arange(size)[:, None] + 1 + np.arange(size)[None, :]
        inside = np.minimum(stop, size)
        types = np.where(stop <= size, self.types[np.arange(size)[:, None], inside], -1)
        object.__setattr__(self, "bands", types)
        lengths = np.zeros(int(types.max()) + 1, dtype=np.int64)
        _, length = np.nonzero(types >= 0)
        np.maximum.at(lengths, types[types >= 0], length + 1)
        object.__setattr__(self, "lengths", lengths)
        far = self.time_s if self.leave_s is None else self.time_s + self.leave_s
        object.__setattr__(self, "far_s", far)

    @property
    def num_layers(self) -> int:
        """Return the places of the chain."""
        return len(self.types) - 1

    @property
    def families(self) -> list[PipelineFamily]:
        """Return the families of pipelines: by micro-batch those of any place, and those within a domain."""
        sizes = [int(size) for size in np.unique(self.micro_batch)]
        within = [PipelineFamily(size, kind) for kind in range(len(self.domains)) for size in sizes]
        return [*(PipelineFamily(size) for size in sizes), *within]

    def options_of(self, family: PipelineFamily) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the options of a family that there are devices for, their times and `max_in_flight`."""
        if family not in self._by_family:
            fits = (self.micro_batch == family.micro_batch) & np.all(self.takes <= self.counts, axis=1)
            if family.kind is not None:
                devices = self.takes.sum(1)
                fits &= (self.takes[:, family.kind] == devices) & (devices <= self.domains[family.kind])
            options = np.flatnonzero(fits)
            times = self.time_s if family.kind is not None else self.far_s
            self._by_family[family] = (options, times[options], self.max_in_flight[options])
        return self._by_family[family]

    def tail_between(self, pipelines: tuple[int, int]) -> np.ndarray:
        """Return the least `tail_s` of numbers of pipelines from fewest to most, shape (options, types)."""
        first = max(int(np.searchsorted(self.copies, pipelines[0], side="right")) - 1, 0)
        last = max(int(np.searchsorted(self.copies, pipelines[1], side="right")) - 1, first)
        return self.tail_s[first] if first == last else self.tail_s[first : last + 1].min(0)

    def tails_in(self, family: PipelineFamily, tail_s: np.ndarray) -> np.ndarray:
        """Return tails of stages in pipelines of a family, shape (options, types)."""
        return tail_s if family.kind is not None or self.leave_tail_s is None else tail_s + self.leave_tail_s

    def tail_of(self, num_pipelines: int) -> np.ndarray:
        """Return `tail_s` for so many pipelines, shape (options, types)."""
        row = int(np.searchsorted(self.copies, num_pipelines, side="right")) - 1
        return self.tail_s[max(row, 0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """A stage of a template: which option runs which layers."""

    option: int
    start: int
    stop: int


Template = tuple[StageSpan, ...]
"""A pipeline: parts in order that hold every layer once and agree on the micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Pipelines that run side by side and the samples of each step they take."""

    templates: tuple[Template, ...]
    shares: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRate:
    """How a pipeline goes: a step takes fill + passes * bottleneck + tail seconds.

    A pass is a micro-batch, a short last one the fraction it costs; there is at least one.
    """

    fill_s: float
    bottleneck_s: float
    micro_batch: int
    grain: int
    shortest: float = 0.0

    def samples(self, seconds: float) -> int:
        """Return the samples it processes in so many seconds, tail excluded."""
        if seconds < (self.fill_s + self.bottleneck_s) * (1 - 1e-12):
            return 0
        grains = math.floor(
            (seconds - self.fill_s) / self.bottleneck_s * self.micro_batch / self.grain + 1e-9
        )
        whole, short = divmod(grains * self.grain, self.micro_batch)
        left_s = seconds - self.fill_s - whole * self.bottleneck_s
        fits = left_s >= self.shortest * self.bottleneck_s * (1 - 1e-9)
        return whole * self.micro_batch + (short if fits else 0)

    def seconds(self, share: int) -> float:
        """Return the seconds it takes for a share, tail excluded."""
        whole, short = divmod(math.ceil(share / self.grain) * self.grain, self.micro_batch)
        part = max(short / self.micro_batch, self.shortest) if short else 0.0
        return self.fill_s + max(1.0, whole + part) * self.bottleneck_s


def stage_seconds(problem: Problem, template: Template) -> np.ndarray:
    """Return the seconds of one micro-batch on each stage, messages included."""
    table = problem.time_s if problem.leave_s is None or is_within(problem, template) else problem.far_s
    times = [table[part.option, problem.types[part.start, part.stop]] for part in template]
    for i in range(1, len(template)):
        times[i] += problem.hop_s[template[i - 1].option, template[i].option]
    return np.array(times)


def is_within(problem: Problem, template: Template) -> bool:
    """Return whether one link domain can hold all of a pipeline."""
    takes = takes_of(problem, template)
    kinds = np.flatnonzero(takes)
    return len(kinds) == 1 and bool(problem.domains) and int(takes.sum()) <= problem.domains[kinds[0]]


def pipeline_rate(problem: Problem, template: Template) -> PipelineRate:
    """Return how a pipeline goes."""
    pace = pipeline_pace(stage_seconds(problem, template))
    return PipelineRate(
        fill_s=float(pace.fill_s),
        bottleneck_s=float(pace.period_s),
        micro_batch=int(problem.micro_batch[template[0].option]),
        grain=max(int(problem.grain[part.option]) for part in template),
        shortest=_shortest(problem, template[int(pace.slowest)]),
    )


def _shortest(problem: Problem, stage: StageSpan) -> float:
    """Return the part of a micro-batch's time on a stage that a short one takes at least."""
    if problem.shortest is None:
        return 0.0
    return float(problem.shortest[stage.option, problem.types[stage.start, stage.stop]])


def tail_seconds(problem: Problem, template: Template, num_pipelines: int) -> float:
    """Return the seconds from a pipeline's last micro-batch to the end of its step."""
    return max(_tails(problem, template, num_pipelines))


def _tails(problem: Problem, template: Template, num_pipelines: int) -> list[float]:
    """Return the tail of every stage of a pipeline, seconds."""
    tail = problem.tail_of(num_pipelines)
    if problem.leave_tail_s is not None and not is_within(problem, template):
        tail = tail + problem.leave_tail_s
    return [float(tail[part.option, problem.types[part.start, part.stop]]) for part in template]


def takes_of(problem: Problem, template: Template) -> np.ndarray:
    """Return the devices of each kind a pipeline occupies, shape (kinds,)."""
    return problem.takes[[part.option for part in template]].sum(0)


def spread_factor(problem: Problem, num_devices: float) -> float:
    """Return how much longer a step takes for waiting on the slowest of so many devices."""
    return 1.0 + problem.jitter * max(0.0, math.log2(max(num_devices, 1.0) / 8.0))


def step_seconds(problem: Problem, arrangement: Arrangement) -> float:
    """Return the seconds of a step: of the slowest pipeline, lengthened by the spread over all devices."""
    copies = len(arrangement.templates)
    slowest = max(
        pipeline_rate(problem, template).seconds(share) + tail_seconds(problem, template, copies)
        for template, share in zip(arrangement.templates, arrangement.shares, strict=True)
    )
    return slowest * spread_factor(problem, _num_used(problem, arrangement))


def least_step_seconds(problem: Problem, arrangement: Arrangement) -> float:
    """Return the seconds that no plan of an arrangement goes below, whichever stage sets the pace.

    `step_seconds` lets all stages but the slowest fill the pipeline once, and the longest tail follow. Behind
    a slow first stage the others fill it while that one works, and tails of late stages run beside the last
    work of those before them: they only follow what their own stage has to do (docs/derivations/step.md).
    """
    copies = len(arrangement.templates)
    slowest = 0.0
    for template, share in zip(arrangement.templates, arrangement.shares, strict=True):
        rate, times = pipeline_rate(problem, template), stage_seconds(problem, template)
        hidden = min(rate.fill_s, max(0.0, len(template) * rate.bottleneck_s - float(times.sum())))
        last = share / rate.micro_batch % 1.0 or 1.0  # a short last micro-batch passes the others faster
        hidden += (1.0 - last) * (rate.fill_s - hidden)
        tails = np.array(_tails(problem, template, copies))
        passes = (rate.seconds(share) - rate.fill_s) / rate.bottleneck_s
        own = float((passes * times + tails).max())
        slowest = max(slowest, rate.seconds(share) - hidden + tails[0], own)
    return slowest * spread_factor(problem, _num_used(problem, arrangement))


def _num_used(problem: Problem, arrangement: Arrangement) -> int:
    return sum(int(takes_of(problem, template).sum()) for template in arrangement.templates)


def faults(problem: Problem, arrangement: Arrangement) -> list[str]:
    """Return why an arrangement is no answer to the problem, nothing if it is one."""
    found: list[str] = []
    if sum(arrangement.shares) != problem.global_batch or min(arrangement.shares, default=0) < 1:
        found.append(f"shares {arrangement.shares} do not make {problem.global_batch}")
    used = np.sum([takes_of(problem, t) for t in arrangement.templates], axis=0)
    if np.any(used > np.array(problem.counts)):
        found.append(f"takes {used.tolist()} of {problem.counts} devices")
    for template in arrangement.templates:
        found += template_faults(problem, template)
    return found


def template_faults(problem: Problem, template: Template) -> list[str]:
    """Return why a pipeline cannot run.

    A stage holds one micro-batch for itself and one for each stage after it, however small the share: memory
    never limits shares.
    """
    cuts = [0, *(part.stop for part in template)]
    if [part.start for part in template] != cuts[:-1] or cuts[-1] != problem.num_layers:
        return [f"layers {[(p.start, p.stop) for p in template]} are not the chain"]
    found: list[str] = []
    if len({int(problem.micro_batch[part.option]) for part in template}) > 1:
        found.append("stages differ in micro-batch")
    if len(template) > problem.max_stages:
        found.append(f"{len(template)} stages")
    if not math.isfinite(stage_seconds(problem, template).sum()):
        found.append("a stage that cannot run")
    most = rounds_of(problem, int(problem.micro_batch[template[0].option]))
    for behind, part in enumerate(reversed(template), start=1):
        if problem.max_in_flight[part.option, problem.types[part.start, part.stop]] < min(behind, most):
            found.append(f"out of memory: {part}")
    return found


def rounds_of(problem: Problem, micro_batch: int) -> int:
    """Return the most micro-batches of a size that a pipeline can ever get."""
    return -(-problem.global_batch // micro_batch)
