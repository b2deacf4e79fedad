"""EfficientDet: Tan, Pang, Le 2020 (arXiv 1911.09070), D0 in the shapes of NVIDIA's DeepLearningExamples.

Those are images of COCO at 512 x 512 and 90 classes. Maps of five resolutions are mixed top-down and
bottom-up three times (BiFPN), with learned weights; heads share convolutions among resolutions, but not
norms. Matching of anchors with objects depends on values and is left out. The focal loss runs there as one
kernel (Apex); a logarithm of the sigmoid, which reads and writes as much, stands in for it.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreshard.profile.networks.mobilenet import efficientnet_stages

SIDE, CLASSES, WIDE = 512, 90, 64
_MIXED, _DEEP, _ANCHORS = 3, 3, 9
_STRIDES = (8, 16, 32, 64, 128)
_TAKEN = ((3, 40), (5, 112), (7, 320))
"""Stages of EfficientNet-B0 whose maps are taken, the stem counted, and their channels."""
_HUBER = 0.1
_NODES = ((3, 4), (2, 5), (1, 6), (0, 7), (1, 7, 8), (2, 6, 9), (3, 5, 10), (4, 11))
_LEVELS = (3, 2, 1, 0, 1, 2, 3, 4)
"""Maps that each node of BiFPN adds, of the five it is given and those of the nodes before, and its
resolution: down from the coarsest to the finest, then up again (figure 2 d of the paper)."""
_EPSILON = 1e-4


def _separable(inside: int, outside: int, *, bias: bool = False) -> nn.Sequential:
    each = nn.Conv2d(inside, inside, 3, padding=1, groups=inside, bias=False)
    return nn.Sequential(each, nn.Conv2d(inside, outside, 1, bias=bias))


class _Resampled(nn.Sequential):
    """A map at the channels of the pyramid, and finer or coarser by powers of two."""

    def __init__(self, inside: int, steps: int) -> None:
        layers: list[nn.Module] = []
        if inside != WIDE:
            layers += [nn.Conv2d(inside, WIDE, 1, bias=False), nn.BatchNorm2d(WIDE)]
        layers += [nn.MaxPool2d(3, 2, 1) for _ in range(steps)]
        layers += [nn.UpsamplingNearest2d(scale_factor=2) for _ in range(-steps)]
        super().__init__(*layers)


class _Node(nn.Module):
    """A weighted sum of maps, then a separable convolution."""

    def __init__(self, given: list[tuple[int, int]]) -> None:
        super().__init__()
        self.resampled = nn.ModuleList(_Resampled(inside, steps) for inside, steps in given)
        self.weights = nn.Parameter(torch.ones(len(given)))
        self.after = nn.Sequential(nn.SiLU(inplace=True), _separable(WIDE, WIDE), nn.BatchNorm2d(WIDE))

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Return the node's map."""
        weights = functional.relu(self.weights)
        whole = weights.sum() + _EPSILON
        parts = [
            layer(image) * weights[i] / whole
            for i, (layer, image) in enumerate(zip(self.resampled, maps, strict=True))
        ]
        mixed: Tensor = self.after(torch.stack(parts, -1).sum(-1))
        return mixed


class _Mixing(nn.Module):
    """One BiFPN layer."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        known = [*channels, *(WIDE for _ in _NODES)]
        levels = [*range(len(channels)), *_LEVELS]
        self.nodes = nn.ModuleList(
            _Node([(known[i], level - levels[i]) for i in taken])
            for taken, level in zip(_NODES, _LEVELS, strict=True)
        )

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return the maps of all resolutions, mixed; the finest first."""
        maps = list(maps)
        for node, taken in zip(self.nodes, _NODES, strict=True):
            maps.append(node([maps[i] for i in taken]))
        return maps[-len(_STRIDES) :]


class _Head(nn.Module):
    """What is said of each anchor, by convolutions that all resolutions share."""

    def __init__(self, outside: int) -> None:
        super().__init__()
        self.deep = nn.ModuleList(_separable(WIDE, WIDE) for _ in range(_DEEP))
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDE) for _ in range(_DEEP * len(_STRIDES)))
        self.said = _separable(WIDE, _ANCHORS * outside, bias=True)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return numbers at each position of each map, with the channels last."""
        found = []
        for level, image in enumerate(maps):
            for i, layer in enumerate(self.deep):
                norm = self.norms[i * len(_STRIDES) + level]
                image = functional.silu(norm(layer(image)), inplace=True)
            found.append(self.said(image).permute(0, 2, 3, 1))
        return found


class EfficientDet(nn.Module):
    """Classes and places of boxes at five resolutions, on an EfficientNet-B0."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        stages = efficientnet_stages()
        ends = [0, *(stage + 1 for stage, _ in _TAKEN)]
        self.backbone = nn.ModuleList(nn.Sequential(*stages[a:b]) for a, b in pairwise(ends))
        channels = tuple(count for _, count in _TAKEN)
        self.coarser = nn.ModuleList((_Resampled(channels[-1], 1), _Resampled(WIDE, 1)))
        self.mixing = nn.ModuleList(
            _Mixing((*channels, WIDE, WIDE) if i == 0 else (WIDE,) * len(_STRIDES)) for i in range(_MIXED)
        )
        self.classes, self.places = _Head(classes), _Head(4)

    def forward(self, images: Tensor, offsets: Tensor) -> Tensor:
        """Return the sum of the losses of classes and of places.

        Parameters
        ----------
        images : tensor of shape (samples, 3, height, width)
        offsets : tensor of shape (samples, anchors, 4)
            From each anchor to its object.
        """
        maps = []
        for stage in (*self.backbone, *self.coarser):
            images = stage(images)
            maps.append(images)
        for layer in self.mixing:
            maps = layer(maps)
        scores = [-functional.logsigmoid(made).sum() for made in self.classes(maps)]
        places = torch.cat([made.reshape(len(made), -1, 4) for made in self.places(maps)], 1).float()
        return torch.stack(scores).sum() + functional.huber_loss(places, offsets, delta=_HUBER)


def efficientdet_d0(side: int = SIDE, classes: int = CLASSES) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return EfficientDet-D0, one image and the offsets of its anchors."""
    count = _ANCHORS * sum((-(-side // stride)) ** 2 for stride in _STRIDES)
    return EfficientDet(classes), (torch.empty(1, 3, side, side), torch.zeros(1, count, 4))
