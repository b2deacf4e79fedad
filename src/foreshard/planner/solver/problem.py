"""The abstract planning problem: options of stages with their times, and pipelines put together from them.

Engines, published profiles and brute-force oracles all speak through this; nothing here knows what an option
stands for. A layer is a place in the chain 0..num_layers-1; a stage holds layers [start, stop) and is of a
*type*: intervals of one type cost the same whatever option runs them, so times are kept by type.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

Filling = Literal["full", "typical", "least"]
"""What filling and draining a pipeline costs, as `pipeline_columns` counts it."""

_NEVER_S = 1e6
"""Seconds of a tail with which no pipeline is in any step."""
_BACKWARD = 2.0 / 3.0
"""Part of a stage's time for a micro-batch that its backward typically takes, where that is not known."""


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
        Forward and backward of one micro-batch with all that recurs with it; inf where it cannot run. The
        other tables say nothing of such a stage.
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
    max_pipelines : int or None
        Most pipelines side by side: those of stages that may not share a link domain. None for no limit.
    forward_s, backward_s : ndarray, shape (options, types), or None
        Parts of `time_s` that forward and backward take at least, messages not counted; None where nothing is
        known of them.
    chunks : int
        Of layers that a device of a pipeline of several stages holds. With more than one, times are those of
        a chunk, samples count once for each chunk, and micro-batches come in rounds of as many as a pipeline
        has stages, of which the last one may be short.
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
    chunks: int = 1
    max_pipelines: int | None = None
    forward_s: np.ndarray | None = None
    backward_s: np.ndarray | None = None
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
        first, last = self.row_of(pipelines[0]), self.row_of(pipelines[1])
        return self.tail_s[first] if first == last else self.tail_s[first : last + 1].min(0)

    def tails_in(self, family: PipelineFamily, tail_s: np.ndarray) -> np.ndarray:
        """Return tails of stages in pipelines of a family, shape (options, types)."""
        return tail_s if family.kind is not None or self.leave_tail_s is None else tail_s + self.leave_tail_s

    def row_of(self, num_pipelines: int) -> int:
        """Return the row of `tail_s` for so many pipelines."""
        return max(int(np.searchsorted(self.copies, num_pipelines, side="right")) - 1, 0)


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


@dataclass(frozen=True, slots=True)
class PipelineRate:
    """How a pipeline goes: a step takes fill + passes * bottleneck + tail seconds.

    A pass is a micro-batch, a short last one the part r that it costs; `least` is the fewest passes. A short
    last one spares, of these seconds, the lesser of (1 - r) * `drained_s` and r * `shadowed_s`: it comes up
    faster than the others, or the one before it is the last to come up. Passes come in rounds of `together`.
    Nor does a step take less than `round_trip_s` for one whole micro-batch, `apart_s` for each one more and
    its part of `short_s` for a short one.
    """

    fill_s: float
    bottleneck_s: float
    micro_batch: int
    grain: int
    shortest: float = 0.0
    drained_s: float = 0.0
    shadowed_s: float = 0.0
    together: int = 1
    least: float = 1.0
    round_trip_s: float = 0.0
    apart_s: float = 0.0
    short_s: float = 0.0

    def samples(self, seconds: float) -> int:
        """Return the samples it processes in so many seconds, tail excluded."""
        if seconds < (self.fill_s + self.least * self.bottleneck_s) * (1 - 1e-12):
            return 0
        passes = (seconds - self.fill_s) / self.bottleneck_s
        grains = math.floor(passes * self.micro_batch / self.grain + 1e-9)
        whole = grains * self.grain // self.micro_batch
        drained, shadowed = self.drained_s / self.bottleneck_s, self.shadowed_s / self.bottleneck_s
        part = last_part(passes - whole, drained, shadowed)
        short = math.floor(part * self.micro_batch / self.grain + 1e-9) * self.grain
        begun = whole % self.together  # only the last of a round may be short
        fits = short > 0 and part >= self.shortest * (1 - 1e-9) and begun == self.together - 1
        samples = whole * self.micro_batch + short if fits else (whole - begun) * self.micro_batch
        if self.round_trip_s == 0.0:
            return samples
        return min(samples, self._by_round_trip(seconds, whole))

    def _by_round_trip(self, seconds: float, whole: int) -> int:
        """Return the samples that come back in time, of so many whole micro-batches and a short one."""
        if seconds < self.round_trip_s * (1 - 1e-12):
            return 0
        left_s = max(seconds - self.round_trip_s, 0.0)
        if left_s < self.apart_s * (whole - 1) * (1 - 1e-9):
            whole = math.floor(left_s / self.apart_s + 1e-9) + 1
        left_s -= self.apart_s * (whole - 1)
        part = max(left_s, 0.0) / self.short_s if left_s < self.short_s else 1.0
        short = math.floor(part * self.micro_batch / self.grain + 1e-9) * self.grain
        short = min(short, self.micro_batch - self.grain) if part >= self.shortest * (1 - 1e-9) else 0
        return whole * self.micro_batch + short

    def seconds(self, share: int) -> float:
        """Return the seconds it takes for a share, tail excluded."""
        whole, short = divmod(math.ceil(share / self.grain) * self.grain, self.micro_batch)
        missing = -(whole + (short > 0)) % self.together
        if missing:
            whole, short = whole + (short > 0) + missing - 1, self.grain
        part = max(short / self.micro_batch, self.shortest) if short else 0.0
        spared_s = min((1.0 - part) * self.drained_s, part * self.shadowed_s) if whole else 0.0
        seconds = self.fill_s + max(self.least, whole + part) * self.bottleneck_s - spared_s
        further_s = self.apart_s * (whole - 1) + part * self.short_s if whole else 0.0
        return max(seconds, self.round_trip_s + further_s)


