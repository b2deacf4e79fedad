"""The time of a pipeline without its schedule: the slowest stage sets the pace, the others are passed once.

Every closed form of a step is this one: `fill_s + passes * period_s`, plus what follows the last micro-batch
(gradient collectives, the optimizer). The schedule itself is lowered by `graph.pipeline`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class PipelinePace(NamedTuple):
    """How pipelines go: n micro-batches take `fill_s + n * period_s`.

    Attributes
    ----------
    fill_s
        One passage of all stages but the slowest.
    period_s
        One micro-batch on the slowest stage.
    slowest
        Index of that stage.
    """

    fill_s: Any
    period_s: Any
    slowest: Any


def pipeline_pace(stage_s: np.ndarray, count: Any = None) -> PipelinePace:
    """Return how pipelines go whose stages take so long for a micro-batch, messages included.

    Parameters
    ----------
    stage_s : ndarray, shape (stages,) or (stages, pipelines)
    count : ndarray, optional
        How many equal stages each entry stands for, as `stage_s`; 0 where a pipeline has none.

    Source
    ------
    Flush of a pipeline; docs/derivations/step.md.

    Examples
    --------
    >>> pipeline_pace(np.array([1.0, 3.0, 2.0]))[:2]
    (np.float64(3.0), np.float64(3.0))
    """
    present = stage_s if count is None else np.where(count > 0, stage_s, -1.0)
    period_s = present.max(0)
    whole_s = (stage_s if count is None else stage_s * count).sum(0)
    return PipelinePace(fill_s=whole_s - period_s, period_s=period_s, slowest=present.argmax(0))
