"""The columns of a search as arrays, extended as pipelines are generated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from foreshard.planner.solver.problem import (
    Filling,
    PipelineColumns,
    Problem,
    Template,
    last_part,
    pipeline_columns,
)


@dataclass(slots=True)
class ColumnTable:
    """Pipelines of a problem, one column each, and how they go."""

    problem: Problem
    filling: Filling = "full"
    templates: list[Template] = field(default_factory=list)
    columns: PipelineColumns = field(init=False)

    def __post_init__(self) -> None:
        """Begin with no pipeline."""
        self.columns = pipeline_columns(self.problem, [])

    def extend(self, templates: Iterable[Template]) -> None:
        """Add those of some pipelines, in the order they came, that are not here."""
        fresh = list(islice(templates, len(self.templates), None))
        if fresh:
            self.templates += fresh
            more = pipeline_columns(self.problem, fresh, filling=self.filling)
            pairs = zip(self.columns, more, strict=True)
            self.columns = PipelineColumns(*(np.concatenate(pair, axis=1) for pair in pairs))

    @property
    def takes(self) -> np.ndarray:
        """Return the devices of each, shape (kinds, pipelines)."""
        return self.columns.takes

    @property
    def rate(self) -> np.ndarray:
        """Return the samples a second of each, once it is full."""
        return self.columns.rates[2] / self.columns.rates[1]

    def tails_s(self, num_pipelines: int) -> np.ndarray:
        """Return the tail of each in a plan of so many pipelines."""
        return self.columns.tails(self.problem, num_pipelines)

    def samples(self, seconds: np.ndarray) -> np.ndarray:
        """Return what each processes in so many seconds, tail excluded, fractions of a sample included."""
        fill, bottleneck, size, *_ = self.columns.rates
        return size * np.maximum((seconds - fill) / bottleneck, 0.0)

    def whole_samples(self, seconds: np.ndarray) -> np.ndarray:
        """Return the whole samples each processes, as `problem.PipelineRate.samples`."""
        fill, bottleneck, size, grain, shortest, drained, shadowed = self.columns.rates
        passes = (seconds - fill) / bottleneck
        whole = np.floor(passes * size / grain + 1e-9) * grain // size
        part = last_part(passes - whole, drained / bottleneck, shadowed / bottleneck)
        short = np.floor(part * size / grain + 1e-9) * grain
        samples = whole * size + np.where(part < shortest * (1 - 1e-9), 0.0, short)
        return np.where(seconds < (fill + bottleneck) * (1 - 1e-12), 0.0, samples)
