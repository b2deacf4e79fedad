"""Blocks whose layers read all before them: Huang et al. 2016 (DenseNet, arXiv 1608.06993)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from foreshard.profile.networks.convolutions import classifies, with_norm


def _normed_first(inside: int, outside: int, kernel: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inside, outside, kernel, padding=kernel // 2, bias=False)
    return [nn.BatchNorm2d(inside), nn.ReLU(inplace=True), convolution]


class Dense(nn.Module):
    """Layers of `growth` channels, each of which reads the input and the output of all before it."""

    def __init__(self, inside: int, count: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                *_normed_first(inside + i * growth, 4 * growth, 1), *_normed_first(4 * growth, growth, 3)
            )
            for i in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return input and outputs, joined along the channels."""
        made = [x]
        for layer in self.layers:
            made.append(layer(torch.cat(made, 1)))
        return torch.cat(made, 1)


def densenet(counts: Sequence[int], *, growth: int = 32, stem: int = 64) -> nn.Module:
    """Return a network of four dense blocks, halved in width and size between them, for 1,000 classes."""
    layers: list[nn.Module] = [
        *with_norm(3, stem, 7, 2, activation="relu"),
        nn.MaxPool2d(3, 2, 1),
    ]
    width = stem
    for i, count in enumerate(counts):
        layers.append(Dense(width, count, growth))
        width += count * growth
        if i + 1 < len(counts):
            layers += [*_normed_first(width, width // 2, 1), nn.AvgPool2d(2)]
            width //= 2
    layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, *classifies(width))
