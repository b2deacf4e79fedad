"""Random numbers (dropout) in layers that ranks compute together: each draws its part of one rank's draw.

A rank draws for whole tensors (the stream between layers) or for parts (heads of attention). A layer whose
plan does not say which is run once as a whole, without storage, to see the shapes of its draws; the part of
each rank follows from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foreshard.errors import SpecError
from foreshard.runtime.engine.counter_rng import Window
from foreshard.runtime.engine.randomness import SampleDraws, Windows
from foreshard.runtime.job.job import Job
from foreshard.runtime.job.user_code import user_code
from foreshard.runtime.tensor.ranks import TensorRanks
from foreshard.runtime.tensor.split import LayerSplit

Shape = tuple[int, ...]
_HEADS = 4  # dimensions of (sample, head, query, key)
_STREAM = 3  # dimensions of (sample, token, channel)


class TensorDraws:
    """The windows of this rank's draws in those of whole layers."""

    def __init__(self, job: Job, splits: Mapping[int, LayerSplit], ranks: TensorRanks):
        self._job, self._splits, self._ranks = job, splits, ranks
        self._seen: dict[tuple[Any, ...], list[Shape]] = {}

    def windows(self, layer: int, given: Sequence[Any]) -> Windows | None:
        """Return the windows of a layer's draws; None where all draws are whole."""
        if self._ranks.sequence:
            return self._by_dimensions(_HEADS, _STREAM)
        if self._ranks.degree == 1 or layer not in self._splits:
            return None
        if self._splits[layer].plan.draws_by_head:
            return self._by_dimensions(_HEADS)
        return lambda number, shape: self._by_shape(layer, given, number, shape)

    def _by_dimensions(self, *cut: int) -> Windows:
        """Return the windows where tensors of these numbers of dimensions are cut, along the second."""
        return lambda number, shape: self._window(shape, 1) if len(shape) in cut else None

    def _window(self, shape: Shape, dim: int) -> Window:
        whole = [*shape[:dim], shape[dim] * self._ranks.degree, *shape[dim + 1 :]]
        return whole, dim, shape[dim] * self._ranks.index

    def _by_shape(self, layer: int, given: Sequence[Any], number: int, shape: Shape) -> Window | None:
        shapes = self._whole_shapes(layer, given)
        whole = shapes[number - 1] if number <= len(shapes) else ()
        if whole == shape:
            return None
        if len(whole) == len(shape):
            differ = [dim for dim, (mine, all_) in enumerate(zip(shape, whole, strict=True)) if mine != all_]
            split = self._splits[layer]
            fused_sizes = {split.shapes[n][cut.dim] for n, cut in split.cuts.items() if len(cut.blocks) > 1}
            fused = len(shape) - 1 in differ and whole[-1] in fused_sizes
            if len(differ) == 1 and differ[0] and not fused:
                window = self._window(shape, differ[0])
                if tuple(window[0]) == whole:
                    return window
        raise SpecError(
            f"layer {layer} draws for {list(shape)} on a rank, for {list(whole)} as a whole",
            file=self._job.path,
            key="tensor_plan",
            value=layer,
            rule="A draw is for the whole, or for a part of equal size along one dimension",
            fix="Draw (dropout) where the layer is whole, or use tp 1",
        )

    def _whole_shapes(self, layer: int, given: Sequence[Any]) -> list[Shape]:
        """Return the shapes that a whole layer draws for, in order."""
        kinds = tuple((tuple(v.shape), v.dtype) if isinstance(v, Tensor) else type(v) for v in given)
        if (layer, kinds) not in self._seen:
            part, mode = f"layer {layer} as a whole", _Recording(len(given[0]))
            with torch.device("meta"), user_code(part, self._job.path), torch.no_grad():
                module = self._job.layer(layer).to("meta")
                with mode:
                    module(*(v.to("meta") if isinstance(v, Tensor) else v for v in given))
            self._seen[layer, kinds] = mode.shapes
        return self._seen[layer, kinds]


class _Recording(SampleDraws):
    """Records the shapes that are drawn for."""

    def __init__(self, samples: int):
        super().__init__((), range(samples))
        self.shapes: list[Shape] = []

    def _bits(self, shape: Sequence[int], device: torch.device | str) -> Tensor:
        self.shapes.append(tuple(shape))
        return torch.empty(*shape, dtype=torch.int64, device="meta")