def last_part(passes: Any, drained: Any, shadowed: Any) -> Any:
    """Return the part of a last micro-batch that takes so many passes less what it spares, at most 1.

    `drained` and `shadowed` are those of a :class:`PipelineRate` in passes.
    """
    return np.minimum((passes + drained) / (1.0 + drained), passes / np.maximum(1.0 - shadowed, 1e-12))


def stage_seconds(problem: Problem, template: Template) -> np.ndarray:
    """Return the seconds of one micro-batch on each stage, messages included."""
    return _Pipelines.of(problem, [template]).times_s[0]


def takes_of(problem: Problem, template: Template) -> np.ndarray:
    """Return the devices of each kind a pipeline occupies, shape (kinds,)."""
    return problem.takes[[part.option for part in template]].sum(0)


def pipeline_rate(problem: Problem, template: Template, *, filling: Filling = "full") -> PipelineRate:
    """Return how a pipeline goes, as `pipeline_columns`."""
    return pipeline_columns(problem, [template], filling=filling).rate(0)


def tail_seconds(
    problem: Problem, template: Template, num_pipelines: int, *, filling: Filling = "full"
) -> float:
    """Return the seconds from a pipeline's last backward to the end of its step, as `pipeline_columns`."""
    return float(pipeline_columns(problem, [template], filling=filling).tails(problem, num_pipelines)[0])


