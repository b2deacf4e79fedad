"""Draws of how long a pass takes over its mean, and of the slowest of several ranks that wait for each other.

The slowest of n equal ranks is drawn at once, as the largest order statistic: its distribution function is
the n-th power of that of one rank.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import numpy as np

_PARETO_INDEX = 2.5
"""Tail index of the heavy tail: of the powers with a standard deviation one with a tail that shows."""
_LOGIT_REACH = 60.0
_LOGIT_POINTS = 48_001


def slowest_of(
    rng: np.random.Generator, num_ranks: int, shape: tuple[int, ...], *, jitter: float, tail: str
) -> np.ndarray:
    """Return draws of the largest of `num_ranks` factors with mean 1 and standard deviation `jitter`.

    Parameters
    ----------
    rng : numpy.random.Generator
    num_ranks : int, at least 1
    shape : tuple of int
    jitter : float
    tail : {'lognormal', 'pareto'}

    Returns
    -------
    ndarray, of the shape

    Source
    ------
    Order statistics of independent draws: David and Nagaraja, Order Statistics (2003), 2.1.
    """
    if jitter == 0.0 or num_ranks == 0:
        return np.ones(shape) if num_ranks else np.zeros(shape)
    log_below = np.log(1.0 - rng.random(shape)) / num_ranks  # of a uniform draw in (0, 1]
    above = -np.expm1(log_below)
    if tail == "pareto":
        mean = _PARETO_INDEX / (_PARETO_INDEX - 1.0)
        deviation = math.sqrt(mean / (_PARETO_INDEX - 1.0) / (_PARETO_INDEX - 2.0))
        drawn = np.maximum(above, 1e-300) ** (-1.0 / _PARETO_INDEX)
        return 1.0 + jitter / deviation * (drawn - mean)  # type: ignore[no-any-return]
    sigma = math.sqrt(math.log1p(jitter * jitter))
    normal = np.interp(log_below - np.log(np.maximum(above, 1e-300)), *_normal_by_logit())
    return np.exp(sigma * normal - 0.5 * sigma * sigma)  # type: ignore[no-any-return]


@cache
def _normal_by_logit() -> tuple[np.ndarray, np.ndarray]:
    """Return points of the normal quantile by the logit of its probability, a curve near a line."""
    logit = np.linspace(-_LOGIT_REACH, _LOGIT_REACH, _LOGIT_POINTS)
    quantile, low = NormalDist().inv_cdf, np.exp(-np.abs(logit)) / (1.0 + np.exp(-np.abs(logit)))
    return logit, -np.sign(logit) * np.array([quantile(one) for one in low.tolist()])
