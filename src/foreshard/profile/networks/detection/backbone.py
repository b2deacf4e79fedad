"""A ResNet-50 as the backbone of a detector, its norms, its stem and its first stage frozen, and a pyramid.

The pyramid is that of Lin et al. 2016 (arXiv 1612.03144).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreshard.profile.networks.resnet import resnet

WIDE = 256
"""Channels of the maps of a pyramid."""
_STAGES = (3, 4, 6, 3)


class FrozenNorm(nn.Module):
    """A batch norm with fixed statistics, scale and shift."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "mean", "variance"):
            self.register_buffer(name, torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled and shifted image."""
        weight, bias, mean, variance = (buffer.to(x.dtype) for buffer in self.buffers())
        scale = weight * variance.rsqrt()
        return x * scale[:, None, None] + (bias - mean * scale)[:, None, None]


class FoldedNorm(nn.Module):
    """A frozen norm whose statistics are in its scale and shift, of which each takes one operation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("scale", "shift"):
            self.register_buffer(name, torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled and shifted image."""
        scale, shift = (buffer.to(x.dtype) for buffer in self.buffers())
        return x * scale + shift


def frozen_backbone(
    norm: Callable[[int], nn.Module], *, groups: int = 1, group_width: int = 64
) -> nn.ModuleList:
    """Return the stem with the first stage, and each of the others.

    Parameters
    ----------
    norm : callable
        Makes a frozen norm of so many channels.
    groups, group_width : int
        As of `resnet`.
    """
    layers = list(resnet(_STAGES, groups=groups, group_width=group_width).children())[:-3]
    starts = [0, *(4 + sum(_STAGES[:stage]) for stage in range(1, 4)), len(layers)]
    stages = nn.ModuleList(nn.Sequential(*layers[lo:hi]) for lo, hi in pairwise(starts))
    for module in list(stages.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, norm(child.num_features))
    stages[0].requires_grad_(False)
    return stages


class FeaturePyramid(nn.Module):
    """Maps of as many channels at each resolution, with what coarser ones see."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Conv2d(inside, WIDE, 1) for inside in channels)
        self.outer = nn.ModuleList(nn.Conv2d(WIDE, WIDE, 3, padding=1) for _ in channels)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Return the maps, the finest first."""
        inner = [convolution(image) for convolution, image in zip(self.inner, maps, strict=True)]
        for level in reversed(range(len(inner) - 1)):
            inner[level] = inner[level] + functional.interpolate(
                inner[level + 1], size=inner[level].shape[2:]
            )
        return [convolution(image) for convolution, image in zip(self.outer, inner, strict=True)]
