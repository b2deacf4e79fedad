"""The configuration program: how many of each pipeline to run side by side, in fractions or whole numbers.

In a step of T seconds pipeline k processes `samples_k(T)`; the program maximises the samples that the devices
allow. If no mix of pipelines processes the batch in T, no plan takes T: that is the bound. Pipelines are the
columns, generated as the duals of the device rows call for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreshard.errors import ExtraMissingError


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineMix:
    """How many of each pipeline, the samples they process, and the duals of the device rows."""

    counts: np.ndarray
    samples: float
    device_duals: np.ndarray


def fractional_mix(
    takes: np.ndarray, samples: np.ndarray, counts: Sequence[int], pipelines: tuple[int, int]
) -> PipelineMix | None:
    """Return the mix, fractions allowed, that processes most samples; None if there are too few devices.

    Parameters
    ----------
    takes : ndarray, shape (kinds, pipelines)
    samples : ndarray, shape (pipelines,)
    counts : sequence of int
        Devices of each kind.
    pipelines : (fewest, most)
    """
    linprog = _scipy().linprog
    ones = np.ones((1, takes.shape[1]))
    answer = linprog(
        -samples,
        A_ub=np.vstack([takes, ones, -ones]),
        b_ub=[*counts, pipelines[1], -pipelines[0]],
        method="highs",
    )
    if answer.status != 0:
        return None
    duals = -answer.ineqlin.marginals
    kinds = len(counts)
    return PipelineMix(
        counts=answer.x,
        samples=-float(answer.fun),
        device_duals=np.maximum(duals[:kinds], 0.0),
    )


def whole_mix(
    takes: np.ndarray,
    samples: np.ndarray,
    counts: Sequence[int],
    pipelines: tuple[int, int],
    *,
    limit_s: float = 0.3,
    gap: float = 1e-3,
) -> np.ndarray | None:
    """Return how many of each pipeline, whole numbers, process most samples."""
    optimize = _scipy()
    rows = np.vstack([takes, np.ones((1, takes.shape[1]))])
    answer = optimize.milp(
        -samples,
        constraints=optimize.LinearConstraint(
            rows, [-np.inf] * len(counts) + [pipelines[0]], [*counts, pipelines[1]]
        ),
        integrality=np.ones(len(samples)),
        options={"time_limit": limit_s, "mip_rel_gap": gap},
    )
    return None if answer.x is None else np.rint(answer.x).astype(int)


def _scipy() -> Any:
    try:
        from scipy import optimize
    except ImportError:
        raise ExtraMissingError(
            "planning mixed devices needs scipy",
            key="scipy",
            rule="It ships with the extra `plan`",
            fix="pip install 'foreshard[plan]'",
        ) from None
    return optimize
