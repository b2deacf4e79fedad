"""SSD300 on a ResNet-50: Liu et al. 2015 (arXiv 1512.02325) with the backbone of Huang et al. 2016.

The shapes are those of NVIDIA's DeepLearningExamples, which Lambda's benchmark runs: images of 300 pixels,
the stem and three stages of the backbone (the last without a stride), 81 classes, 8,732 boxes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreshard.profile.networks.resnet import resnet

CLASSES = 81
_BOXES = (4, 6, 6, 6, 4, 4)  # at a position of each of the six maps
_CHANNELS = (1024, 512, 512, 256, 256, 256)
_NARROW = (256, 256, 128, 128, 128)
_STRIDED = 3  # maps made with a stride; those after them lose their border
_STAGES = (3, 4, 6)
_NEGATIVES = 3  # boxes of the background for each of an object


def _backbone() -> nn.Sequential:
    """Return the stem and three stages of a ResNet-50, the last at the resolution of the one before."""
    whole = list(resnet((*_STAGES, 3)).children())
    kept = nn.Sequential(*whole[: 4 + sum(_STAGES)])
    last: Any = kept[4 + sum(_STAGES[:-1])]
    for convolution in (last.path[3], last.shortcut[0]):
        convolution.stride = (1, 1)
    return kept


def _smaller(inside: int, narrow: int, outside: int, *, strided: bool) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, narrow, 1, bias=False),
        nn.BatchNorm2d(narrow),
        nn.ReLU(inplace=True),
        nn.Conv2d(narrow, outside, 3, stride=1 + strided, padding=int(strided), bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


class SSD(nn.Module):
    """Classes and places of boxes at six resolutions, and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = _backbone()
        self.smaller = nn.ModuleList(
            _smaller(inside, narrow, outside, strided=i < _STRIDED)
            for i, (inside, narrow, outside) in enumerate(
                zip(_CHANNELS[:-1], _NARROW, _CHANNELS[1:], strict=True)
            )
        )
        heads = list(zip(_CHANNELS, _BOXES, strict=True))
        self.places = nn.ModuleList(nn.Conv2d(inside, 4 * count, 3, padding=1) for inside, count in heads)
        self.classes = nn.ModuleList(
            nn.Conv2d(inside, CLASSES * count, 3, padding=1) for inside, count in heads
        )

    def forward(self, images: Tensor, offsets: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of images.

        Parameters
        ----------
        images : tensor of shape (samples, 3, 300, 300)
        offsets : tensor of shape (samples, 4, 8732)
            From each box to the object that it is to find.
        labels : tensor of int, shape (samples, 8732)
            Class of that object, 0 for none.
        """
        maps = [self.backbone(images)]
        for smaller in self.smaller:
            maps.append(smaller(maps[-1]))
        places = [
            head(image).reshape(len(images), 4, -1) for head, image in zip(self.places, maps, strict=True)
        ]
        classes = [
            head(image).reshape(len(images), CLASSES, -1)
            for head, image in zip(self.classes, maps, strict=True)
        ]
        return _loss(torch.cat(places, 2).float(), torch.cat(classes, 2).float(), offsets, labels)


def _loss(places: Tensor, classes: Tensor, offsets: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of the boxes of objects and of the hardest ones of the background."""
    found = labels > 0
    count = found.sum(1)
    apart = functional.smooth_l1_loss(places, offsets.float(), reduction="none").sum(1)
    wrong = functional.cross_entropy(classes, labels, reduction="none")
    order = torch.where(found, 0.0, wrong).sort(1, descending=True)[1]
    hard = order.sort(1)[1] < (_NEGATIVES * count).unsqueeze(1)
    each = (apart * found).sum(1) + (wrong * (found.float() + hard)).sum(1)
    return (each / count.clamp(min=1)).mean()


def ssd300() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return SSD300 and one example."""
    boxes = 8732
    return SSD(), (torch.empty(1, 3, 300, 300), torch.empty(1, 4, boxes), torch.zeros(1, boxes).long())
