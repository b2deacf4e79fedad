"""One slot's choice with data parallelism inside stages: workers of a stage split every micro-batch.

A stage goes as one worker of the sum of its speeds, as far as samples divide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from foreshard.control.grouping import MAX_STAGES
from foreshard.control.shares import counted, whole_shares
from foreshard.control.slots import (
    MP_OVER_DP,
    Budget,
    Chain,
    Choice,
    Pipeline,
    State,
    Structure,
    evaluate,
    stage_hop_s,
)
from foreshard.control.worth import worth_of
from foreshard.errors import InfeasibleError


def solve_stages(
    chain: Chain,
    state: State,
    *,
    batch: int,
    micro_batch: int,
    time_weight: float,
    cost_weights: Mapping[str, float] | None = None,
    budgets: Sequence[Budget] = (),
    max_stages: int = MAX_STAGES,
) -> Choice:
    """Return a good choice that minimises time_weight * seconds + sum of cost_weights * costs, `mp_over_dp`.

    Parameters
    ----------
    chain, state, batch, micro_batch, time_weight, cost_weights, budgets, max_stages
        As for :func:`foreshard.control.grouping.solve_slot`.

    Notes
    -----
    Tentative: workers by price of speed, then one by one to another stage, out or in, while that is better.
    Cuts and shares of given stages are found exactly but for the few samples that a micro-batch has.

    Raises
    ------
    InfeasibleError
        When no split of the layers fits.
    """
    weights = dict(cost_weights or {})
    alive = [int(worker) for worker in np.flatnonzero(state.available & (state.speed > 0))]
    seen: dict[tuple[tuple[int, ...], ...], tuple[float, Choice | None]] = {}

    def look(stages: tuple[tuple[int, ...], ...]) -> tuple[float, Choice | None]:
        key = tuple(tuple(sorted(stage)) for stage in stages)
        if key not in seen:
            choice = _best_of(chain, state, key, batch, micro_batch)
            worth = math.inf if choice is None else worth_of(choice, time_weight, weights, budgets)
            seen[key] = (worth, choice)
        return seen[key]

    best: tuple[float, Choice | None] = (math.inf, None)
    for begin in _starts(chain, state, alive, min(max_stages, chain.num_layers)):
        now, worth = begin, look(begin)[0]
        while True:
            near = min(_near(now, alive), key=lambda one: look(one)[0], default=now)
            if not look(near)[0] < worth * (1 - 1e-12):
                break
            now, worth = near, look(near)[0]
        if look(now)[0] < best[0]:
            best = look(now)
    if best[1] is None:
        raise InfeasibleError(
            f"no stages of {len(alive)} workers hold the model", rule="A stage needs memory",
            fix="Allow more stages, or add workers",
        )  # fmt: skip
    return best[1]


def _starts(
    chain: Chain, state: State, alive: Sequence[int], most: int
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Return workers in equal stages, by speed and by name."""
    speed = {worker: state.speed[worker] / chain.before_s[worker, -1] for worker in alive}
    for order in (sorted(alive, key=lambda w: (-speed[w], w)), list(alive)):
        for count in range(1, min(most, len(alive)) + 1):
            yield tuple(tuple(int(w) for w in part) for part in np.array_split(order, count))
    cheapest = min(alive, key=lambda w: (state.usd_per_h[w] / speed[w], w), default=None)
    if cheapest is not None:
        yield ((cheapest,),)


