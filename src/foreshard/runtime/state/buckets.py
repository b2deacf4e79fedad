"""Gradients in flat buckets, one per segment: gradients that the same ranks sum go as one message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foreshard.runtime.state.layout import Segment
from foreshard.runtime.state.shard_keys import ParameterKey
from foreshard.runtime.state.slices import WHOLE, Interval, SliceCut


@dataclass(slots=True, kw_only=True)
class Gradient:
    """The place of a parameter's gradient in a bucket: all that the rank has of it, or some slices.

    `flat` is a view of the bucket. The gradient is that view where there is no cut; else `part` says which
    slices of it the rank computes. Of ranks that compute the same gradient only one `adds` it.
    """

    parameter: nn.Parameter
    flat: Tensor
    cut: SliceCut | None = None
    part: Interval = WHOLE
    adds: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what lies in the bucket."""
        shape = list(self.parameter.shape)
        if self.cut is not None:
            views = self.cut.views(self.parameter, *self.part)
            shape[self.cut.dim] = sum(view.shape[self.cut.dim] for view in views)
        return tuple(shape)


@dataclass(slots=True)
class Bucket:
    """The gradients of a segment, one after another in one tensor, in the order of its names.

    It is complete when its layers have passed their last backward.
    """

    segment: Segment
    flat: Tensor
    gradients: list[Gradient] = field(default_factory=list)
    layers: frozenset[int] = frozenset()

    def clear(self) -> None:
        """Set the gradients to zero and point the parameters at them."""
        self.flat.zero_()
        for gradient in self.gradients:
            parameter = gradient.parameter
            if gradient.cut is None:
                parameter.grad = gradient.flat.view_as(parameter)
            else:
                parameter.grad = torch.zeros_like(parameter)

    def fill(self) -> None:
        """Copy gradients that are not computed in place into the bucket, before the sum."""
        for gradient in self.gradients:
            grad = gradient.parameter.grad
            if not gradient.adds:
                gradient.flat.zero_()
            elif gradient.cut is not None and grad is not None:
                gradient.flat.copy_(gradient.cut.taken(grad, *gradient.part).reshape(-1))

    def copy_back(self) -> None:
        """Copy the sums of these back to the parameters' gradients."""
        for gradient in self.gradients:
            grad = gradient.parameter.grad
            if gradient.cut is not None and grad is not None:
                gradient.cut.fill(grad, *gradient.part, gradient.flat.view(gradient.shape))

    def named(self) -> Iterator[tuple[ParameterKey, Tensor]]:
        """Yield the gradients by name of the parameter or slice."""
        for name, gradient in zip(self.segment.names, self.gradients, strict=True):
            yield name, gradient.flat.view(gradient.shape)
