"""Inverted residuals with depthwise convolutions: MobileNetV2 and V3, MnasNet, EfficientNet and its V2.

Sandler et al. 2018 (arXiv 1801.04381), Howard et al. 2019 (arXiv 1905.02244), Tan et al. 2018 (arXiv
1807.11626), Tan, Le 2019 (arXiv 1905.11946) and 2021 (arXiv 2104.00298). Layers that drop whole paths at
random are left out: they skip no work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

Activation = Callable[[], nn.Module]


def _relu6() -> nn.Module:
    return nn.ReLU6(inplace=True)


def relu() -> nn.Module:
    """Return a ReLU in place."""
    return nn.ReLU(inplace=True)


def _hardswish() -> nn.Module:
    return nn.Hardswish(inplace=True)


def silu() -> nn.Module:
    """Return a SiLU (swish) in place."""
    return nn.SiLU(inplace=True)


def with_norm(
    inside: int,
    outside: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    activation: Activation | None = None,
) -> list[nn.Module]:
    """Return a convolution that keeps the side but for its stride, its norm, and what follows."""
    convolution = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outside), *([activation()] if activation else [])]


class Squeezed(nn.Module):
    """Channels scaled by what their means say (squeeze and excitation, arXiv 1709.01507)."""

    def __init__(self, channels: int, narrow: int, activation: Activation, gate: nn.Module) -> None:
        super().__init__()
        squeeze, widen = nn.Conv2d(channels, narrow, 1), nn.Conv2d(narrow, channels, 1)
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), squeeze, activation(), widen, gate)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled channels."""
        scaled: Tensor = x * self.scale(x)
        return scaled


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one inverted residual."""

    inside: int
    wide: int
    outside: int
    kernel: int = 3
    stride: int = 1
    narrow: int = 0  # channels of the squeeze; 0: none
    fused: bool = False  # one full convolution widens; no depthwise one


class InvertedResidual(nn.Module):
    """Widen, convolve every channel by itself, narrow; the input is added where shapes agree."""

    def __init__(
        self, shape: Shape, activation: Activation, squeeze: Activation, gate: type[nn.Module]
    ) -> None:
        super().__init__()
        s = shape
        if s.fused and s.wide == s.inside:
            path = with_norm(s.inside, s.outside, s.kernel, s.stride, activation=activation)
        elif s.fused:
            path = with_norm(s.inside, s.wide, s.kernel, s.stride, activation=activation)
            path += [Squeezed(s.wide, s.narrow, squeeze, gate())] if s.narrow else []
            path += with_norm(s.wide, s.outside, 1)
        else:
            widen = with_norm(s.inside, s.wide, 1, activation=activation) if s.wide != s.inside else []
            path = [*widen, *with_norm(s.wide, s.wide, s.kernel, s.stride, s.wide, activation)]
            path += [Squeezed(s.wide, s.narrow, squeeze, gate())] if s.narrow else []
            path += with_norm(s.wide, s.outside, 1)
        self.path = nn.Sequential(*path)
        self.is_residual = s.stride == 1 and s.inside == s.outside

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; shape (samples, channels, height, width)."""
        out: Tensor = self.path(x)
        return x + out if self.is_residual else out


# expansion, channels, blocks, stride of the first, kernel
_V2 = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 32, 3, 2, 3),
    (6, 64, 4, 2, 3),
    (6, 96, 3, 1, 3),
    (6, 160, 3, 2, 3),
    (6, 320, 1, 1, 3),
)
_MNAS = (
    (1, 16, 1, 1, 3),
    (3, 24, 3, 2, 3),
    (3, 40, 3, 2, 5),
    (6, 80, 3, 2, 5),
    (6, 96, 2, 1, 3),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


def _stages(
    stages: Sequence[tuple[int, int, int, int, int]], inside: int, activation: Activation
) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for expansion, outside, count, stride, kernel in stages:
        for i in range(count):
            shape = Shape(
                inside=inside,
                wide=inside * expansion,
                outside=outside,
                kernel=kernel,
                stride=stride if i == 0 else 1,
            )
            layers.append(InvertedResidual(shape, activation, relu, nn.Sigmoid))
            inside = outside
    return layers


def mobilenet_v2() -> nn.Module:
    """Return MobileNetV2 of width 1 for images of 3 channels and 1,000 classes."""
    layers = [*with_norm(3, 32, 3, 2, activation=_relu6), *_stages(_V2, 32, _relu6)]
    layers += with_norm(320, 1280, 1, activation=_relu6)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000))


