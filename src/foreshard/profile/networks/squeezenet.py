"""Fire modules, which narrow before they widen: Iandola et al. 2016 (SqueezeNet, arXiv 1602.07360)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Fire(nn.Module):
    """A narrow 1x1 convolution, then one of 1x1 and one of 3x3 beside each other."""

    def __init__(self, inside: int, narrow: int, wide: int) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(nn.Conv2d(inside, narrow, 1), nn.ReLU(inplace=True))
        self.point = nn.Sequential(nn.Conv2d(narrow, wide, 1), nn.ReLU(inplace=True))
        self.square = nn.Sequential(nn.Conv2d(narrow, wide, 3, padding=1), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        """Return both outputs, joined along the channels."""
        narrow = self.squeeze(x)
        return torch.cat([self.point(narrow), self.square(narrow)], 1)


def squeezenet(stem: int, kernel: int, groups: Sequence[Sequence[tuple[int, int]]]) -> nn.Module:
    """Return a SqueezeNet for 1,000 classes.

    Parameters
    ----------
    stem, kernel : int
        Channels and size of the first convolution.
    groups : sequence of sequences of (narrow, wide)
        Fire modules between poolings.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, stem, kernel, 2), nn.ReLU(inplace=True)]
    inside = stem
    for group in groups:
        layers.append(nn.MaxPool2d(3, 2, ceil_mode=True))
        for narrow, wide in group:
            layers.append(Fire(inside, narrow, wide))
            inside = 2 * wide
    layers += [nn.Dropout(), nn.Conv2d(inside, 1000, 1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
