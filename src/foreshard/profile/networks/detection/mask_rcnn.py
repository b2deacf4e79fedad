"""Mask R-CNN on a ResNet-50 with a feature pyramid: He et al. 2017 (arXiv 1703.06870), Lin et al. 2016.

Numbers of proposals and sizes are those of NVIDIA's DeepLearningExamples: a short side of 800 pixels, 512
regions an image for boxes, a quarter of them for masks. Norms of the backbone are frozen, as are its stem and
its first stage. How many regions are kept, and at which level, depends on values: here each image has as many
as are asked for, a quarter at each level. Suppression of overlapping proposals and the matching of anchors
and regions with objects are left out: short kernels, whose number depends on values, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreshard.profile.networks.detection.backbone import WIDE, FeaturePyramid, FrozenNorm, frozen_backbone

CLASSES = 81
HEIGHT, WIDTH = 800, 1088
"""COCO's images are 640 x 480 for the most part: 800 x 1,067, padded to multiples of 32."""
_CHANNELS = (256, 512, 1024, 2048)
_HIDDEN = 1024
_ANCHORS, _STRIDES = 3, (4, 8, 16, 32, 64)
_LEVELS = 4  # the finest, of which regions are pooled
_PROPOSALS, _REGIONS, _MASKED = 2_000, 512, 128  # of a level, and of an image for boxes and for masks
_BOX, _MASK, _POINTS = 7, 14, 2  # a side of what is pooled of a region, and points of a side of one of it


def _backbone() -> nn.ModuleList:
    """Return the stem with the first stage, and each of the others."""
    stages = frozen_backbone(FrozenNorm)
    blocks: list[Any] = [next(stage.children()) for stage in stages]
    for block in blocks[1:]:  # the stride is in the first convolution of a block, as first published
        first, second = block.path[0], block.path[3]
        first.stride, second.stride = second.stride, first.stride
    return stages


class _Proposals(nn.Module):
    """Whether there is an object at each anchor, and where."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Conv2d(WIDE, WIDE, 3, padding=1)
        self.objects = nn.Conv2d(WIDE, _ANCHORS, 1)
        self.places = nn.Conv2d(WIDE, 4 * _ANCHORS, 1)

    def forward(self, maps: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return scores of shape (samples, anchors) and offsets of (samples, anchors, 4), of each level."""
        scores, places = [], []
        for image in maps:
            seen = functional.relu(self.shared(image))
            scores.append(self.objects(seen).flatten(1))
            places.append(self.places(seen).unflatten(1, (_ANCHORS, 4)).permute(0, 1, 3, 4, 2).flatten(1, 3))
        return scores, places