class PipelineColumns(NamedTuple):
    """Pipelines of a problem, one column each.

    takes : ndarray, shape (kinds, pipelines)
        Devices.
    rates : ndarray, shape (12, pipelines)
        The fields of their :class:`PipelineRate`.
    tails_s : ndarray, shape (len(copies), pipelines)
        Seconds from the last backward, on the first stage, to the end of the step.
    """

    takes: np.ndarray
    rates: np.ndarray
    tails_s: np.ndarray

    def rate(self, at: int) -> PipelineRate:
        """Return how one of them goes."""
        rates = self.rates[:, at].tolist()
        fill_s, bottleneck_s, micro_batch, grain, shortest, drained_s, shadowed_s, together, *others = rates
        return PipelineRate(
            fill_s,
            bottleneck_s,
            int(micro_batch),
            int(grain),
            shortest,
            drained_s,
            shadowed_s,
            int(together),
            *others,
        )

    def tails(self, problem: Problem, num_pipelines: int) -> np.ndarray:
        """Return their tails beside each other in such a number."""
        return self.tails_s[problem.row_of(num_pipelines)]

    def followed_by(self, others: PipelineColumns) -> PipelineColumns:
        """Return these columns and then others."""
        pairs = zip(self, others, strict=True)
        return PipelineColumns(*(np.concatenate(pair, axis=1) for pair in pairs))

    def unfilled(self) -> PipelineColumns:
        """Return these columns with nothing lost to filling, and a micro-batch for a short last one."""
        rates = self.rates.copy()
        rates[0] = -rates[1]
        rates[5:] = 0.0
        return self._replace(rates=rates)

    def samples(self, seconds: np.ndarray) -> np.ndarray:
        """Return what each processes at most in so many seconds, tail excluded, with fractions of samples.

        A short last micro-batch comes on top, as far as it spares its time.
        """
        fill, bottleneck, size, grain, _, drained, shadowed = self.rates[:7]
        spared = (drained > 0.0) * (size - grain) * np.clip(shadowed / bottleneck, 0.0, 1.0)
        passes = (seconds - fill) / bottleneck
        return np.where(passes > 0.0, size * passes + spared, 0.0)

    def whole_samples(self, seconds: np.ndarray) -> np.ndarray:
        """Return the whole samples each processes, as :meth:`PipelineRate.samples`."""
        fill, bottleneck, size, grain, shortest, drained, shadowed, together, least = self.rates[:9]
        passes = (seconds - fill) / bottleneck
        whole = np.floor(passes * size / grain + 1e-9) * grain // size
        part = last_part(passes - whole, drained / bottleneck, shadowed / bottleneck)
        short = np.floor(part * size / grain + 1e-9) * grain
        begun = whole % together
        short = np.where((part < shortest * (1 - 1e-9)) | (begun < together - 1), 0.0, short)
        samples = (whole - np.where(short > 0, 0.0, begun)) * size + short
        samples = np.minimum(samples, self._by_round_trip(seconds, whole))
        return np.where(seconds < (fill + least * bottleneck) * (1 - 1e-12), 0.0, samples)

    def _by_round_trip(self, seconds: np.ndarray, whole: np.ndarray) -> np.ndarray:
        _, _, size, grain, shortest, *_, round_trip, apart, short = self.rates
        is_late = seconds < round_trip * (1 - 1e-12)
        left = np.maximum(seconds - round_trip, 0.0)
        most = np.floor(left / np.maximum(apart, 1e-300) + 1e-9) + 1
        whole = np.where(left < apart * (whole - 1) * (1 - 1e-9), most, whole)
        left_of_last = np.maximum(left - apart * (whole - 1), 0.0)
        part = np.where(left_of_last >= short, 1.0, left_of_last / np.maximum(short, 1e-300))
        rest = np.minimum(np.floor(part * size / grain + 1e-9) * grain, size - grain)
        samples = whole * size + np.where(part < shortest * (1 - 1e-9), 0.0, rest)
        return np.where(round_trip > 0.0, np.where(is_late, 0.0, samples), np.inf)


def pipeline_columns(
    problem: Problem, templates: Sequence[Template], *, filling: Filling = "full"
) -> PipelineColumns:
    """Return how pipelines go.

    In `full` a pipeline fills and drains once with all its stages, and the longest tail follows: what column
    generation can count, exact for equal stages. In truth the stages behind the slowest do so less the work
    that it has meanwhile: a micro-batch for each of them, half before its first backward, half after its last
    forward. The tail of a stage begins earlier than that of the first by the backwards of the stages before
    it, and a short last micro-batch drains faster. That is the `typical` cost, where backwards take twice as
    long as forwards unless the problem knows them. The `least` is a bound: it takes to be known of forwards
    and backwards only what the problem knows, and tails behind the slowest stage begin as early as they may.

    Source
    ------
    docs/derivations/step.md.
    """
    rates = np.empty((12, len(templates)))
    takes = np.empty((len(problem.counts), len(templates)))
    tails = np.empty((len(problem.copies), len(templates)))
    by_length: dict[int, list[int]] = {}
    for i, template in enumerate(templates):
        by_length.setdefault(len(template), []).append(i)
    for rows in by_length.values():
        some = _Pipelines.of(problem, [templates[i] for i in rows])
        takes[:, rows], rates[:, rows] = some.takes.T, some.rates(problem, filling)
        tails[:, rows] = some.tails_s(problem, filling)
    return PipelineColumns(takes, rates, tails)


