"""Gradients in flat buckets: one a segment, so that what the same ranks sum goes as one message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foreshard.runtime.state.layout import Segment
from foreshard.runtime.state.slices import WHOLE, Interval, SliceCut

Key = tuple[int, str]


@dataclass(slots=True, kw_only=True)
class Gradient:
    """What a bucket holds of a parameter's gradient: all that the rank has of it, or some slices.

    Attributes
    ----------
    parameter : Parameter
    flat : Tensor
        Where it lies in the bucket.
    cut : SliceCut or None
        None where the parameter's gradient is a view of the bucket.
    part : (first, past the last, of)
        Which slices of what the rank has.
    adds : bool
        Whether it counts; what ranks of a stage compute alike only one of them brings in.
    """

    parameter: nn.Parameter
    flat: Tensor
    cut: SliceCut | None = None
    part: Interval = WHOLE
    adds: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what lies in the bucket."""
        if self.cut is None:
            return tuple(self.parameter.shape)
        return _together(self.cut.views(self.parameter, *self.part), self.cut.dim)


@dataclass(slots=True)
class Bucket:
    """The gradients of a segment, one after another in one tensor.

    Attributes
    ----------
    segment : Segment
    flat : Tensor, shape (elements,)
    gradients : list of Gradient
        In the order of `segment.names`.
    layers : frozenset of int
        That must have passed their last backward before the bucket is complete.
    """

    segment: Segment
    flat: Tensor
    gradients: list[Gradient] = field(default_factory=list)
    layers: frozenset[int] = frozenset()

    def clear(self) -> None:
        """Set the gradients to zero and point the parameters at them."""
        self.flat.zero_()
        for one in self.gradients:
            if one.cut is None:
                one.parameter.grad = one.flat.view_as(one.parameter)
            else:
                one.parameter.grad = torch.zeros_like(one.parameter)

    def fill(self) -> None:
        """Bring in what is not computed in place, before the sum."""
        for one in self.gradients:
            if not one.adds:
                one.flat.zero_()
            elif one.cut is not None and one.parameter.grad is not None:
                one.flat.copy_(one.cut.taken(one.parameter.grad, *one.part).reshape(-1))

    def empty(self) -> None:
        """Give back what is not in place, after the sum."""
        for one in self.gradients:
            if one.cut is not None and one.parameter.grad is not None:
                one.cut.fill(one.parameter.grad, *one.part, one.flat.view(one.shape))

    def named(self) -> Iterator[tuple[Key, Tensor]]:
        """Yield what the bucket holds, by name of the parameter or slice."""
        for name, one in zip(self.segment.names, self.gradients, strict=True):
            yield name, one.flat.view(one.shape)


def _together(views: Sequence[Tensor], dim: int) -> tuple[int, ...]:
    shape = list(views[0].shape)
    shape[dim] = sum(view.shape[dim] for view in views)
    return tuple(shape)
