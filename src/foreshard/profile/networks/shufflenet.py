"""Split, convolve one half, shuffle channels: Ma et al. 2018 (ShuffleNet V2, arXiv 1807.11164)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from foreshard.profile.networks.convolutions import classifies, with_norm


class Shuffled(nn.Module):
    """One half of the channels passes three convolutions, or all do at stride 2, beside a short path."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.halves, half = stride == 1, outside // 2
        read = inside // 2 if self.halves else inside
        self.short = nn.Sequential()
        if not self.halves:
            spread = with_norm(inside, inside, 3, 2, inside)
            self.short = nn.Sequential(*spread, *with_norm(inside, half, 1, activation="relu"))
        self.path = nn.Sequential(
            *with_norm(read, half, 1, activation="relu"),
            *with_norm(half, half, 3, stride, half),
            *with_norm(half, half, 1, activation="relu"),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return both halves with their channels interleaved."""
        kept, read = x.chunk(2, dim=1) if self.halves else (x, x)
        return (
            torch.cat([self.short(kept), self.path(read)], 1)
            .unflatten(1, (2, -1))
            .transpose(1, 2)
            .flatten(1, 2)
        )


def shufflenet(widths: Sequence[int]) -> nn.Module:
    """Return a ShuffleNet V2 of these widths (stages, then the last convolution) for 1,000 classes."""
    layers: list[nn.Module] = [*with_norm(3, 24, 3, 2, activation="relu"), nn.MaxPool2d(3, 2, 1)]
    inside = 24
    for outside, count in zip(widths, (4, 8, 4), strict=False):
        for i in range(count):
            layers.append(Shuffled(inside, outside, 2 if i == 0 else 1))
            inside = outside
    layers += with_norm(inside, widths[-1], 1, activation="relu")
    return nn.Sequential(*layers, *classifies(widths[-1]))
