"""3D U-Net: Çiçek et al. 2016 (arXiv 1606.06650), in the shapes of MLPerf Training.

Those are of nnU-Net (Isensee et al. 2018, arXiv 1809.10486): pieces of 128 x 128 x 128 of scans of KiTS19,
three classes, instance norms, strided convolutions in place of pooling, six resolutions of 32 to 320
channels.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

SIDE, CLASSES = 128, 3
_CHANNELS = (32, 64, 128, 256, 320, 320)
"""Of each resolution, the finest first."""


def _convolution(inside: int, outside: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv3d(inside, outside, 3, stride, 1, bias=False)
    return [convolution, nn.InstanceNorm3d(outside, affine=True), nn.ReLU(inplace=True)]


def _two(inside: int, outside: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(*_convolution(inside, outside, stride), *_convolution(outside, outside))


class _Finer(nn.Module):
    """Twice the resolution, joined with what the way down made at it."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(inside, outside, 2, 2)
        self.joined = _two(2 * outside, outside)

    def forward(self, coarse: Tensor, fine: Tensor) -> Tensor:
        """Return a map of the shape of `fine`."""
        out: Tensor = self.joined(torch.cat((self.up(coarse), fine), 1))
        return out


class UNet3D(nn.Module):
    """Classes of all positions of a volume, and their loss: cross-entropy and overlap."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [_two(1, _CHANNELS[0]), *(_two(inside, outside, 2) for inside, outside in pairwise(_CHANNELS))]
        )
        self.up = nn.ModuleList(_Finer(inside, outside) for inside, outside in pairwise(_CHANNELS[::-1]))
        self.classes = nn.Conv3d(_CHANNELS[0], classes, 1)

    def forward(self, volumes: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of volumes.

        Parameters
        ----------
        volumes : tensor of shape (samples, 1, depth, height, width)
        labels : tensor of int, shape (samples, depth, height, width)
        """
        maps = [volumes]
        for down in self.down:
            maps.append(down(maps[-1]))
        made = maps.pop()
        for up in self.up:
            made = up(made, maps.pop())
        return _loss(self.classes(made).float(), labels)


def _loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of the cross-entropy and of what classes but the first do not overlap (Dice)."""
    wrong = functional.cross_entropy(scores, labels)
    likely = scores.softmax(1)[:, 1:]
    right = functional.one_hot(labels, scores.shape[1]).movedim(-1, 1)[:, 1:].float()
    places = (2, 3, 4)
    overlap = 2 * (likely * right).sum(places) / (likely.sum(places) + right.sum(places)).clamp(min=1e-6)
    return (wrong + 1 - overlap.mean()) / 2


def unet3d(side: int = SIDE) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the network and one piece of a scan of `side` positions along each side, a multiple of 64."""
    labels = torch.zeros(1, side, side, side, dtype=torch.long)
    return UNet3D(), (torch.empty(1, 1, side, side, side), labels)
