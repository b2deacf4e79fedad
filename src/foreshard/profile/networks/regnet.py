"""Residual networks whose widths grow by one rule: Radosavovic et al. 2020 (RegNet, arXiv 2003.13678)."""

from __future__ import annotations

import math
from collections import Counter

from torch import Tensor, nn

from foreshard.profile.networks.convolutions import Squeezed, activated, classifies, with_norm


class Grouped(nn.Module):
    """Bottleneck without a bottleneck: 1x1, grouped 3x3, a squeeze in RegNetY, 1x1, beside a shortcut."""

    def __init__(self, inside: int, width: int, stride: int, group_width: int, squeezed: bool) -> None:
        super().__init__()
        squeeze = [Squeezed(width, round(0.25 * inside), "relu", nn.Sigmoid())] if squeezed else []
        self.path = nn.Sequential(
            *with_norm(inside, width, 1, activation="relu"),
            *with_norm(width, width, 3, stride, width // group_width, "relu"),
            *squeeze,
            *with_norm(width, width, 1),
        )
        same = stride == 1 and inside == width
        self.shortcut = nn.Identity() if same else nn.Sequential(*with_norm(inside, width, 1, stride))
        self.out = activated("relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; shape (samples, channels, height, width)."""
        out: Tensor = self.out(self.path(x) + self.shortcut(x))
        return out


def _widths(depth: int, first: int, slope: float, step: float, group_width: int) -> dict[int, int]:
    """Return the blocks of each width: steps of a ratio near a line, multiples of 8 and of the group."""
    counts: Counter[int] = Counter()
    for block in range(depth):
        power = round(math.log((first + slope * block) / first) / math.log(step))
        counts[round(first * step**power / 8) * 8] += 1
    whole: Counter[int] = Counter()
    for width, count in counts.items():
        group = min(group_width, width)
        rounded = max(group, int(width + group / 2) // group * group)
        whole[rounded + group * (rounded < 0.9 * width)] += count
    return dict(whole)


def regnet(
    depth: int, first: int, slope: float, step: float, group_width: int, *, squeezed: bool = False
) -> nn.Module:
    """Return a RegNetX, with `squeezed` a RegNetY, for images of 3 channels and 1,000 classes."""
    layers: list[nn.Module] = with_norm(3, 32, 3, 2, activation="relu")
    inside = 32
    for width, count in _widths(depth, first, slope, step, group_width).items():
        for i in range(count):
            layers.append(Grouped(inside, width, 2 if i == 0 else 1, min(group_width, width), squeezed))
            inside = width
    return nn.Sequential(*layers, *classifies(inside))