def _regions(scores: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """Return the best regions of each image, as corners; shape (samples, 512, 4)."""
    best_scores, best = [], []
    for score, place in zip(scores, places, strict=True):
        top, which = score.sigmoid().topk(min(_PROPOSALS, score.shape[1]), 1)
        chosen = place.gather(1, which.unsqueeze(2).expand(-1, -1, 4))
        middle, half = chosen[..., :2], chosen[..., 2:].clamp(max=4.0).exp() / 2
        best_scores.append(top)
        best.append(torch.cat((middle - half, middle + half), 2).clamp(0, 1))
    which = torch.cat(best_scores, 1).topk(_REGIONS, 1)[1]
    return torch.cat(best, 1).gather(1, which.unsqueeze(2).expand(-1, -1, 4))


def _pooled(maps: Sequence[Tensor], regions: Tensor, side: int) -> Tensor:
    """Return what regions have of the maps: bilinear at points, each position the mean of four of them."""
    points = torch.linspace(-1.0, 1.0, side * _POINTS)
    found = []
    for image, own in zip(maps, regions.chunk(len(maps), 1), strict=True):
        middle, half = (own[..., 2:] + own[..., :2]) / 2, (own[..., 2:] - own[..., :2]) / 2
        along = middle[..., None, :] + half[..., None, :] * points[:, None]
        x = along[..., None, :, 0].expand(-1, -1, len(points), -1)
        y = along[..., :, None, 1].expand(-1, -1, -1, len(points))
        grid = torch.stack((x, y), -1).flatten(1, 2).to(image.dtype)
        sampled = functional.grid_sample(image, grid, align_corners=False)
        parts = functional.avg_pool2d(sampled, _POINTS).unflatten(2, (own.shape[1], side))
        found.append(parts.transpose(1, 2).flatten(0, 1))
    return torch.cat(found)


class MaskRCNN(nn.Module):
    """Proposes regions, and finds class, place and mask of the object in each."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.backbone, self.pyramid, self.proposals = _backbone(), FeaturePyramid(_CHANNELS), _Proposals()
        self.box = nn.Sequential(
            nn.Linear(WIDE * _BOX**2, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _HIDDEN), nn.ReLU()
        )
        self.classes = nn.Linear(_HIDDEN, classes)
        self.places = nn.Linear(_HIDDEN, 4 * classes)
        convolutions = [(nn.Conv2d(WIDE, WIDE, 3, padding=1), nn.ReLU()) for _ in range(4)]
        self.mask = nn.Sequential(
            *(layer for pair in convolutions for layer in pair),
            nn.ConvTranspose2d(WIDE, WIDE, 2, 2),
            nn.ReLU(),
            nn.Conv2d(WIDE, classes, 1),
        )

    def forward(
        self,
        images: Tensor,
        anchors: tuple[Tensor, Tensor],
        labels: Tensor,
        offsets: Tensor,
        masks: Tensor,
    ) -> Tensor:
        """Return the sum of the losses.

        Parameters
        ----------
        images : tensor of shape (samples, 3, height, width)
        anchors : pair of tensors, shapes (samples, anchors) and (samples, anchors, 4)
            Whether each anchor is at an object, and from it to that.
        labels : tensor of int, shape (samples, 512)
            Classes of the regions.
        offsets : tensor of shape (samples, 512, 4)
        masks : tensor of shape (samples, 128, 28, 28)
        """
        maps = [self.backbone[0](images)]
        for stage in list(self.backbone)[1:]:
            maps.append(stage(maps[-1]))
        pyramid = self.pyramid(maps)
        pyramid.append(functional.max_pool2d(pyramid[-1], 1, 2))
        scores, places = self.proposals(pyramid)
        loss = functional.binary_cross_entropy_with_logits(torch.cat(scores, 1).float(), anchors[0])
        loss = loss + functional.smooth_l1_loss(torch.cat(places, 1).float(), anchors[1])
        with torch.no_grad():
            regions = _regions(scores, places)
        finest = pyramid[:_LEVELS]
        seen = self.box(_pooled(finest, regions, _BOX).flatten(1))
        classes = labels.flatten()
        loss = loss + functional.cross_entropy(self.classes(seen).float(), classes)
        own = classes[:, None, None].expand(-1, 1, 4)
        place = self.places(seen).float().unflatten(1, (-1, 4)).gather(1, own).squeeze(1)
        loss = loss + functional.smooth_l1_loss(place, offsets.flatten(0, 1))
        drawn = self.mask(_pooled(finest, regions[:, :_MASKED], _MASK)).float()
        own = labels[:, :_MASKED].flatten()[:, None, None, None].expand(-1, 1, *drawn.shape[2:])
        drawn = drawn.gather(1, own).squeeze(1)
        return loss + functional.binary_cross_entropy_with_logits(drawn, masks.flatten(0, 1))


def mask_rcnn(height: int = HEIGHT, width: int = WIDTH) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return Mask R-CNN and one example."""
    count = _ANCHORS * sum(-(-height // stride) * -(-width // stride) for stride in _STRIDES)
    anchors = (torch.empty(1, count), torch.empty(1, count, 4))
    labels, offsets = torch.zeros(1, _REGIONS).long(), torch.empty(1, _REGIONS, 4)
    masks = torch.empty(1, _MASKED, 2 * _MASK, 2 * _MASK)
    return MaskRCNN(), (torch.empty(1, 3, height, width), anchors, labels, offsets, masks)
