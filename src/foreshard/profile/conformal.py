"""Split-conformal intervals on log residuals of families that were left out of the fit.

A residual is log(measured / predicted). Residuals are grouped by class (what a prediction rests on); the
interval of a new prediction is the finite-sample quantile of its class, wider when the query is far from
the data the class was measured on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def conformal_quantile(scores: ArrayLike, level: float) -> float:
    """Return the score that a new exchangeable score stays below with probability at least `level`.

    Parameters
    ----------
    scores : array, shape (n,)
        Non-negative nonconformity scores of held-out rows.
    level : float, in (0, 1)

    Returns
    -------
    float
        The ceil((n + 1) level)-th smallest score; infinite when n is too small for that level.

    Source
    ------
    Vovk, Gammerman, Shafer 2005; Lei et al. 2018 (arXiv 1604.04173) section 2.2.

    Examples
    --------
    >>> conformal_quantile([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], 0.9)
    9.0
    """
    ordered = np.sort(np.asarray(scores, float).ravel())
    rank = int(np.ceil((len(ordered) + 1) * level - 1e-9))
    return float(ordered[rank - 1]) if 0 < rank <= len(ordered) else float("inf")


def signed_quantiles(residuals: ArrayLike, level: float) -> tuple[float, float]:
    """Return (low, high) such that a new residual lies between with probability at least `level`.

    Each tail gets half of the miss, so a biased or skewed class gets an uneven interval.
    """
    values = np.asarray(residuals, float).ravel()
    tail = 1.0 - (1.0 - level) / 2.0
    return -conformal_quantile(-values, tail), conformal_quantile(values, tail)


def feature_scale(features: ArrayLike) -> NDArray[np.float64]:
    """Return the spread of each feature (median absolute deviation times 1.4826), 1 where it is constant.

    Parameters
    ----------
    features : array, shape (n, k)
    """
    data = np.atleast_2d(np.asarray(features, float))
    spread = 1.4826 * np.median(np.abs(data - np.median(data, axis=0)), axis=0)
    return np.where(spread > 0, spread, np.where(np.ptp(data, axis=0) > 0, np.std(data, axis=0), 1.0))


def neighbour_distance(queries: ArrayLike, data: ArrayLike, scale: ArrayLike, *, skip_self: bool = False) -> NDArray:
    """Return the distance of each query to its nearest data row, root mean square of scaled features.

    Parameters
    ----------
    queries : array, shape (q, k)
    data : array, shape (n, k)
    scale : array, shape (k,)
    skip_self : bool
        The queries are the data: a row is not its own neighbour.

    Returns
    -------
    ndarray, shape (q,)
    """
    a = np.atleast_2d(np.asarray(queries, float)) / np.asarray(scale, float)
    b = np.atleast_2d(np.asarray(data, float)) / np.asarray(scale, float)
    square = np.mean((a[:, None, :] - b[None, :, :]) ** 2, axis=2)
    if skip_self:
        np.fill_diagonal(square, np.inf)
    return np.sqrt(square.min(axis=1))


def widening(distance: ArrayLike, typical: float, rate: float = 0.5) -> NDArray[np.float64]:
    """Return the factor on an interval at a distance from the data: 1 up to `typical`, then a logarithm.

    Parameters
    ----------
    distance : array
    typical : float, > 0
        The 90 % quantile of the distances between the data rows themselves.
    rate : float
        Extra width per factor e of distance beyond `typical`.
    """
    excess = np.maximum(np.asarray(distance, float) / max(typical, 1e-12), 1.0)
    return 1.0 + rate * np.log(excess)


def interval(
    predicted: ArrayLike, residuals: ArrayLike, level: float = 0.9, factor: ArrayLike = 1.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (low, high) of predictions whose class has these log residuals.

    Parameters
    ----------
    predicted : array, shape (q,), seconds or bytes
    residuals : array, shape (n,)
        log(measured / predicted) of left-out rows of the class.
    level : float
    factor : array, shape () or (q,)
        From `widening`.
    """
    low, high = signed_quantiles(residuals, level)
    value, wide = np.asarray(predicted, float), np.asarray(factor, float)
    middle = 0.5 * (low + high) if np.isfinite(low + high) else 0.0
    return (
        value * np.exp(middle + (low - middle) * wide),
        value * np.exp(middle + (high - middle) * wide),
    )
