"""How much of a run's time is useful when it fails, saves and restarts.

Failures strike at any moment at a constant rate, also while a checkpoint is saved and while the run restarts.
What was done since the last checkpoint is done again. A checkpoint counts when it is saved, and a restart
finds another device for the one that failed.
"""

from __future__ import annotations

import math

from foreshard.cost.memory import optimizer_state_bytes, table_state_bytes
from foreshard.predict.batch import PlannedRun
from foreshard.spec.variation import Reliability, RunEfficiency

_MASTER_BYTES = 4.0  # weights are saved in single precision


def run_efficiency(case: PlannedRun, step_s: float, conditions: Reliability) -> RunEfficiency:
    """Return what becomes of the time of a run whose steps take `step_s`.

    Source
    ------
    docs/event_engine.md, Goodput; Daly, A higher order estimate of the optimum checkpoint interval (2006).
    """
    plan = case.plan
    per_second = failures_per_s(case, conditions)
    saved_bytes = checkpoint_bytes(case)
    waits_s = 0.0
    if conditions.loader_tokens_per_s is not None:
        waits_s = max(0.0, plan.tokens / conditions.loader_tokens_per_s - step_s)
    whole_s = step_s + waits_s
    if per_second == 0.0:
        return RunEfficiency(
            goodput=step_s / whole_s,
            failures_per_day=0.0,
            mtbf_s=None,
            checkpoint_every_s=None,
            checkpoint_every_steps=None,
            young_daly_every_s=None,
            checkpoint_s=None,
            load_s=None,
            restart_s=None,
            checkpoint_bytes=saved_bytes,
            lost={"loading_data": waits_s / whole_s, "checkpoints": 0.0, "lost_steps": 0.0, "restarts": 0.0},
        )
    rate = conditions.checkpoint_bytes_per_s
    load_s = 0.0 if rate is None else saved_bytes / rate
    save_s = load_s if conditions.checkpoint_s is None else conditions.checkpoint_s
    restart_s = float(conditions.restart_s or 0.0) + load_s
    if conditions.checkpoint_every_s is None:
        steps = best_interval_steps(whole_s, save_s, per_second)
    else:
        steps = max(1, round(conditions.checkpoint_every_s / whole_s))
    useful_s = steps * whole_s
    taken_s = segment_s(useful_s, save_s, restart_s, per_second)
    # A segment restarts as often as failures strike it, and saves once.
    once_s = segment_s(useful_s, save_s, 0.0, per_second)
    return RunEfficiency(
        goodput=steps * step_s / taken_s,
        failures_per_day=86400.0 * per_second,
        mtbf_s=1.0 / per_second,
        checkpoint_every_s=useful_s,
        checkpoint_every_steps=steps,
        young_daly_every_s=daly_interval_s(save_s, per_second),
        checkpoint_s=save_s,
        load_s=load_s,
        restart_s=restart_s,
        checkpoint_bytes=saved_bytes,
        lost={
            "loading_data": steps * waits_s / taken_s,
            "checkpoints": save_s / taken_s,
            "lost_steps": (once_s - useful_s - save_s) / taken_s,
            "restarts": (taken_s - once_s) / taken_s,
        },
    )


def failures_per_s(case: PlannedRun, conditions: Reliability) -> float:
    """Return the rate at which devices and nodes of a plan fail."""
    ranks = case.plan.ranks
    nodes = len({case.cluster.node_of(rank) for rank in ranks})
    rate = 0.0
    for count, hours in ((len(ranks), conditions.mtbf_h), (nodes, conditions.node_mtbf_h)):
        rate += 0.0 if hours is None else count / (3600.0 * hours)
    return rate


def checkpoint_bytes(case: PlannedRun) -> float:
    """Return the bytes of trained weights in single precision and of their optimizer states."""
    model, name = case.model, case.plan.optimizer
    states, beside = optimizer_state_bytes(name), table_state_bytes(name)
    tables = model.embedding_params * (not model.embedding_frozen) + model.head_params * (
        not model.head_frozen
    )
    return model.trainable_params * (_MASTER_BYTES + states) + tables * (beside - states)


def segment_s(useful_s: float, save_s: float, restart_s: float, failures_per_s: float) -> float:
    """Return the expected seconds until so many useful ones are done and saved.

    Parameters
    ----------
    useful_s, save_s, restart_s : float, seconds
        A failure while restarting begins the restart anew.
    failures_per_s : float, above 0

    Source
    ------
    Daly (2006), eq. 13: exponential failures, e^(rate restart) (e^(rate (useful + save)) - 1) / rate.

    Examples
    --------
    >>> round(segment_s(600.0, 10.0, 60.0, 1.0 / 36000.0), 1)
    616.2
    """
    if failures_per_s * (useful_s + save_s + restart_s) > 700.0:
        return math.inf
    return (
        math.exp(failures_per_s * restart_s)
        * math.expm1(failures_per_s * (useful_s + save_s))
        / failures_per_s
    )


def best_interval_steps(step_s: float, save_s: float, failures_per_s: float) -> int:
    """Return the whole steps between checkpoints with which a run ends soonest.

    The seconds of a segment over its useful ones fall and then rise, so that a bracket that shrinks around
    the least finds it. What a restart takes does not move it.
    """

    def taken(steps: int) -> float:
        return segment_s(steps * step_s, save_s, 0.0, failures_per_s) / (steps * step_s)

    low, high = 1, max(2, math.ceil(4.0 * math.sqrt(2.0 * save_s / failures_per_s) / step_s))
    while high - low > 2:
        middle = (low + high) // 2
        if taken(middle) <= taken(middle + 1):
            high = middle + 1
        else:
            low = middle
    return min(range(low, high + 1), key=taken)


def daly_interval_s(save_s: float, failures_per_s: float) -> float:
    """Return the seconds of steps between checkpoints by Daly's estimate.

    Source
    ------
    Daly (2006), eq. 37; to first order Young's, sqrt(2 save / rate).
    """
    mtbf_s = 1.0 / failures_per_s
    if save_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(save_s / (2.0 * mtbf_s))
    return math.sqrt(2.0 * save_s * mtbf_s) * (1.0 + ratio / 3.0 + ratio * ratio / 9.0) - save_s
