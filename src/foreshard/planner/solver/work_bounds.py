"""Lower bounds on the step time from work alone: the device-seconds that a sample costs at least."""

from __future__ import annotations

import numpy as np

from foreshard.planner.solver.problem import Problem


def fluid_s(problem: Problem, weights: np.ndarray, work: float, devices: float) -> float:
    """Return a time that no plan on at most so many devices beats, whatever its pipelines.

    Parameters
    ----------
    problem : Problem
    weights : ndarray, shape (kinds,)
        Of a second of a device of each kind.
    work : float
        What a sample costs at these weights at least: :func:`least_work`.
    devices : float
    """
    value, left = 0.0, devices
    for kind in np.argsort(-weights):
        used = min(left, problem.counts[kind])
        value += used * weights[kind]
        left -= used
    return problem.global_batch * work / value if value > 0 else 0.0


def work_bound(problem: Problem) -> float:
    """Return a step time that no arrangement beats, from work alone; infinite where no pipeline fits at all.

    For any weights of devices, a sample needs at least the least priced device-seconds of a way through the
    chain, and a second buys no more than all devices are value; weights are what a device does in a second.
    """
    weights = np.array([speed_of(problem, kind) for kind in range(len(problem.counts))])
    work = least_work(problem, weights)
    value = float(weights @ np.array(problem.counts))
    if not np.isfinite(work):
        return float("inf")
    return problem.global_batch * work / value if value > 0 else 0.0


def least_work(problem: Problem, weights: np.ndarray, options: np.ndarray | None = None) -> float:
    """Return the least priced device-seconds of a sample on its way through a pipeline of some options."""
    some = np.arange(len(problem.takes)) if options is None else options
    times = problem.time_s[some]
    usable = np.isfinite(times) & (problem.max_in_flight[some] > 0)
    value = (problem.takes[some] @ weights / problem.micro_batch[some])[:, None]
    cost = np.where(usable, value * np.where(usable, times, 0.0), np.inf)
    least = np.append(cost.min(0), np.inf)[problem.types]
    after = np.full(problem.num_layers + 1, np.inf)
    after[problem.num_layers] = 0.0
    for start in range(problem.num_layers - 1, -1, -1):
        after[start] = (least[start] + after).min()
    return float(after[0])


def rate_of(problem: Problem, kind: int) -> float:
    """Return the samples a second and device of one kind alone; 0 when it cannot run every layer."""
    own = np.flatnonzero((problem.takes.sum(1) == problem.takes[:, kind]) & (problem.takes[:, kind] > 0))
    if not len(own):
        return 0.0
    weights = np.zeros(len(problem.counts))
    weights[kind] = 1.0
    work = least_work(problem, weights, own)
    return 1.0 / work if np.isfinite(work) and work > 0 else 0.0


def least_tail(problem: Problem, pipelines: tuple[int, int]) -> float:
    """Return the least tail of any stage, for a number of pipelines in a range."""
    tail = problem.tail_between(pipelines)
    usable = np.isfinite(problem.time_s) & (problem.max_in_flight > 0)
    return float(tail[usable].min()) if usable.any() else 0.0


def speed_of(problem: Problem, kind: int) -> float:
    """Return how much work a device of a kind does in a second, by the quickest option it takes part in."""
    own = np.flatnonzero(problem.takes[:, kind] > 0)
    if not len(own):
        return 0.0
    middle = int(problem.types[1, 2]) if problem.num_layers > 2 else 0
    each = np.where(problem.max_in_flight[own, middle] > 0, problem.time_s[own, middle], np.inf)
    each = each * problem.takes[own].sum(1) / problem.micro_batch[own]
    return 1.0 / float(each.min()) if np.isfinite(each.min()) else 0.0
