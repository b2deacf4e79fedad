"""Samples for each pipeline, exactly: the least time in which all of them together process the batch."""

from __future__ import annotations

from collections.abc import Sequence

from foreshard.planner.solver.problem import PipelineRate

_STEPS = 60
"""Bisections of the step time: to the last bit of a double."""


def balance(rates: Sequence[PipelineRate], tails_s: Sequence[float], total: int) -> tuple[int, ...] | None:
    """Return shares that sum to `total` and make the slowest pipeline as fast as possible.

    Every pipeline gets at least one sample: one that should get none is not part of the plan.

    Parameters
    ----------
    rates, tails_s
        Of each pipeline.
    total : int, samples

    Returns
    -------
    tuple of int or None
        None when there are fewer samples than pipelines.

    Notes
    -----
    What a pipeline processes in T seconds rises with T, so the least T is found by bisection between times
    at which some pipeline finishes a grain, and is one of them. Surplus is taken off where it ends latest.
    """
    if total < len(rates):
        return None
    high = max(rate.seconds(total) + tail for rate, tail in zip(rates, tails_s, strict=True))
    low = 0.0
    for _ in range(_STEPS):
        middle = 0.5 * (low + high)
        if _taken(rates, tails_s, middle) >= total:
            high = middle
        else:
            low = middle
    shares = [max(1, rate.samples(high - tail)) for rate, tail in zip(rates, tails_s, strict=True)]
    surplus = sum(shares) - total
    while surplus > 0:
        ends = [
            rate.seconds(share) + tail if share > 1 else -1.0
            for rate, tail, share in zip(rates, tails_s, shares, strict=True)
        ]
        last = max(range(len(ends)), key=ends.__getitem__)
        # Down to the end of the grain before, which is what makes this pipeline end sooner.
        step = min(surplus, (shares[last] - 1) % rates[last].grain + 1, shares[last] - 1)
        shares[last] -= step
        surplus -= step
    return tuple(shares)


def _taken(rates: Sequence[PipelineRate], tails_s: Sequence[float], seconds: float) -> int:
    return sum(max(1, rate.samples(seconds - tail)) for rate, tail in zip(rates, tails_s, strict=True))
