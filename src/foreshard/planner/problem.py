"""What is left of planning once stages have prices: options of stages, and pipelines put together from them.

Engines, published profiles and brute-force oracles all speak through this; nothing here knows what an option
stands for. A layer is a place in the chain 0..num_layers-1, a stage holds layers [start, stop).
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageOption:
    """One way some devices run a stage. Arrays have shape (num_layers + 1, num_layers + 1): [start, stop].

    Attributes
    ----------
    takes : tuple of int
        Devices of each kind it occupies.
    micro_batch : int, samples
        That pass the stage together; stages of one pipeline agree on it.
    grain : int, samples
        A micro-batch shortened to n samples costs as one of the next multiple of `grain` (inner data-parallel
        ranks round up); divides `micro_batch`.
    time_s : ndarray
        Forward and backward of one micro-batch with all that recurs with it; inf where it cannot run.
    tail_s : ndarray
        What follows the last micro-batch: gradient synchronisation left exposed, the optimizer.
    max_in_flight : ndarray
        Micro-batches whose activations fit beside the states, 0 where not even one does.
    name : Hashable
        What the caller needs to make a stage of it.
    """

    takes: tuple[int, ...]
    micro_batch: int
    grain: int
    time_s: np.ndarray
    tail_s: np.ndarray
    max_in_flight: np.ndarray
    name: Hashable = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Devices, samples and stage options.

    Attributes
    ----------
    counts : tuple of int
        Devices of each kind.
    global_batch, num_layers, max_stages : int
    options : tuple of StageOption
    hop_s : ndarray, shape (options, options)
        Seconds a message between neighbours [before, after] adds to the stage after it, per micro-batch and
        both directions, on top of what `time_s` holds.
    boundary : ndarray, shape (num_layers + 1,)
        Size of the message at each cut relative to the one `hop_s` prices.
    jitter : float
        A step on D devices takes 1 + jitter * max(0, log2(D / 8)) times as long.
    usd_per_s : tuple of float
        Price of a device of each kind.
    """

    counts: tuple[int, ...]
    global_batch: int
    num_layers: int
    max_stages: int
    options: tuple[StageOption, ...]
    hop_s: np.ndarray
    boundary: np.ndarray
    jitter: float = 0.0
    usd_per_s: tuple[float, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stage of a template: which option runs which layers."""

    option: int
    start: int
    stop: int


Template = tuple[Part, ...]
"""A pipeline: parts in order that hold every layer once and agree on the micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Pipelines that run beside each other and the samples of each step they take."""

    templates: tuple[Template, ...]
    shares: tuple[int, ...]


def micro_batch_of(problem: Problem, template: Template) -> int:
    """Return the samples that pass the pipeline together."""
    return problem.options[template[0].option].micro_batch


def grain_of(problem: Problem, template: Template) -> int:
    """Return the samples a short micro-batch is rounded up to: that of the coarsest stage."""
    return max(problem.options[part.option].grain for part in template)


def takes_of(problem: Problem, template: Template) -> tuple[int, ...]:
    """Return the devices of each kind a pipeline occupies."""
    return tuple(
        int(sum(problem.options[part.option].takes[kind] for part in template))
        for kind in range(len(problem.counts))
    )


def stage_seconds(problem: Problem, template: Template) -> np.ndarray:
    """Return the seconds of one micro-batch on each stage, messages included."""
    times = [problem.options[part.option].time_s[part.start, part.stop] for part in template]
    for i in range(1, len(template)):
        before, after = template[i - 1], template[i]
        times[i] += problem.hop_s[before.option, after.option] * problem.boundary[after.start]
    return np.array(times)


def tail_seconds(problem: Problem, template: Template) -> float:
    """Return the seconds from a pipeline's last micro-batch to the end of its step."""
    return float(max(problem.options[part.option].tail_s[part.start, part.stop] for part in template))


def passes(problem: Problem, template: Template, share: int) -> float:
    """Return the micro-batches of a share, a short last one as the fraction it costs.

    Examples
    --------
    A share of 10 in micro-batches of 4 with grain 1 is 2.5 passes, with grain 4 it is 3.
    """
    size, grain = micro_batch_of(problem, template), grain_of(problem, template)
    return math.ceil(share / grain) * grain / size


def pipeline_seconds(problem: Problem, template: Template, share: int) -> float:
    """Return the seconds of a step of one pipeline: slowest stage in every pass, the others once, the tail."""
    times = stage_seconds(problem, template)
    bottleneck = float(times.max())
    fill = float(times.sum()) - bottleneck
    return fill + passes(problem, template, share) * bottleneck + tail_seconds(problem, template)


def fits(problem: Problem, template: Template, share: int) -> bool:
    """Return whether every stage holds what it has in flight: one micro-batch more for each stage after it."""
    rounds = -(-share // micro_batch_of(problem, template))
    depth = len(template)
    return all(
        problem.options[part.option].max_in_flight[part.start, part.stop] >= min(depth - i, rounds)
        for i, part in enumerate(template)
    )


def num_devices_of(problem: Problem, arrangement: Arrangement) -> int:
    """Return the devices an arrangement occupies."""
    return sum(sum(takes_of(problem, template)) for template in arrangement.templates)


def spread_factor(problem: Problem, num_devices: float) -> float:
    """Return how much longer a step takes for waiting on the slowest of so many devices."""
    return 1.0 + problem.jitter * max(0.0, math.log2(max(num_devices, 1.0) / 8.0))


def step_seconds(problem: Problem, arrangement: Arrangement) -> float:
    """Return the seconds of a step: of the slowest pipeline, lengthened by the spread over all devices."""
    slowest = max(
        pipeline_seconds(problem, template, share)
        for template, share in zip(arrangement.templates, arrangement.shares, strict=True)
    )
    return slowest * spread_factor(problem, num_devices_of(problem, arrangement))


def faults(problem: Problem, arrangement: Arrangement) -> list[str]:
    """Return why an arrangement is no answer to the problem, nothing if it is one."""
    found: list[str] = []
    if sum(arrangement.shares) != problem.global_batch or min(arrangement.shares, default=0) < 1:
        found.append(f"shares {arrangement.shares} do not make {problem.global_batch}")
    used = np.sum([takes_of(problem, t) for t in arrangement.templates], axis=0)
    if np.any(used > np.array(problem.counts)):
        found.append(f"takes {used.tolist()} of {problem.counts} devices")
    for template, share in zip(arrangement.templates, arrangement.shares, strict=True):
        found += _template_faults(problem, template, share)
    return found


def _template_faults(problem: Problem, template: Template, share: int) -> list[str]:
    found: list[str] = []
    cuts: list[Any] = [0, *(part.stop for part in template)]
    if [part.start for part in template] != cuts[:-1] or cuts[-1] != problem.num_layers:
        found.append(f"layers {[(p.start, p.stop) for p in template]} are not the chain")
    if len({problem.options[part.option].micro_batch for part in template}) > 1:
        found.append("stages differ in micro-batch")
    if len(template) > problem.max_stages:
        found.append(f"{len(template)} stages")
    if not found and not fits(problem, template, share):
        found.append(f"out of memory: {template}")
    return found
