"""Branches of several kernels beside each other, without the auxiliary classifiers.

Szegedy et al. 2014 (GoogLeNet, arXiv 1409.4842, with batch norms) and 2015 (Inception v3, arXiv 1512.00567).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from foreshard.profile.networks.convolutions import classifies

Step = tuple[int, int | tuple[int, int], int]  # channels, kernel, stride; "same" padding at stride 1


def _normed(
    inside: int, outside: int, kernel: int | tuple[int, int], stride: int = 1, padding: int = -1
) -> nn.Module:
    """Return convolution, norm and ReLU; a padding below 0 keeps the size at stride 1."""
    sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    around = (sides[0] // 2, sides[1] // 2) if padding < 0 else (padding, padding)
    convolution = nn.Conv2d(inside, outside, sides, stride, around, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outside), nn.ReLU(inplace=True))


def _path(inside: int, steps: Sequence[Step]) -> nn.Sequential:
    """Return convolutions one after the other; those of stride 2 have no padding."""
    layers = []
    for outside, kernel, stride in steps:
        layers.append(_normed(inside, outside, kernel, stride, 0 if stride > 1 else -1))
        inside = outside
    return nn.Sequential(*layers)


class Branches(nn.Module):
    """Branches that read the same input; outputs are joined along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Return the joined outputs; shape (samples, channels, height, width)."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def _google_block(inside: int, sizes: tuple[int, int, int, int, int, int]) -> Branches:
    point, narrow, wide, narrow_5, wide_5, pooled = sizes
    return Branches(
        _normed(inside, point, 1),
        _path(inside, [(narrow, 1, 1), (wide, 3, 1)]),
        _path(inside, [(narrow_5, 1, 1), (wide_5, 3, 1)]),  # 3x3, as TensorFlow's and torchvision's
        nn.Sequential(nn.MaxPool2d(3, 1, 1), _normed(inside, pooled, 1)),
    )


_GOOGLE = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)


def googlenet() -> nn.Module:
    """Return GoogLeNet for images of 3 channels and 1,000 classes."""
    layers: list[nn.Module] = [_normed(3, 64, 7, 2, 3), nn.MaxPool2d(3, 2, ceil_mode=True)]
    layers += [_normed(64, 64, 1), _normed(64, 192, 3)]
    inside = 192
    for stage, blocks in enumerate(_GOOGLE):
        layers.append(nn.MaxPool2d(2 if stage == 2 else 3, 2, ceil_mode=True))
        for sizes in blocks:
            layers.append(_google_block(inside, sizes))
            inside = sizes[0] + sizes[2] + sizes[4] + sizes[5]
    return nn.Sequential(*layers, *classifies(inside, dropped=0.2))


def _pooled(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), _normed(inside, outside, 1))


def _square(inside: int, pooled: int) -> Branches:
    """5x5 and two 3x3 beside a 1x1."""
    return Branches(
        _normed(inside, 64, 1),
        _path(inside, [(48, 1, 1), (64, 5, 1)]),
        _path(inside, [(64, 1, 1), (96, 3, 1), (96, 3, 1)]),
        _pooled(inside, pooled),
    )


def _factored(inside: int, width: int) -> Branches:
    """7x7 as rows and columns."""
    row, column = (1, 7), (7, 1)
    return Branches(
        _normed(inside, 192, 1),
        _path(inside, [(width, 1, 1), (width, row, 1), (192, column, 1)]),
        _path(
            inside, [(width, 1, 1), (width, column, 1), (width, row, 1), (width, column, 1), (192, row, 1)]
        ),
        _pooled(inside, 192),
    )


def _wide(inside: int) -> Branches:
    """3x3 as a row and a column beside each other."""

    def both() -> Branches:
        return Branches(_normed(384, 384, (1, 3)), _normed(384, 384, (3, 1)))

    return Branches(
        _normed(inside, 320, 1),
        nn.Sequential(_normed(inside, 384, 1), both()),
        nn.Sequential(_path(inside, [(448, 1, 1), (384, 3, 1)]), both()),
        _pooled(inside, 192),
    )


def inception_v3() -> nn.Module:
    """Return Inception v3 for images of 3 channels and 1,000 classes."""
    stem = [_normed(3, 32, 3, 2, 0), _normed(32, 32, 3, 1, 0), _normed(32, 64, 3), nn.MaxPool2d(3, 2)]
    stem += [_normed(64, 80, 1), _normed(80, 192, 3, 1, 0), nn.MaxPool2d(3, 2)]
    halve = Branches(
        _path(288, [(384, 3, 2)]),
        _path(288, [(64, 1, 1), (96, 3, 1), (96, 3, 2)]),
        nn.MaxPool2d(3, 2),
    )
    halve_again = Branches(
        _path(768, [(192, 1, 1), (320, 3, 2)]),
        _path(768, [(192, 1, 1), (192, (1, 7), 1), (192, (7, 1), 1), (192, 3, 2)]),
        nn.MaxPool2d(3, 2),
    )
    blocks = [_square(192, 32), _square(256, 64), _square(288, 64), halve]
    blocks += [_factored(768, width) for width in (128, 160, 160, 192)]
    blocks += [halve_again, _wide(1280), _wide(2048)]
    return nn.Sequential(*stem, *blocks, *classifies(2048, dropped=0.5))