def mnasnet() -> nn.Module:
    """Return MnasNet-B1 of width 1 for images of 3 channels and 1,000 classes."""
    layers = [*with_norm(3, 32, 3, 2, activation=relu), *_stages(_MNAS, 32, relu)]
    layers += with_norm(320, 1280, 1, activation=relu)
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, 1000)
    )


# inside, kernel, wide, outside, squeezed, hard swish, stride
_LARGE = (
    (16, 3, 16, 16, False, False, 1),
    (16, 3, 64, 24, False, False, 2),
    (24, 3, 72, 24, False, False, 1),
    (24, 5, 72, 40, True, False, 2),
    (40, 5, 120, 40, True, False, 1),
    (40, 5, 120, 40, True, False, 1),
    (40, 3, 240, 80, False, True, 2),
    (80, 3, 200, 80, False, True, 1),
    (80, 3, 184, 80, False, True, 1),
    (80, 3, 184, 80, False, True, 1),
    (80, 3, 480, 112, True, True, 1),
    (112, 3, 672, 112, True, True, 1),
    (112, 5, 672, 160, True, True, 2),
    (160, 5, 960, 160, True, True, 1),
    (160, 5, 960, 160, True, True, 1),
)
_SMALL = (
    (16, 3, 16, 16, True, False, 2),
    (16, 3, 72, 24, False, False, 2),
    (24, 3, 88, 24, False, False, 1),
    (24, 5, 96, 40, True, True, 2),
    (40, 5, 240, 40, True, True, 1),
    (40, 5, 240, 40, True, True, 1),
    (40, 5, 120, 48, True, True, 1),
    (48, 5, 144, 48, True, True, 1),
    (48, 5, 288, 96, True, True, 2),
    (96, 5, 576, 96, True, True, 1),
    (96, 5, 576, 96, True, True, 1),
)


