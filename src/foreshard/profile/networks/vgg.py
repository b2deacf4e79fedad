"""Plain stacks of 3x3 convolutions: Simonyan, Zisserman 2014 (arXiv 1409.1556)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

_WIDTHS = (64, 128, 256, 512, 512)


def vgg(counts: Sequence[int], *, batch_norm: bool = False) -> nn.Module:
    """Return a network of five stages of convolutions, each followed by pooling, and three linear layers.

    Parameters
    ----------
    counts : sequence of int
        Convolutions of each of the five stages.
    batch_norm : bool
        Whether a batch norm follows every convolution.
    """
    layers: list[nn.Module] = []
    inside = 3
    for width, count in zip(_WIDTHS, counts, strict=True):
        for _ in range(count):
            norm = [nn.BatchNorm2d(width)] if batch_norm else []
            layers += [nn.Conv2d(inside, width, 3, padding=1), *norm, nn.ReLU(inplace=True)]
            inside = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for inside, outside in ((512 * 49, 4096), (4096, 4096)):
        layers += [nn.Linear(inside, outside), nn.ReLU(inplace=True), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(4096, 1000))
