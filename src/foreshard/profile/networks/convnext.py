"""Convolutions arranged as a transformer: Liu et al. 2022 (ConvNeXt, arXiv 2201.03545)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of an image."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normed image; shape (samples, channels, height, width)."""
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvBlock(nn.Module):
    """A depthwise 7x7 convolution and an MLP of the channels, scaled and added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spread = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.full((width, 1, 1), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; shape (samples, channels, height, width)."""
        out: Tensor = self.mlp(self.spread(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + self.scale * out


def convnext(width: int, counts: Sequence[int]) -> nn.Module:
    """Return a ConvNeXt of this first width and these blocks a stage, for 1,000 classes."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), ChannelNorm(width, eps=1e-6)]
    for stage, count in enumerate(counts):
        if stage:
            layers += [ChannelNorm(width, eps=1e-6), nn.Conv2d(width, 2 * width, 2, 2)]
            width *= 2
        layers += [ConvBlock(width) for _ in range(count)]
    head = [nn.AdaptiveAvgPool2d(1), ChannelNorm(width, eps=1e-6), nn.Flatten(), nn.Linear(width, 1000)]
    return nn.Sequential(*layers, *head)
