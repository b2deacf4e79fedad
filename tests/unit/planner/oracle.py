"""The least step time of a problem by trying everything, without any of the code under test.

Every pipeline is made: all cuts times all options. Of those that take the same devices the least seconds for
each share are kept, and pipelines are put beside each other in every way that devices and samples allow. That
is quick enough for 8 devices and 8 layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from foreshard.planner.solver.problem import Problem


def least_seconds(problem: Problem, filling: str) -> float:
    """Return the step time of the best arrangement, infinite where no pipeline runs."""
    rows = list(_pipelines(problem, filling))
    if not rows:
        return np.inf
    takes = np.concatenate([row[0] for row in rows])
    fill, slowest, micro, grain, drained, shadowed = (
        np.concatenate([row[i] for row in rows])[:, None] for i in range(1, 7)
    )
    together, least = (
        np.concatenate([np.full(len(row[0]), row[i]) for row in rows])[:, None] for i in (8, 9)
    )
    round_trip, apart, short = np.concatenate([row[10] for row in rows], axis=1)[..., None]
    tails = np.concatenate([row[7] for row in rows], axis=1)
    shares = np.arange(1, problem.global_batch + int((micro * together).max(initial=1)) + 1)
    passes = -(-shares // grain) * grain / micro
    last = passes % 1.0
    spared = np.where(last > 0.0, np.minimum((1.0 - last) * drained, last * shadowed), 0.0)
    seconds = fill + np.maximum(passes, least) * slowest - spared * (passes > 1.0)
    further = (np.floor(passes) - 1.0) * apart + last * short
    seconds = np.maximum(seconds, round_trip + further * (passes >= 1.0))
    # A share that does not come in rounds takes as long as the next one that does.
    seconds = np.where(np.ceil(passes) % together == 0, seconds, np.inf)
    seconds = np.minimum.accumulate(seconds[:, ::-1], axis=1)[:, : -problem.global_batch - 1 : -1]
    best = np.inf
    for row, fewest in enumerate(problem.copies):
        most = problem.copies[row + 1] - 1 if row + 1 < len(problem.copies) else sum(problem.counts)
        each = _by_demand(takes, seconds + tails[row][:, None])
        best = min(best, _beside_each_other(problem, each, fewest, most))
    return best


def _pipelines(problem: Problem, filling: str) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield what `problem.pipeline_rate` says of pipelines, and tails, by number of stages."""
    layers, counts = problem.num_layers, np.array(problem.counts)
    chains = np.zeros((1, 0), dtype=int)
    for stages in range(1, min(problem.max_stages, layers) + 1):
        more = np.tile(np.arange(len(problem.takes)), len(chains))
        chains = np.column_stack([np.repeat(chains, len(problem.takes), axis=0), more])
        alike = (problem.micro_batch[chains] == problem.micro_batch[chains[:, :1]]).all(1)
        chains = chains[alike & (problem.takes[chains].sum(1) <= counts).all(1)]
        if not len(chains):
            return
        inner = np.array(list(combinations(range(1, layers), stages - 1)), dtype=int)
        cuts = np.column_stack([np.zeros(len(inner), int), inner, np.full(len(inner), layers)])
        types = problem.types[cuts[:, :-1], cuts[:, 1:]]
        options, places = np.repeat(chains, len(types), axis=0), np.tile(types, (len(chains), 1))
        takes, micro = problem.takes[options].sum(1), problem.micro_batch[options[:, 0]]
        far = ~_inside_a_domain(problem, takes)[:, None]
        times, tails = problem.time_s[options, places], problem.tail_s[:, options, places]
        if problem.leave_s is not None:
            times = times + far * problem.leave_s[options, places]
        if problem.leave_tail_s is not None:
            tails = tails + far * problem.leave_tail_s[options, places]
        times[:, 1:] += problem.hop_s[options[:, :-1], options[:, 1:]]
        held = np.minimum(np.arange(stages, 0, -1), -(-problem.global_batch // micro)[:, None])
        runs = ((problem.max_in_flight[options, places] >= held) & np.isfinite(times)).all(1)
        slowest, at = times.max(1), times.argmax(1)
        if problem.chunks > 1:
            at = stages - 1 - times[:, ::-1].argmax(1)
        up_to = np.arange(stages) <= at[:, None]
        before = (times * up_to).sum(1) - slowest
        behind = np.where(up_to, 0.0, times).sum(1)
        fill = before + np.maximum(0.0, 2.0 * behind - slowest * (stages - 1 - at))
        if problem.forward_s is not None:
            parts = (part[options, places] for part in (problem.forward_s, problem.backward_s))
            longer = np.maximum(*parts)[np.arange(len(times)), at]
            fill = np.maximum(fill, before + behind - (slowest - longer) * (stages - 1 - at))
        if filling == "least" and problem.chunks > 1:
            fill = before
            if stages > 1:  # of the first stage at least its work: its messages may be those of later chunks
                work = 0.0 * times[:, 0]
                if problem.forward_s is not None:
                    both = problem.forward_s + problem.backward_s
                    work = np.minimum(both[options[:, 0], places[:, 0]], times[:, 0])
                fill = np.maximum(before + work - times[:, 0], 0.0)
        most, fewest = (1.0, 0.0) if filling == "least" else (2 / 3, 2 / 3)
        backward, first = most * times, fewest * times[:, 0]
        if problem.forward_s is not None:
            backward = times - problem.forward_s[options, places]
            first = problem.backward_s[options, places][:, 0]
        last = backward[np.arange(len(times)), up_to.sum(1) - 1]
        drained, shadowed = (backward * up_to).sum(1) - last + behind, slowest - first
        chunks, together = problem.chunks, stages if problem.chunks > 1 else 1
        slowest, micro, grain = chunks * slowest, chunks * micro, problem.grain[options].max(1)
        if chunks > 1:
            least = 0.0 * times if problem.forward_s is None else problem.backward_s[options, places]
            shadowed = last - np.where(up_to, least, np.inf).min(1)
        row = (takes, fill, slowest, micro, grain, drained, np.maximum(shadowed, 0.0))
        hidden = np.cumsum(backward, axis=1) - backward
        if filling == "least":  # behind the slowest stage no later than it has hidden what is behind it
            spare = fill - before - (2.0 * behind - times.max(1) * (stages - 1 - at))
            hidden = hidden + np.where(up_to, 0.0, np.inf if problem.chunks > 1 else spare[:, None])
        begun = np.maximum(tails - hidden, 0.0)
        tail, ways = begun.max(2), np.zeros((3, len(times)))
        if filling != "full" and problem.chunks == 1 and stages > 1:
            ways[0] = times.sum(1)
        if problem.forward_s is not None and ways.any():
            forwards = problem.forward_s[options, places].max(1)
            backwards = problem.backward_s[options, places]
            own = backwards[np.arange(len(times)), at]
            later = (tail - (begun * up_to).max(2)).max(0)
            ways[:2] = np.where(later < own - forwards, [ways[0] - later, own], [ways[0], forwards])
            ways[2] = np.minimum(backwards.min(1), ways[1])
        if filling == "full":
            row = (takes, times.sum(1) - times.max(1), *row[2:5], 0.0 * slowest, 0.0 * slowest)
            tail = tails.max(2)
        yield *(values[runs] for values in row), tail[:, runs], together, float(stages > 1), ways[:, runs]


def _inside_a_domain(problem: Problem, takes: np.ndarray) -> np.ndarray:
    """Return which pipelines are on one kind of devices, no more than share a link domain."""
    if not problem.domains:
        return np.zeros(len(takes), dtype=bool)
    return ((takes > 0).sum(1) == 1) & (takes <= np.array(problem.domains)).all(1)


def _by_demand(takes: np.ndarray, seconds: np.ndarray) -> dict[tuple[int, ...], np.ndarray]:
    """Return the least seconds for each share, from no sample on, of all pipelines on the same devices."""
    demands, which = np.unique(takes, axis=0, return_inverse=True)
    least = np.full((len(demands), seconds.shape[1] + 1), np.inf)
    np.minimum.at(least[:, 1:], np.ravel(which), seconds)
    return {tuple(demand.tolist()): row for demand, row in zip(demands, least, strict=True)}


def _beside_each_other(
    problem: Problem, each: dict[tuple[int, ...], np.ndarray], fewest: int, most: int
) -> float:
    """Return the least step of so many pipelines: `ends` is by devices of each kind and samples so far."""
    batch, best = problem.global_batch, np.inf
    ends = np.full((*(count + 1 for count in problem.counts), batch + 1), np.inf)
    ends[(0,) * ends.ndim] = 0.0
    devices = np.indices(ends.shape[:-1]).sum(0)
    factor = 1.0 + problem.jitter * np.maximum(0.0, np.log2(np.maximum(devices, 1) / 8.0))
    for number in range(1, min(most, batch, problem.max_pipelines or batch) + 1):
        longer = np.full_like(ends, np.inf)
        for demand, seconds in each.items():
            to = tuple(slice(n, None) for n in demand)
            of = tuple(slice(None, size - n) for n, size in zip(demand, ends.shape, strict=False))
            for share in range(1, batch + 1):
                later = np.maximum(ends[(*of, slice(None, batch + 1 - share))], seconds[share])
                part = longer[(*to, slice(share, None))]
                np.minimum(part, later, out=part)
        ends = longer
        if not np.isfinite(ends).any():
            break
        if number >= fewest:
            best = min(best, float((ends[..., batch] * factor).min()))
    return best
