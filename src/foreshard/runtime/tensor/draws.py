"""What a layer draws where ranks compute it together: each its part of what one rank would draw.

What a rank draws for may be whole (the stream between layers) or a part (heads of attention). The layer is
run once whole, without storage, to see for what it draws; from the shapes follows which part is whose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foreshard.errors import SpecError
from foreshard.runtime.engine.counter_rng import Window
from foreshard.runtime.engine.randomness import Windows, _SampleDraws
from foreshard.runtime.job.job import Job
from foreshard.runtime.job.user_code import own_code
from foreshard.runtime.tensor.ranks import TensorRanks
from foreshard.runtime.tensor.split import LayerSplit

Shape = tuple[int, ...]
_HEADS = 4
"""Dimensions of (sample, head, query, key)."""
_STREAM = 3


class TensorDraws:
    """What whole the draws of cut layers are parts of.

    Parameters
    ----------
    job : Job
    splits : mapping of layer to LayerSplit
    ranks : TensorRanks
    """

    def __init__(self, job: Job, splits: Mapping[int, LayerSplit], ranks: TensorRanks):
        self._job, self._splits, self._ranks = job, splits, ranks
        self._seen: dict[tuple[Any, ...], list[Shape]] = {}

    def windows(self, layer: int, given: Sequence[Any]) -> Windows | None:
        """Return what says of what whole a draw of a layer is a part; None where all draws are whole."""
        if self._ranks.sequence:
            return self._by_head_or_word
        if self._ranks.degree == 1 or layer not in self._splits:
            return None
        if self._splits[layer].plan.draws_by_head:
            return self._by_head
        return lambda number, shape: self._by_shape(layer, given, number, shape)

    def _by_head(self, number: int, shape: Shape) -> Window | None:
        return self._window(shape, 1) if len(shape) == _HEADS else None

    def _by_head_or_word(self, number: int, shape: Shape) -> Window | None:
        """Return the window of attention's weights, or of the stream: (sample, word, channel)."""
        return self._window(shape, 1) if len(shape) in (_HEADS, _STREAM) else None

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
            fused = len(shape) - 1 in differ and whole[-1] in self._fused_sizes(layer)
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

    def _fused_sizes(self, layer: int) -> set[int]:
        split = self._splits[layer]
        return {split.shapes[name][cut.dim] for name, cut in split.cuts.items() if len(cut.blocks) > 1}

    def _whole_shapes(self, layer: int, given: Sequence[Any]) -> list[Shape]:
        """Return the shapes that a whole layer draws for, in order."""
        told = tuple((tuple(v.shape), v.dtype) if isinstance(v, Tensor) else type(v) for v in given)
        if (layer, told) not in self._seen:
            with torch.device("meta"), own_code(f"layer {layer} as a whole", self._job.path), torch.no_grad():
                module = self._job.layer(layer).to("meta")
                mode = _Recording(len(given[0]))
                with mode:
                    module(*(v.to("meta") if isinstance(v, Tensor) else v for v in given))
            self._seen[layer, told] = mode.shapes
        return self._seen[layer, told]


class _Recording(_SampleDraws):
    """Notes for what is drawn."""

    def __init__(self, samples: int):
        super().__init__((), range(samples))
        self.shapes: list[Shape] = []

    def _bits(self, shape: Sequence[int], device: torch.device | str) -> Tensor:
        self.shapes.append(tuple(shape))
        return torch.empty(*shape, dtype=torch.int64, device="meta")