def _divisible(width: float, by: int = 8) -> int:
    """Return the width rounded to a multiple of 8, by not more than a tenth down."""
    rounded = max(by, int(width + by / 2) // by * by)
    return rounded + by * (rounded < 0.9 * width)


def mobilenet_v3(*, large: bool) -> nn.Module:
    """Return MobileNetV3 of width 1 for images of 3 channels and 1,000 classes."""
    layers: list[nn.Module] = with_norm(3, 16, 3, 2, activation=_hardswish)
    for inside, kernel, wide, outside, squeezed, hard, stride in _LARGE if large else _SMALL:
        shape = Shape(
            inside=inside,
            wide=wide,
            outside=outside,
            kernel=kernel,
            stride=stride,
            narrow=_divisible(wide / 4) if squeezed else 0,
        )
        layers.append(InvertedResidual(shape, _hardswish if hard else relu, relu, nn.Hardsigmoid))
    last, hidden = 6 * outside, 1280 if large else 1024
    layers += [*with_norm(outside, last, 1, activation=_hardswish), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(
        *layers, nn.Linear(last, hidden), _hardswish(), nn.Dropout(0.2), nn.Linear(hidden, 1000)
    )


# expansion, kernel, stride, inside, outside, blocks, fused
EfficientStage = tuple[int, int, int, int, int, int, bool]
_EFFICIENT: tuple[EfficientStage, ...] = (
    (1, 3, 1, 32, 16, 1, False),
    (6, 3, 2, 16, 24, 2, False),
    (6, 5, 2, 24, 40, 2, False),
    (6, 3, 2, 40, 80, 3, False),
    (6, 5, 1, 80, 112, 3, False),
    (6, 5, 2, 112, 192, 4, False),
    (6, 3, 1, 192, 320, 1, False),
)
_EFFICIENT_V2: dict[str, tuple[EfficientStage, ...]] = {
    "s": (
        (1, 3, 1, 24, 24, 2, True),
        (4, 3, 2, 24, 48, 4, True),
        (4, 3, 2, 48, 64, 4, True),
        (4, 3, 2, 64, 128, 6, False),
        (6, 3, 1, 128, 160, 9, False),
        (6, 3, 2, 160, 256, 15, False),
    ),
    "m": (
        (1, 3, 1, 24, 24, 3, True),
        (4, 3, 2, 24, 48, 5, True),
        (4, 3, 2, 48, 80, 5, True),
        (4, 3, 2, 80, 160, 7, False),
        (6, 3, 1, 160, 176, 14, False),
        (6, 3, 2, 176, 304, 18, False),
        (6, 3, 1, 304, 512, 5, False),
    ),
    "l": (
        (1, 3, 1, 32, 32, 4, True),
        (4, 3, 2, 32, 64, 7, True),
        (4, 3, 2, 64, 96, 7, True),
        (4, 3, 2, 96, 192, 10, False),
        (6, 3, 1, 192, 224, 19, False),
        (6, 3, 2, 224, 384, 25, False),
        (6, 3, 1, 384, 640, 7, False),
    ),
}


def efficientnet(*, width: float = 1.0, depth: float = 1.0, wide_squeeze: bool = False) -> nn.Module:
    """Return an EfficientNet, B0 scaled in width and depth, for 1,000 classes.

    A wide squeeze has a quarter of the widened channels in place of those of the block's input ("widese" of
    NVIDIA's DeepLearningExamples).
    """
    stages = [
        (expansion, kernel, stride, _divisible(inside * width), _divisible(outside * width), blocks, fused)
        for expansion, kernel, stride, inside, outside, count, fused in _EFFICIENT
        for blocks in (math.ceil(count * depth),)
    ]
    return _efficient(stages, 4 * stages[-1][4], wide_squeeze=wide_squeeze)


def efficientnet_v2(size: str) -> nn.Module:
    """Return an EfficientNetV2 (s, m or l) for 1,000 classes."""
    return _efficient(_EFFICIENT_V2[size], 1280)


def efficientnet_stages() -> list[nn.Sequential]:
    """Return the stem of EfficientNet-B0 and its stages, without what classifies."""
    return _efficient_stages(_EFFICIENT)


def _efficient_stages(stages: Sequence[EfficientStage], *, wide_squeeze: bool = False) -> list[nn.Sequential]:
    made = [nn.Sequential(*with_norm(3, stages[0][3], 3, 2, activation=silu))]
    for expansion, kernel, stride, first, outside, count, fused in stages:
        layers: list[nn.Module] = []
        for i in range(count):
            inside = first if i == 0 else outside
            wide = _divisible(inside * expansion)
            shape = Shape(
                inside=inside,
                wide=wide,
                outside=outside,
                kernel=kernel,
                stride=stride if i == 0 else 1,
                narrow=0 if fused else max(1, (wide if wide_squeeze else inside) // 4),
                fused=fused,
            )
            layers.append(InvertedResidual(shape, silu, silu, nn.Sigmoid))
        made.append(nn.Sequential(*layers))
    return made


def _efficient(stages: Sequence[EfficientStage], last: int, *, wide_squeeze: bool = False) -> nn.Module:
    made = _efficient_stages(stages, wide_squeeze=wide_squeeze)
    layers: list[nn.Module] = [layer for stage in made for layer in stage]
    layers += [*with_norm(stages[-1][4], last, 1, activation=silu), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(last, 1000))
