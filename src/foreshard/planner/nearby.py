"""Arrangements near a running one: new shares and cuts, other devices for slow stages, other pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from foreshard.planner.cuts import best_cuts
from foreshard.planner.pools import Pool
from foreshard.planner.problem import (
    Arrangement,
    Problem,
    Template,
    pace_of,
    stage_seconds,
    step_seconds,
    tail_seconds,
    takes_of,
)
from foreshard.planner.shares import balance

_ROUNDS = 2
_MOVES = 10


def rebalanced(problem: Problem, templates: Sequence[Template]) -> Arrangement | None:
    """Return pipelines with the best shares, None when there are more of them than samples."""
    tails = [tail_seconds(problem, one, len(templates)) for one in templates]
    shares = balance([pace_of(problem, one) for one in templates], tails, problem.global_batch)
    return None if shares is None else Arrangement(templates=tuple(templates), shares=shares)


def repaired(problem: Problem, running: Sequence[Template | list[int | None]]) -> Iterator[list[Template]]:
    """Yield ways to go on with pipelines that lost stages: without them, shortened, or with other stages.

    Parameters
    ----------
    problem : Problem
    running : sequence of Template or list
        Whole pipelines; of broken ones the options of their stages, None for a lost one.
    """
    whole = [one for one in running if isinstance(one, tuple)]
    broken = [one for one in running if isinstance(one, list)]
    if whole:
        yield whole
    free = np.array(problem.counts) - sum(takes_of(problem, one) for one in whole)
    shortened, replaced = list(whole), list(whole)
    for options in broken:
        left = [o for o in options if o is not None]
        free = free - problem.takes[left].sum(0)
        short = best_cuts(problem, left, 1e3) if left else None
        shortened += [short] if short else []
        other = _replaced(problem, options, free)
        replaced += [other or short] if other or short else []  # type: ignore[list-item]
        free = free - (takes_of(problem, other) - problem.takes[left].sum(0) if other else 0)
    for made in (shortened, replaced):
        if broken and len(made) > len(whole):
            yield made


def _replaced(problem: Problem, options: list[int | None], free: np.ndarray) -> Template | None:
    """Return a broken pipeline with the fastest options that free devices allow in place of lost stages."""
    kept = [o for o in options if o is not None]
    if not kept:
        return None
    made: list[int] = []
    for option in options:
        if option is None:
            fits = _alternatives(problem, kept[0], free)
            if not fits:
                continue
            option = fits[0]
            free = free - problem.takes[option]
        made.append(option)
    return best_cuts(problem, made, 1e3)


def nearby(problem: Problem, running: Sequence[Template], pools: Sequence[Pool]) -> Iterator[Arrangement]:
    """Yield arrangements near the running pipelines, each with its best shares.

    Parameters
    ----------
    problem : Problem
        Of the pools.
    running : sequence of Template
        Pipelines that lost no device.
    pools : sequence of Pool
    """
    start = rebalanced(problem, running)
    if start is None:
        return
    yield start
    apart = [one for template in running for one in _apart(problem, template, pools)]
    other = rebalanced(problem, apart) if len(apart) > len(running) else None
    if other is not None:
        yield other
    hurt = {p for p, pool in enumerate(pools) if pool.state}
    current = start
    for _ in range(_ROUNDS):
        better = current
        for g, template in _worst_first(problem, current, hurt):
            passes = current.shares[g] / float(problem.micro_batch[template[0].option])
            for made in _variants(problem, current, g, passes, hurt):
                some = [*current.templates[:g], *([made] if made else []), *current.templates[g + 1 :]]
                arrangement = rebalanced(problem, some) if some else None
                if arrangement is None:
                    continue
                yield arrangement
                if step_seconds(problem, arrangement) < step_seconds(problem, better):
                    better = arrangement
        if better is current:
            return
        current = better


def _apart(problem: Problem, template: Template, pools: Sequence[Pool]) -> list[Template]:
    """Return a pipeline with joint stages as one on the devices of each node group, any other as it is."""
    of = np.array([pool.node_group for pool in pools])
    taken = [problem.takes[part.option] for part in template]
    if all(len(set(of[takes > 0])) == 1 for takes in taken):
        return [template]
    made = []
    for group in dict.fromkeys(of[sum(taken) > 0].tolist()):
        parts = [takes * (of == group) for takes in taken]
        kept = [takes for takes in parts if takes.any()]
        sizes = np.unique(problem.micro_batch).tolist()
        several = [one for m in sizes if (one := _fastest_on(problem, kept, m))]
        if not several:
            return [template]
        made.append(max(several, key=lambda one: _rate(problem, one)))
    return made


def _rate(problem: Problem, template: Template) -> float:
    """Return the samples a second of a pipeline that is full."""
    pace = pace_of(problem, template)
    return pace.micro_batch / pace.bottleneck_s


def _fastest_on(problem: Problem, parts: Sequence[np.ndarray], micro_batch: int) -> Template | None:
    """Return a pipeline of stages on some devices each, of the options of most speed for a micro-batch."""
    options = []
    for takes in parts:
        same = np.all(problem.takes == takes, axis=1) & (problem.micro_batch == micro_batch)
        ranked = _by_speed(problem, same, alone=len(parts) == 1)
        if not ranked:
            return None
        options.append(ranked)
    # The fastest that fit: those that hold less in memory come later in every stage.
    for i in range(max(len(ranked) for ranked in options)):
        made = best_cuts(problem, [ranked[min(i, len(ranked) - 1)] for ranked in options], 1e3)
        if made:
            return made
    return None


def _worst_first(problem: Problem, current: Arrangement, hurt: set[int]) -> list[tuple[int, Template]]:
    """Return pipelines on hurt nodes, else the slowest one."""
    touched = [
        (g, one) for g, one in enumerate(current.templates) if any(takes_of(problem, one)[p] for p in hurt)
    ]
    if touched:
        return touched
    paces = [pace_of(problem, one).bottleneck_s for one in current.templates]
    slowest = int(np.argmax(paces))
    return [(slowest, current.templates[slowest])]


def _variants(
    problem: Problem, current: Arrangement, g: int, passes: float, hurt: set[int]
) -> Iterator[Template | None]:
    """Yield a pipeline cut anew, with another option for a stage, with a stage less; None to leave it out."""
    template = current.templates[g]
    options = [part.option for part in template]
    others = np.sum([takes_of(problem, t) for i, t in enumerate(current.templates) if i != g], axis=0)
    free = np.array(problem.counts) - others
    made = best_cuts(problem, options, passes)
    if made:
        yield made
    if len(current.templates) > 1:
        yield None
    stage = int(np.argmax(stage_seconds(problem, template)))
    own = [s for s, o in enumerate(options) if any(problem.takes[o][p] for p in hurt)] or [stage]
    for s in own[:2]:
        left = free - problem.takes[options].sum(0) + problem.takes[options[s]]
        for o in _alternatives(problem, options[s], left, alone=len(options) == 1):
            made = best_cuts(problem, [*options[:s], o, *options[s + 1 :]], passes)
            if made:
                yield made
        if len(options) > 1:
            made = best_cuts(problem, [*options[:s], *options[s + 1 :]], passes)
            if made:
                yield made


def _alternatives(problem: Problem, option: int, free: np.ndarray, *, alone: bool = False) -> list[int]:
    """Return options that the free devices allow, those of most speed first.

    Of the same micro-batch, unless the stage is `alone` in its pipeline.
    """
    same = np.all(problem.takes <= free, axis=1)
    if not alone:
        same &= problem.micro_batch == problem.micro_batch[option]
    same[option] = False
    return _by_speed(problem, same, alone=alone)[:_MOVES]


def _by_speed(problem: Problem, some: np.ndarray, *, alone: bool) -> list[int]:
    """Return options by the time that a sample takes, in all layers or in middle ones, the least first."""
    usable = np.isfinite(problem.time_s) & (problem.max_in_flight > 0)
    middle = int(problem.types[1, 2]) if problem.num_layers > 2 else 0
    type_ = int(problem.types[0, -1]) if alone else middle
    seconds = np.where(usable[:, type_], problem.time_s[:, type_] / problem.micro_batch, np.inf)
    return [int(o) for o in sorted(np.flatnonzero(some), key=lambda o: seconds[o])]


def work_bound(problem: Problem) -> float:
    """Return a step time that no arrangement beats, from work alone; infinite where no pipeline fits at all.

    For any prices of devices, a sample needs at least the least priced device-seconds of a way through the
    chain, and a second buys no more than all devices are worth; prices are what a device does in a second.
    """
    usable = np.isfinite(problem.time_s) & (problem.max_in_flight > 0)
    prices = np.array([_speed(problem, usable, kind) for kind in range(len(problem.counts))])
    worth = (problem.takes @ prices / problem.micro_batch)[:, None]
    cost = np.where(usable, worth * np.where(usable, problem.time_s, 0.0), np.inf)
    least = np.append(cost.min(0), np.inf)[problem.types]
    after = np.full(problem.num_layers + 1, np.inf)
    after[-1] = 0.0
    for start in range(problem.num_layers - 1, -1, -1):
        after[start] = (least[start] + after).min()
    value = float(prices @ np.array(problem.counts))
    if not np.isfinite(after[0]):
        return float("inf")
    return problem.global_batch * float(after[0]) / value if value > 0 else 0.0


def _speed(problem: Problem, usable: np.ndarray, kind: int) -> float:
    """Return how much work a device of a kind does in a second, by the quickest option it takes part in."""
    own = np.flatnonzero(problem.takes[:, kind] > 0)
    if not len(own):
        return 0.0
    middle = int(problem.types[1, 2]) if problem.num_layers > 2 else 0
    each = np.where(usable[own, middle], problem.time_s[own, middle], np.inf)
    each = each * problem.takes[own].sum(1) / problem.micro_batch[own]
    return 1.0 / float(each.min()) if np.isfinite(each.min()) else 0.0
