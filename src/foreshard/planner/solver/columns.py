"""The columns of a search as arrays, extended as pipelines are generated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from foreshard.planner.solver.problem import Problem, Template, pipeline_rate, tail_seconds, takes_of


@dataclass(slots=True)
class ColumnTable:
    """Pipelines of a problem, one column each.

    takes : ndarray, shape (kinds, pipelines)
        Devices.
    fill_s, bottleneck_s, size, grain : ndarray, shape (pipelines,)
        As in :class:`foreshard.planner.solver.problem.PipelineRate`.
    """

    problem: Problem
    templates: list[Template] = field(default_factory=list)
    takes: np.ndarray = field(init=False)
    _rates: np.ndarray = field(default_factory=lambda: np.empty((5, 0)))
    _tails: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with no pipeline."""
        self.takes = np.empty((len(self.problem.counts), 0))

    def extend(self, templates: Iterable[Template]) -> None:
        """Add those of some pipelines, in the order they came, that are not here."""
        fresh = list(islice(templates, len(self.templates), None))
        if not fresh:
            return
        rates = [pipeline_rate(self.problem, template) for template in fresh]
        rows = [[p.fill_s, p.bottleneck_s, float(p.micro_batch), float(p.grain), p.shortest] for p in rates]
        takes = np.array([takes_of(self.problem, template) for template in fresh], dtype=float)
        self.templates += fresh
        self._rates = np.concatenate([self._rates, np.array(rows).T], axis=1)
        self.takes = np.concatenate([self.takes, takes.T], axis=1)

    @property
    def rate(self) -> np.ndarray:
        """Return the samples a second of each, once it is full."""
        return self._rates[2] / self._rates[1]

    def tails_s(self, num_pipelines: int) -> np.ndarray:
        """Return the tail of each in a plan of so many pipelines."""
        known = self._tails.get(num_pipelines, np.empty(0))
        fresh = self.templates[len(known) :]
        if fresh:
            more = [tail_seconds(self.problem, template, num_pipelines) for template in fresh]
            known = self._tails[num_pipelines] = np.concatenate([known, np.array(more)])
        return known

    def samples(self, seconds: np.ndarray) -> np.ndarray:
        """Return what each processes in so many seconds, tail excluded, fractions of a sample included."""
        fill, bottleneck, size, *_ = self._rates
        return size * np.maximum((seconds - fill) / bottleneck, 0.0)

    def whole_samples(self, seconds: np.ndarray) -> np.ndarray:
        """Return the whole samples each processes, as `problem.PipelineRate.samples`."""
        fill, bottleneck, size, grain, shortest = self._rates
        passes = (seconds - fill) / bottleneck
        samples = np.floor(passes * size / grain + 1e-9) * grain
        whole = samples // size
        samples = np.where(passes - whole < shortest * (1 - 1e-9), whole * size, samples)
        return np.where(seconds < (fill + bottleneck) * (1 - 1e-12), 0.0, samples)
