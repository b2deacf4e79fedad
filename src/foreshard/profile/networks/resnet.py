"""Residual networks: He et al. 2015 (arXiv 1512.03385), with the stride in the 3x3 convolution (v1.5).

Grouped ones: Xie et al. 2016 (ResNeXt, arXiv 1611.05431). Wide ones: Zagoruyko, Komodakis 2016.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from foreshard.profile.networks.convolutions import classifies, with_norm

_STAGES = (64, 128, 256, 512)


class Residual(nn.Module):
    """A path of convolutions beside a shortcut; the sum passes a ReLU."""

    def __init__(self, path: Sequence[nn.Module], inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(*path)
        same = stride == 1 and inside == outside
        self.shortcut = nn.Identity() if same else nn.Sequential(*with_norm(inside, outside, 1, stride))
        self.out = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; shape (samples, channels, height, width)."""
        out: Tensor = self.out(self.path(x) + self.shortcut(x))
        return out


def _basic(inside: int, width: int, stride: int) -> Residual:
    path = [*with_norm(inside, width, 3, stride, activation="relu"), *with_norm(width, width, 3)]
    return Residual(path, inside, width, stride)


def _bottleneck(inside: int, width: int, stride: int, groups: int, group_width: int) -> Residual:
    middle = width * group_width // 64 * groups
    path = [
        *with_norm(inside, middle, 1, activation="relu"),
        *with_norm(middle, middle, 3, stride, groups, "relu"),
        *with_norm(middle, 4 * width, 1),
    ]
    return Residual(path, inside, 4 * width, stride)


def resnet(
    counts: Sequence[int], *, basic: bool = False, groups: int = 1, group_width: int = 64
) -> nn.Module:
    """Return a residual network for images of 3 channels and 1,000 classes.

    Parameters
    ----------
    counts : sequence of int
        Blocks of each of the four stages.
    basic : bool
        Blocks of two 3x3 convolutions rather than bottlenecks.
    groups, group_width : int
        Of the 3x3 convolution of a bottleneck, the width that of a group in the first stage.
    """
    stem = [*with_norm(3, 64, 7, 2, activation="relu"), nn.MaxPool2d(3, 2, 1)]
    blocks: list[nn.Module] = []
    inside = 64
    for stage, (width, count) in enumerate(zip(_STAGES, counts, strict=True)):
        for i in range(count):
            stride = 2 if stage > 0 and i == 0 else 1
            if basic:
                blocks.append(_basic(inside, width, stride))
                inside = width
            else:
                blocks.append(_bottleneck(inside, width, stride, groups, group_width))
                inside = 4 * width
    return nn.Sequential(*stem, *blocks, *classifies(inside))