class _Pipelines(NamedTuple):
    """Pipelines of as many stages, arrays of shape (pipelines, stages)."""

    options: np.ndarray
    types: np.ndarray
    times_s: np.ndarray
    # shape (pipelines, kinds)
    takes: np.ndarray
    # whether one link domain can hold all of a pipeline, shape (pipelines, 1)
    is_within: np.ndarray

    @classmethod
    def of(cls, problem: Problem, templates: Sequence[Template]) -> _Pipelines:
        """Look up the stages of some pipelines."""
        spans = np.array([[(part.option, part.start, part.stop) for part in one] for one in templates])
        options, types = spans[..., 0], problem.types[spans[..., 1], spans[..., 2]]
        takes = problem.takes[options].sum(1)
        is_within = np.zeros((len(takes), 1), dtype=bool)
        if problem.domains:
            one_kind = (takes > 0).sum(1) == 1
            is_within[:, 0] = one_kind & (takes <= np.array(problem.domains)).all(1)
        times = problem.far_s[options, types]
        if problem.leave_s is not None:
            times = np.where(is_within, problem.time_s[options, types], times)
        times[:, 1:] += problem.hop_s[options[:, :-1], options[:, 1:]]
        return cls(options, types, times, takes, is_within)

    def rates(self, problem: Problem, filling: Filling) -> np.ndarray:
        """Return the fields of their `PipelineRate`, shape (12, pipelines); a pass is one of all chunks."""
        slowest_s, before = self.times_s.max(1), self._is_before_slowest(problem)
        at = np.arange(len(slowest_s)), before.sum(1) - 1
        micro_batch, grain = problem.micro_batch[self.options[:, 0]], problem.grain[self.options].max(1)
        shortest = drained_s = shadowed_s = np.zeros(len(slowest_s))
        if problem.shortest is not None:
            shortest = problem.shortest[self.options[at], self.types[at]]
        fill_s = self.times_s.sum(1) - slowest_s
        if filling != "full":
            after_s = np.where(before, 0.0, self.times_s).sum(1)
            before_s = fill_s - after_s
            fill_s = before_s + self._behind_s(problem, before)[0]
            if filling == "least" and problem.chunks > 1:
                fill_s = before_s + self._behind_in_rounds_s(problem, before)
                first = self.options[:, 0], self.types[:, 0]
                several = float(self.times_s.shape[1] > 1)
                wrapped_s = several * wrapped_in_rounds(problem, self.times_s[:, 0], first)
                fill_s = np.maximum(fill_s - wrapped_s, 0.0)
            is_cut = grain < problem.chunks * micro_batch
            backward_s = self._backwards_s(problem, filling)
            drained_s = is_cut * (np.where(before, backward_s, 0.0).sum(1) - backward_s[at] + after_s)
            shadowed_s = slowest_s - self._first_backward_s(problem, filling)
            if problem.chunks > 1:  # the last two of a round come up after each other
                shadowed_s = backward_s[at] - self._backwards_at_least_s(problem, before)
            shadowed_s = is_cut * np.maximum(shadowed_s, 0.0)
        chunks, stages = problem.chunks, self.times_s.shape[1]
        together = np.full(len(slowest_s), stages if chunks > 1 else 1)
        size, pass_s = chunks * micro_batch, chunks * slowest_s
        # What one stage does at once may be less than a micro-batch; several are not filled for that.
        least = np.full(len(slowest_s), float(stages > 1))
        rates = [fill_s, pass_s, size, grain, shortest, drained_s, shadowed_s, together, least]
        return np.array([*rates, *self._round_trips(problem, filling)])

    def _round_trips(self, problem: Problem, filling: Filling) -> np.ndarray:
        """Return the last three fields of their `PipelineRate`, shape (3, pipelines).

        A micro-batch goes all the way after the forwards of those before it on any stage, or before the
        backwards of those after it: of the stages up to that one, and their tails.
        """
        found = np.zeros((3, len(self.times_s)))
        if filling == "full" or problem.chunks > 1 or self.times_s.shape[1] == 1:
            return found
        found[0] = self.times_s.sum(1)
        if problem.forward_s is None or problem.backward_s is None:
            return found
        before, tails = self._is_before_slowest(problem), self._begun_tails_s(problem, filling)
        forward_s = problem.forward_s[self.options, self.types].max(1)
        backwards_s = problem.backward_s[self.options, self.types]
        backward_s = backwards_s[np.arange(len(before)), before.sum(1) - 1]
        later_s = (tails.max(2) - np.where(before, tails, 0.0).max(2)).max(0)
        is_backward = later_s < backward_s - forward_s
        found[0] -= np.where(is_backward, later_s, 0.0)
        found[1] = np.where(is_backward, backward_s, forward_s)
        found[2] = np.minimum(backwards_s.min(1), found[1])
        return found

    def tails_s(self, problem: Problem, filling: Filling) -> np.ndarray:
        """Return the tails of steps of each number of pipelines, shape (len(copies), pipelines)."""
        return self._begun_tails_s(problem, filling).max(2)

    def _begun_tails_s(self, problem: Problem, filling: Filling) -> np.ndarray:
        """Return what of tails is left when a pipeline ends, shape (copies, pipelines, stages)."""
        tails = problem.tail_s[:, self.options, self.types]
        if problem.leave_tail_s is not None:
            tails = tails + np.where(self.is_within, 0.0, problem.leave_tail_s[self.options, self.types])
        if filling != "full":
            backward_s = self._backwards_s(problem, filling)
            tails = tails - (np.cumsum(backward_s, axis=1) - backward_s)
        if (
            filling == "least"
        ):  # where the slowest stage hides the filling behind it, tails there begin earlier
            before = self._is_before_slowest(problem)
            seconds, unhidden_s = self._behind_s(problem, before)
            early_s = np.full_like(seconds, np.inf) if problem.chunks > 1 else seconds - unhidden_s
            tails = tails - np.where(before, 0.0, early_s[:, None])
        return np.maximum(tails, 0.0)

    def _behind_s(self, problem: Problem, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of filling behind the slowest stage, and what they are if it hides all."""
        slowest_s, number = self.times_s.max(1), (~before).sum(1)
        after_s = np.where(before, 0.0, self.times_s).sum(1)
        unhidden_s = 2.0 * after_s - slowest_s * number
        least_s = np.maximum(0.0, unhidden_s)
        if problem.forward_s is not None and problem.backward_s is not None:
            at = np.arange(len(number)), before.sum(1) - 1
            stages = self.options[at], self.types[at]
            longer_s = np.maximum(problem.forward_s[stages], problem.backward_s[stages])
            least_s = np.maximum(least_s, after_s - (slowest_s - longer_s) * number)
        return least_s, unhidden_s

    def _behind_in_rounds_s(self, problem: Problem, before: np.ndarray) -> np.ndarray:
        """Return the seconds of filling behind the slowest stage where it has forwards of rounds ahead."""
        if problem.forward_s is None or problem.backward_s is None:
            return np.zeros(len(before))
        slowest_s, number = self.times_s.max(1), (~before).sum(1)
        at = np.arange(len(number)), before.sum(1) - 1
        stages = self.options[at], self.types[at]
        ahead_s = hidden_in_rounds(problem, slowest_s, problem.forward_s[stages], problem.backward_s[stages])
        return np.maximum(0.0, np.where(before, 0.0, self.times_s).sum(1) - ahead_s * number)

    def _backwards_s(self, problem: Problem, filling: Filling) -> np.ndarray:
        """Return the most that a backward takes, with all messages beside it."""
        if problem.forward_s is None:
            return self.times_s * (_BACKWARD if filling == "typical" else 1.0)
        return self.times_s - problem.forward_s[self.options, self.types]

    def _first_backward_s(self, problem: Problem, filling: Filling) -> np.ndarray:
        """Return the least that a backward on the first stage takes, shape (pipelines,)."""
        if problem.backward_s is None:
            return self.times_s[:, 0] * (_BACKWARD if filling == "typical" else 0.0)
        return problem.backward_s[self.options[:, 0], self.types[:, 0]]

    def _backwards_at_least_s(self, problem: Problem, before: np.ndarray) -> np.ndarray:
        """Return the least that a backward takes on any stage up to the slowest, shape (pipelines,)."""
        if problem.backward_s is None:
            return np.zeros(len(before))
        return np.where(before, problem.backward_s[self.options, self.types], np.inf).min(1)

    def _is_before_slowest(self, problem: Problem) -> np.ndarray:
        """Return which stages are the slowest or before it: the first of equal ones, in chunks the last."""
        stages = self.times_s.shape[1]
        at = self.times_s.argmax(1)
        if problem.chunks > 1:
            at = stages - 1 - self.times_s[:, ::-1].argmax(1)
        return np.arange(stages) <= at[:, None]


def hidden_in_rounds(
    problem: Problem, times_s: np.ndarray, forward_s: np.ndarray, backward_s: np.ndarray
) -> np.ndarray:
    """Return what a stage does of chunks at most, for each stage behind it, while its first one comes back.

    Two forwards, and what messages add to passes of all rounds ahead (docs/derivations/step.md).
    """
    added_s = np.maximum(0.0, times_s - forward_s - backward_s)
    return 2.0 * (times_s - backward_s) + (problem.chunks - 1) * problem.max_stages * added_s


def wrapped_in_rounds(problem: Problem, times_s: np.ndarray, at: Any) -> np.ndarray:
    """Return what of the time of first stages a pipeline may not wait for while it fills: their messages.

    The mean chunk counts one from or to the last stage, which the first chunk does not have
    (docs/derivations/step.md).
    """
    if problem.chunks == 1:
        return np.zeros_like(times_s)
    if problem.forward_s is None or problem.backward_s is None:
        return times_s
    return np.maximum(0.0, times_s - problem.forward_s[at] - problem.backward_s[at])


def with_joint_tail(problem: Problem, tail_s: float) -> Problem:
    """Return the problem of pipelines that all have one tail, of stages whose own is no longer."""
    return replace(problem, tail_s=np.where(problem.tail_s <= tail_s, tail_s, _NEVER_S))


def spread_factor(problem: Problem, num_devices: float) -> float:
    """Return how much longer a step takes for waiting on the slowest of so many devices."""
    return 1.0 + problem.jitter * max(0.0, math.log2(max(num_devices, 1.0) / 8.0))


def step_seconds(problem: Problem, arrangement: Arrangement, *, filling: Filling = "full") -> float:
    """Return the seconds of a step: of the slowest pipeline, lengthened by the spread over all devices.

    In the `least` filling, no plan of the arrangement takes less.
    """
    columns = pipeline_columns(problem, arrangement.templates, filling=filling)
    tails = columns.tails(problem, len(arrangement.templates)).tolist()
    slowest = max(
        columns.rate(i).seconds(share) + tail
        for i, (share, tail) in enumerate(zip(arrangement.shares, tails, strict=True))
    )
    return slowest * spread_factor(problem, _num_used(problem, arrangement))


def _num_used(problem: Problem, arrangement: Arrangement) -> int:
    return sum(int(takes_of(problem, template).sum()) for template in arrangement.templates)


def faults(problem: Problem, arrangement: Arrangement) -> list[str]:
    """Return why an arrangement is no answer to the problem, nothing if it is one."""
    found: list[str] = []
    if sum(arrangement.shares) != problem.global_batch or min(arrangement.shares, default=0) < 1:
        found.append(f"shares {arrangement.shares} do not make {problem.global_batch}")
    most = problem.max_pipelines
    if most is not None and len(arrangement.templates) > most:
        found.append(f"{len(arrangement.templates)} pipelines, of which link domains hold {most}")
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
