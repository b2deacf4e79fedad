"""Bounds by whole numbers of pipelines: step times that no plan reaches, excluded one after the other.

For a range of pipelines and a step time, every pipeline that a plan of that time can consist of is enumerated
(`column_enumeration`), and whole numbers of them are combined (`integer_combination`). Either no combination
processes the batch, and the bound rises to that time, or a better plan is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from foreshard.planner.solver.column_enumeration import ColumnEnumeration, LabelMemory, LabelTable
from foreshard.planner.solver.duals import pipeline_dual
from foreshard.planner.solver.integer_combination import combine
from foreshard.planner.solver.pipeline_mix import fractional_mix
from foreshard.planner.solver.problem import Filling, Problem, pipeline_rate, spread_factor, tail_seconds
from foreshard.planner.solver.search_state import SearchState
from foreshard.planner.solver.time_budget import TimeBudget

_STEP, _SHORTEST_STEP = 0.003, 2e-4
"""Part of the bound by which an attempt raises it at least, at first and before a range is given up. Longer
steps enumerate more pipelines, shorter ones prove less than a plan loses to whole samples."""
_PART_OF_WAY = 0.5
"""Part of the way from the bound to the target by which an attempt raises it, where that is longer."""
_LONGEST_STEP = 1.0
"""Part of the bound by which an attempt raises it at most, as long as there is no plan and so no target."""
_FIRST_OF_PROOF = 0.01
"""The same in a proof at first, whose pipelines are many: no plan is found by going further. Each one that
succeeds is followed by one twice as long."""
_LEAST_S = 2.0
"""Seconds of an attempt as long as there is no plan at all."""
_STALE = 0.004
"""Part of a step time by which it may differ from the one that duals were found for, to use them again."""
_DUAL_ROUNDS = 3
"""Times that duals are found anew, with the columns that the last ones gave."""
_SAME_DUALS = 1e-3
"""Relative change of duals below which finding them again would find the same."""
_REDUCED_COST = 0.5
"""Samples below zero at which the most negative reduced cost is accepted: half a sample is rounding."""
_REFINED = 40
"""Boxes that an attempt splits at most, for the slack that their bounds have."""
_KEPT = 12
"""Combinations that are offered as arrangements."""


@dataclass(slots=True, kw_only=True)
class BoundRaiser:
    """Raises the bounds of ranges of pipelines; remembers by how much to try for each range.

    Attributes
    ----------
    state : SearchState
    memory : LabelMemory
    steps : dict of range to float
        Part of the bound by which the next attempt raises it, after one that failed.
    """

    state: SearchState
    memory: LabelMemory
    steps: dict[tuple[int, int], float] = field(default_factory=dict)

    def attempt(self, pipelines: tuple[int, int], bound_s: float) -> tuple[float, bool]:
        """Return the bound of a range after one attempt to raise it, and whether another is of no use."""
        state = self.state
        proves = state.filling == "least" and state.best is not None
        longest = max(_STEP, _PART_OF_WAY * (state.aim_s / bound_s - 1.0))
        step = min(self.steps.pop(pipelines, _FIRST_OF_PROOF if proves else _LONGEST_STEP), longest)
        budget = state.budget if state.best is not None else state.budget.at_least(_LEAST_S)
        seconds, best_s = min(bound_s * (1.0 + step), state.aim_s), state.best_s
        if _is_excluded(state, pipelines, seconds, self.memory, budget):
            if proves:
                self.steps[pipelines] = 2.0 * step
            hopeless = seconds >= longest_step_s(state.problem)
            return (np.inf if hopeless else seconds), hopeless
        if state.best_s >= best_s:
            self.steps[pipelines] = 0.5 * step
        return bound_s, 0.5 * step < _SHORTEST_STEP


def longest_step_s(problem: Problem) -> float:
    """Return a step time that is enough for any pipeline that can run to process the batch alone."""
    usable = np.isfinite(problem.far_s) & (problem.max_in_flight > 0)
    slowest = float(problem.far_s[usable].max(initial=0.0) + problem.hop_s.max(initial=0.0))
    tails = problem.tail_s.max(0) + (0.0 if problem.leave_tail_s is None else problem.leave_tail_s)
    rounds = problem.max_stages * problem.chunks  # up to one more, where micro-batches come in rounds
    return slowest * (problem.max_stages + rounds + problem.global_batch) + float(
        tails[usable].max(initial=0.0)
    )


def _is_excluded(
    state: SearchState, pipelines: tuple[int, int], seconds: float, memory: LabelMemory, budget: TimeBudget
) -> bool:
    """Return whether it is proven that no plan of a range takes so few seconds; offer what is found."""
    problem = state.problem
    columns = _enumerated(state, pipelines, seconds, memory, budget)
    if columns is None or not columns.list_all():
        return False
    spread = spread_factor(problem, sum(problem.counts))
    for _ in range(_REFINED):
        table = columns.table()
        takes = memory.demands(table.codes)
        combined = combine(takes, table.samples, table.reduced_cost, problem.counts, pipelines, keep=_KEPT)
        for rows in combined.sets:
            templates = [columns.template(int(table.at[i]), int(table.row[i])) for i in rows]
            state.offer(templates)
            state.learn(templates)
        if not combined.proven or budget.is_over:
            return False
        if not combined.sets or combined.samples[0] < problem.global_batch - 0.5:
            return True
        if state.best_s <= seconds * spread or not _refined(
            columns, table, combined.sets[0], pipelines, state.filling
        ):
            return False
    return False


def _enumerated(
    state: SearchState, pipelines: tuple[int, int], seconds: float, memory: LabelMemory, budget: TimeBudget
) -> ColumnEnumeration | None:
    """Return the pipelines of negative reduced cost, at duals that leave few; None if too many remain."""
    duals = None
    for round_ in range(_DUAL_ROUNDS):
        before_s, pricing = state.pricings.get(pipelines, (0.0, None))
        if round_ or pricing is None or abs(seconds / before_s - 1.0) > _STALE:
            duals = _duals_of_whole_samples(state, pipelines, seconds) if duals is None else duals
            if duals is not None:
                pricing = state.pricing(pipelines, duals)
                state.pricings[pipelines] = seconds, pricing
        if pricing is None:
            return None
        columns = ColumnEnumeration(
            pricing=pricing,
            seconds=seconds,
            pipeline_dual=pipeline_dual(state.problem, pricing.duals, pipelines),
            num_pipelines=pipelines[1],
            memory=memory,
            budget=budget,
        )
        solved = pricing.solved
        complete = columns.list_negative()
        state.evaluated += pricing.solved - solved
        if not complete:
            return None
        if columns.least_reduced_cost >= -_REDUCED_COST or pipelines[1] == 1:
            break
        duals = _duals_of_whole_samples(state, pipelines, seconds)
        if duals is None or np.allclose(duals, pricing.duals, rtol=_SAME_DUALS):
            break
    return columns


def _duals_of_whole_samples(
    state: SearchState, pipelines: tuple[int, int], seconds: float
) -> np.ndarray | None:
    """Return the duals of devices when the columns, mixed in fractions, process whole samples each."""
    table = state.table()
    samples = table.whole_samples(seconds - table.tails(state.problem, pipelines[0]))
    mix = fractional_mix(table.takes, samples, state.problem.counts, pipelines)
    return None if mix is None else mix.device_duals


def _refined(
    columns: ColumnEnumeration,
    table: LabelTable,
    rows: Sequence[int],
    pipelines: tuple[int, int],
    filling: Filling,
) -> bool:
    """Split the box of the pipeline whose bound has most slack; return False when none has any."""
    slack = [_bound_slack(columns, table, i, pipelines, filling) for i in rows]
    worst = rows[int(np.argmax(slack))]
    return max(slack) > 0.0 and columns.refine(int(table.at[worst]), int(table.row[worst]))


def _bound_slack(
    columns: ColumnEnumeration, table: LabelTable, row: int, pipelines: tuple[int, int], filling: Filling
) -> float:
    """Return by how many samples the bound on a pipeline exceeds what it processes."""
    problem = columns.pricing.problem
    template = columns.template(int(table.at[row]), int(table.row[row]))
    left = columns.seconds - tail_seconds(problem, template, pipelines[0], filling=filling)
    return float(table.samples[row]) - pipeline_rate(problem, template, filling=filling).samples(left)