def _near(stages: tuple[tuple[int, ...], ...], alive: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Return stages after one worker moved, left or joined."""
    used = {worker for stage in stages for worker in stage}
    for at, to in itertools.permutations(range(len(stages)), 2):
        for worker in stages[at] if len(stages[at]) > 1 else ():
            moved = [list(stage) for stage in stages]
            moved[at].remove(worker)
            moved[to].append(worker)
            yield tuple(map(tuple, moved))
    for at, stage in enumerate(stages):
        for worker in stage if len(stage) > 1 else ():
            yield (*stages[:at], tuple(w for w in stage if w != worker), *stages[at + 1 :])
        for worker in alive:
            if worker not in used:
                yield (*stages[:at], (*stage, worker), *stages[at + 1 :])


def _best_of(
    chain: Chain, state: State, stages: Sequence[tuple[int, ...]], batch: int, micro_batch: int
) -> Choice | None:
    """Return the stages with the cuts that take least, shares by speed; None where none fits.

    The front of fill and slowest stage, as for single workers: forbid stages as slow as the slowest.
    """
    limit, best = math.inf, None
    while (cuts := _least_fill(chain, state, stages, micro_batch, limit)) is not None:
        bounds, limit = cuts
        made = Structure(
            groups=tuple(Pipeline(workers=w, cuts=span) for w, span in zip(stages, bounds, strict=True)),
            reading=MP_OVER_DP,
        )
        shares: list[int] = []
        for group in made.groups:
            shares += _stage_shares(chain, state, group.workers, group.cuts, micro_batch)[0]
        choice = evaluate(chain, state, made, shares, micro_batch=micro_batch, batch=batch)
        if best is None or choice.time_s < best.time_s:
            best = choice
    return best if best is not None and math.isfinite(best.time_s) else None


def _stage_shares(
    chain: Chain, state: State, workers: Sequence[int], span: tuple[int, ...], micro_batch: int
) -> tuple[tuple[int, ...], float]:
    """Return the samples of a micro-batch for every worker of a stage, and the seconds of the slowest."""
    members = list(workers)
    rate = (chain.before_s[members, span[1]] - chain.before_s[members, span[0]]) / state.speed[members]
    split = whole_shares(np.zeros(len(members)), rate, micro_batch, 1)
    return counted(split.shares), split.time_s


def _least_fill(
    chain: Chain, state: State, stages: Sequence[tuple[int, ...]], micro_batch: int, limit: float
) -> tuple[list[tuple[int, int]], float] | None:
    """Return spans of least sum of stage times below a limit, and the slowest of them."""
    size = chain.num_layers
    after: dict[int, tuple[float, float, list[tuple[int, int]]]] = {0: (0.0, 0.0, [])}
    for depth, stage in zip(range(len(stages), 0, -1), stages, strict=True):
        reached: dict[int, tuple[float, float, list[tuple[int, int]]]] = {}
        before = stages[len(stages) - depth - 1] if depth < len(stages) else ()
        for start, (total, slowest, spans) in after.items():
            for stop in range(start + 1, size - depth + 2) if depth > 1 else (size,):
                seconds = _stage_s(chain, state, stage, before, (start, stop), depth, micro_batch)
                if seconds < limit * (1 - 1e-12) and total + seconds < reached.get(stop, (math.inf,))[0]:
                    reached[stop] = (total + seconds, max(slowest, seconds), [*spans, (start, stop)])
        after = reached
    return (after[size][2], after[size][1]) if size in after else None


def _stage_s(
    chain: Chain,
    state: State,
    workers: tuple[int, ...],
    before: tuple[int, ...],
    span: tuple[int, int],
    depth: int,
    micro_batch: int,
) -> float:
    """Return the seconds of a micro-batch on a stage with its messages; inf where it does not fit."""
    if span[0] >= span[1]:
        return math.inf
    shares, seconds = _stage_shares(chain, state, workers, span, micro_batch)
    need = chain.before_state[span[1]] - chain.before_state[span[0]]
    saved = depth * (chain.before_saved[span[1]] - chain.before_saved[span[0]])
    if (need + saved * np.array(shares) > chain.memory_bytes[list(workers)]).any():
        return math.inf
    if before:
        stage = Pipeline(workers=workers, cuts=span)
        seconds += stage_hop_s(chain, state, before, stage, micro_batch)
    return seconds
