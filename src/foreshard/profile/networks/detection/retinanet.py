"""RetinaNet: Lin et al. 2017 (arXiv 1708.02002), on a ResNeXt-50 (32 x 4d) in the shapes of MLPerf Training.

Those are images of OpenImages at 800 x 800 and 264 classes. Norms of the backbone are frozen and folded, its
stem and its first stage are frozen. The matching of anchors with objects depends on values and is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreshard.profile.networks.detection.backbone import WIDE, FeaturePyramid, FoldedNorm, frozen_backbone

SIDE, CLASSES = 800, 264
_CHANNELS = (512, 1024, 2048)
"""Of the last three stages, of which maps are made."""
_ANCHORS, _DEEP = 9, 4
_STRIDES = (8, 16, 32, 64, 128)
_ALPHA, _GAMMA = 0.25, 2.0  # of the focal loss


def _head(outside: int) -> nn.Sequential:
    pairs = [(nn.Conv2d(WIDE, WIDE, 3, padding=1), nn.ReLU(inplace=True)) for _ in range(_DEEP)]
    return nn.Sequential(
        *(layer for pair in pairs for layer in pair), nn.Conv2d(WIDE, _ANCHORS * outside, 3, padding=1)
    )


class RetinaNet(nn.Module):
    """Classes and places of boxes at five resolutions, by one head for each of the two."""

    def __init__(self, classes: int, **backbone: Any) -> None:
        super().__init__()
        self.backbone, self.pyramid = frozen_backbone(FoldedNorm, **backbone), FeaturePyramid(_CHANNELS)
        self.coarser = nn.ModuleList(nn.Conv2d(WIDE, WIDE, 3, 2, 1) for _ in range(2))
        self.classes, self.places = _head(classes), _head(4)

    def forward(self, images: Tensor, objects: Tensor, offsets: Tensor) -> Tensor:
        """Return the sum of the focal loss of classes and of the loss of places.

        Parameters
        ----------
        images : tensor of shape (samples, 3, height, width)
        objects : tensor of shape (samples, anchors, classes)
            Whether the object at an anchor is of a class.
        offsets : tensor of shape (samples, anchors, 4)
            From each anchor to its object.
        """
        maps = []
        for stage in self.backbone:
            images = stage(images)
            maps.append(images)
        pyramid = self.pyramid(maps[1:])
        pyramid.append(self.coarser[0](pyramid[-1]))
        pyramid.append(self.coarser[1](functional.relu(pyramid[-1])))
        classes = torch.cat([_by_anchor(self.classes(image)) for image in pyramid], 1).float()
        places = torch.cat([_by_anchor(self.places(image)) for image in pyramid], 1).float()
        at_objects = objects.amax(2)
        count = at_objects.sum().clamp(min=1)
        apart = (functional.l1_loss(places, offsets, reduction="none").sum(2) * at_objects).sum()
        return (_focal_loss(classes, objects) + apart) / count


def _by_anchor(made: Tensor) -> Tensor:
    """Return what a head makes of a map, with shape (samples, anchors, numbers)."""
    return made.unflatten(1, (_ANCHORS, -1)).permute(0, 3, 4, 1, 2).flatten(1, 3)


def _focal_loss(scores: Tensor, objects: Tensor) -> Tensor:
    """Return the cross-entropy of each class, weighted by how wrong it is, as a sum."""
    likely = scores.sigmoid()
    wrong = functional.binary_cross_entropy_with_logits(scores, objects, reduction="none")
    off = likely + objects - 2 * likely * objects
    weight = _ALPHA * objects + (1 - _ALPHA) * (1 - objects)
    return (weight * wrong * off**_GAMMA).sum()


def retinanet(
    side: int = SIDE, classes: int = CLASSES, *, groups: int = 32, group_width: int = 4
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return RetinaNet and one example; `groups` and `group_width` are of the backbone."""
    count = _ANCHORS * sum((-(-side // stride)) ** 2 for stride in _STRIDES)
    module = RetinaNet(classes, groups=groups, group_width=group_width)
    return module, (torch.empty(1, 3, side, side), torch.zeros(1, count, classes), torch.zeros(1, count, 4))
