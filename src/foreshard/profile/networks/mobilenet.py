"""Inverted residuals with depthwise convolutions: Sandler et al. 2018 (MobileNetV2, arXiv 1801.04381)."""

from __future__ import annotations

from torch import Tensor, nn

# expansion, channels, blocks, stride of the first
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _normed(inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outside), nn.ReLU6(inplace=True)]


class InvertedResidual(nn.Module):
    """Widen, convolve every channel by itself, narrow; the input is added where shapes agree."""

    def __init__(self, inside: int, outside: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inside * expansion
        widen = _normed(inside, wide, 1) if expansion > 1 else []
        narrow = [nn.Conv2d(wide, outside, 1, bias=False), nn.BatchNorm2d(outside)]
        self.path = nn.Sequential(*widen, *_normed(wide, wide, 3, stride, wide), *narrow)
        self.is_residual = stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; shape (samples, channels, height, width)."""
        out: Tensor = self.path(x)
        return x + out if self.is_residual else out


def mobilenet_v2() -> nn.Module:
    """Return MobileNetV2 of width 1 for images of 3 channels and 1,000 classes."""
    layers: list[nn.Module] = _normed(3, 32, 3, 2)
    inside = 32
    for expansion, outside, count, stride in _STAGES:
        for i in range(count):
            layers.append(InvertedResidual(inside, outside, stride if i == 0 else 1, expansion))
            inside = outside
    layers += _normed(inside, 1280, 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000))
