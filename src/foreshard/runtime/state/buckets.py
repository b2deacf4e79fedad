"""Gradients in flat buckets: gradients that the same ranks sum go as one message, or as few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foreshard.runtime.state.shard_keys import ParameterKey
from foreshard.runtime.state.slices import WHOLE, Interval, SliceCut

BUCKET_BYTES = 25 << 20
"""From which on a bucket is full unless a run says so: DistributedDataParallel's bucket_cap_mb.

Smaller ones start earlier in the backward, but more of the time of each goes to latency.
"""


@dataclass(slots=True, kw_only=True)
class Gradient:
    """The place of a parameter's gradient in a bucket: all that the rank has of it, or some slices.

    `flat` is a view of the bucket. The gradient is that view where there is no cut; else `part` says which
    slices of it the rank computes. Of ranks that compute the same gradient only one `adds` it.
    """

    name: ParameterKey
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
    """Gradients that its owners, in rising order, sum: one after another in one tensor, in order of names.

    It is complete when its layers have passed their last backward.
    """

    owners: tuple[int, ...]
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
        for gradient in self.gradients:
            yield gradient.name, gradient.flat.view(gradient.shape)


def cut_in_buckets(gradients: Sequence[Gradient], full_bytes: int | None = None) -> list[list[Gradient]]:
    """Return gradients, which are in layer order, in parts of a bucket each: last layers first.

    A bucket takes gradients until it holds `full_bytes` (`BUCKET_BYTES` unless given) or more.
    """
    parts: list[list[Gradient]] = []
    room = 0
    for gradient in reversed(gradients):
        if room <= 0:
            parts.append([])
            room = BUCKET_BYTES if full_bytes is None else full_bytes
        parts[-1].insert(0, gradient)
        room -= gradient.flat.numel() * gradient.flat.element_size()
    return parts
