"""Messages between stages that cost by which option comes before: what of them paths can price, and the rest.

Paths over cuts add up stages one by one; what a message costs at least goes into the stage it reaches. What
depends on both ends is left to cutting the pipelines found anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from foreshard.planner.solver.cuts import best_cuts
from foreshard.planner.solver.problem import Problem, Template

_PARTS = (1, 2, 4)
"""Parts of the batch that a pipeline may get."""


def least_hops_in_times(problem: Problem) -> Problem:
    """Return the same problem with the least message of every stage but a first one in its time."""
    if not problem.hop_s.any():
        return problem
    agree = problem.micro_batch[:, None] == problem.micro_batch[None, :]
    least = np.where(agree, problem.hop_s, np.inf).min(0)
    later = problem.types + np.where(problem.types >= 0, int(problem.types.max()) + 1, 0)
    later[0] = problem.types[0]

    def twice(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, values], axis=-1)

    return replace(
        problem,
        types=later,
        time_s=np.concatenate([problem.time_s, problem.time_s + least[:, None]], axis=1),
        tail_s=twice(problem.tail_s),
        max_in_flight=twice(problem.max_in_flight),
        leave_s=None if problem.leave_s is None else twice(problem.leave_s),
        leave_tail_s=None if problem.leave_tail_s is None else twice(problem.leave_tail_s),
        hop_s=np.where(agree, problem.hop_s - least[None, :], 0.0),
    )


def recut(problem: Problem, templates: Iterable[Template]) -> Iterator[Template]:
    """Yield the pipelines with the cuts that suit their messages; none where messages cost nothing more."""
    if not problem.hop_s.any():
        return
    seen: set[tuple[int, ...]] = set()
    for one in templates:
        options = tuple(part.option for part in one)
        if len(options) < 2 or options in seen:
            continue
        seen.add(options)
        whole = problem.global_batch / float(problem.micro_batch[options[0]])
        for part in _PARTS:
            made = best_cuts(problem, options, max(1.0, whole / part))
            if made is not None:
                yield made
