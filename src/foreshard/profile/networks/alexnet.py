"""The first deep network of the benchmark: Krizhevsky 2014 (AlexNet of one tower, arXiv 1404.5997)."""

from __future__ import annotations

from torch import nn


def alexnet() -> nn.Module:
    """Return AlexNet for images of 3 channels and 1,000 classes."""
    layers: list[nn.Module] = []
    inside = 3
    for outside, kernel, stride, padding, pooled in (
        (64, 11, 4, 2, True),
        (192, 5, 1, 2, True),
        (384, 3, 1, 1, False),
        (256, 3, 1, 1, False),
        (256, 3, 1, 1, True),
    ):
        layers += [nn.Conv2d(inside, outside, kernel, stride, padding), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(3, 2)] * pooled
        inside = outside
    layers += [nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Dropout(), nn.Linear(256 * 36, 4096)]
    layers += [nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(4096, 1000))
