"""Samples for each pipeline, exactly: the least time in which all of them together get through the batch."""

from __future__ import annotations

from collections.abc import Sequence

from foreshard.planner.solver.problem import PipelineRate

_STEPS = 60


def balance(paces: Sequence[PipelineRate], tails_s: Sequence[float], total: int) -> tuple[int, ...] | None:
    """Return shares that sum to `total` and make the slowest pipeline as fast as possible.

    Every pipeline gets at least one sample: one that should get none is not part of the plan.

    Parameters
    ----------
    paces, tails_s
        Of each pipeline.
    total : int, samples

    Returns
    -------
    tuple of int or None
        None when there are fewer samples than pipelines.

    Notes
    -----
    What a pipeline gets through in T seconds rises with T, so the least T is found by bisection between times
    at which some pipeline finishes a grain, and is one of them. Surplus is taken off where it ends latest.
    """
    if total < len(paces):
        return None
    high = max(pace.seconds(total) + tail for pace, tail in zip(paces, tails_s, strict=True))
    low = 0.0
    for _ in range(_STEPS):
        middle = 0.5 * (low + high)
        if _taken(paces, tails_s, middle) >= total:
            high = middle
        else:
            low = middle
    shares = [max(1, pace.samples(high - tail)) for pace, tail in zip(paces, tails_s, strict=True)]
    surplus = sum(shares) - total
    while surplus > 0:
        ends = [
            pace.seconds(share) + tail if share > 1 else -1.0
            for pace, tail, share in zip(paces, tails_s, shares, strict=True)
        ]
        last = max(range(len(ends)), key=ends.__getitem__)
        # Down to the end of the grain before, which is what makes this pipeline end sooner.
        step = min(surplus, (shares[last] - 1) % paces[last].grain + 1, shares[last] - 1)
        shares[last] -= step
        surplus -= step
    return tuple(shares)


def _taken(paces: Sequence[PipelineRate], tails_s: Sequence[float], seconds: float) -> int:
    return sum(max(1, pace.samples(seconds - tail)) for pace, tail in zip(paces, tails_s, strict=True))
