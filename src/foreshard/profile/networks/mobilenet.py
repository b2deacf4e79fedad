"""Inverted residuals with depthwise convolutions: MobileNetV2, V3, MnasNet, EfficientNet, its V2, GPUNet.

Sandler et al. 2018 (arXiv 1801.04381), Howard et al. 2019 (arXiv 1905.02244), Tan et al. 2018 (arXiv
1807.11626), Tan, Le 2019 (arXiv 1905.11946) and 2021 (arXiv 2104.00298); Wang et al. 2022 (arXiv 2205.00841,
figure 6) in the shapes of NVIDIA's DeepLearningExamples. Layers that drop whole paths at random are left out:
they skip no work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from foreshard.catalog.shipped import shipped
from foreshard.profile.networks.convolutions import Squeezed, activated, classifies, with_norm


@dataclass(frozen=True, kw_only=True)
class ResidualStage:
    """Inverted residuals of one shape; the first may change channels and has the stride."""

    outside: int
    blocks: int = 1
    expansion: int = 1
    wide: int = 0  # channels in the middle, where they are no multiple of those that are read
    kernel: int = 3
    stride: int = 1
    activation: str = ""  # where it is not that of the network
    squeezed: bool = False
    fused: bool = False  # one full convolution widens; no depthwise one


class InvertedResidual(nn.Module):
    """Widen, convolve every channel by itself, narrow; the input is added where shapes agree."""

    def __init__(
        self,
        stage: ResidualStage,
        inside: int,
        wide: int,
        stride: int,
        activation: str,
        squeeze: Squeezed | None,
    ) -> None:
        super().__init__()
        if stage.fused and wide == inside:
            path = with_norm(inside, stage.outside, stage.kernel, stride, activation=activation)
        else:
            if stage.fused:
                path = with_norm(inside, wide, stage.kernel, stride, activation=activation)
            else:
                path = with_norm(inside, wide, 1, activation=activation) if wide != inside else []
                path += with_norm(wide, wide, stage.kernel, stride, wide, activation)
            path += [*([squeeze] if squeeze else []), *with_norm(wide, stage.outside, 1)]
        self.path = nn.Sequential(*path)
        self.is_residual = stride == 1 and inside == stage.outside

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; shape (samples, channels, height, width)."""
        out: Tensor = self.path(x)
        return x + out if self.is_residual else out


Narrow = Callable[[ResidualStage, int, int], int]
"""(stage, channels that a block reads, those in its middle) -> channels of its squeeze, 0 for none."""


def stages_of(name: str) -> list[ResidualStage]:
    """Return the stages of a network in ``data/inverted_residuals.toml``."""
    rows = shipped("inverted_residuals.toml", "foreshard.profile.networks")[name]
    return [ResidualStage(**row) for row in rows]


def residuals(
    stages: Iterable[ResidualStage],
    inside: int,
    activation: str,
    *,
    narrow: Narrow = lambda stage, inside, wide: 0,
    squeeze: str = "",
    gate: type[nn.Module] = nn.Sigmoid,
) -> list[nn.Sequential]:
    """Return the blocks of each stage, the first of which reads `inside` channels.

    `squeeze` is the activation of squeezes where it is not that of their block.
    """
    made = []
    for stage in stages:
        layers: list[nn.Module] = []
        own = stage.activation or activation
        for i in range(stage.blocks):
            wide = stage.wide or _divisible(inside * stage.expansion)
            channels = narrow(stage, inside, wide)
            squeezed = Squeezed(wide, channels, squeeze or own, gate()) if channels else None
            stride = stage.stride if i == 0 else 1
            layers.append(InvertedResidual(stage, inside, wide, stride, own, squeezed))
            inside = stage.outside
        made.append(nn.Sequential(*layers))
    return made


def _divisible(width: float) -> int:
    """Return the width rounded to a multiple of 8, by not more than a tenth down."""
    rounded = max(8, int(width + 4) // 8 * 8)
    return rounded + 8 * (rounded < 0.9 * width)


def _flat(stages: Iterable[nn.Sequential]) -> list[nn.Module]:
    return [layer for stage in stages for layer in stage]


def _mobile(stages: str, activation: str, *, dropped: float = 0.0) -> nn.Module:
    layers = with_norm(3, 32, 3, 2, activation=activation)
    layers += _flat(residuals(stages_of(stages), 32, activation))
    layers += with_norm(320, 1280, 1, activation=activation)
    return nn.Sequential(*layers, *classifies(1280, dropped=dropped))


def mobilenet_v2() -> nn.Module:
    """Return MobileNetV2 of width 1 for images of 3 channels and 1,000 classes."""
    return _mobile("mobilenet_v2", "relu6")


def mnasnet() -> nn.Module:
    """Return MnasNet-B1 of width 1 for images of 3 channels and 1,000 classes."""
    return _mobile("mnasnet", "relu", dropped=0.2)


def mobilenet_v3(*, large: bool) -> nn.Module:
    """Return MobileNetV3 of width 1 for images of 3 channels and 1,000 classes."""
    stages = stages_of("mobilenet_v3_large" if large else "mobilenet_v3_small")
    blocks = residuals(
        stages,
        16,
        "relu",
        narrow=lambda stage, _, wide: stage.squeezed * _divisible(wide / 4),
        squeeze="relu",
        gate=nn.Hardsigmoid,
    )
    outside = stages[-1].outside
    last, hidden = 6 * outside, 1280 if large else 1024
    layers = [*with_norm(3, 16, 3, 2, activation="hardswish"), *_flat(blocks)]
    layers += [*with_norm(outside, last, 1, activation="hardswish"), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    layers += [nn.Linear(last, hidden), activated("hardswish"), nn.Dropout(0.2), nn.Linear(hidden, 1000)]
    return nn.Sequential(*layers)


def efficientnet(*, width: float = 1.0, depth: float = 1.0, wide_squeeze: bool = False) -> nn.Module:
    """Return an EfficientNet, B0 scaled in width and depth, for 1,000 classes.

    A wide squeeze has a quarter of the widened channels in place of those of the block's input ("widese" of
    NVIDIA's DeepLearningExamples).
    """
    stages = [
        replace(one, outside=_divisible(one.outside * width), blocks=math.ceil(one.blocks * depth))
        for one in stages_of("efficientnet")
    ]
    last = 4 * stages[-1].outside
    return _efficient(stages, _divisible(32 * width), last, wide_squeeze=wide_squeeze)


def efficientnet_v2(size: str) -> nn.Module:
    """Return an EfficientNetV2 (s, m or l) for 1,000 classes."""
    return _efficient(stages_of(f"efficientnet_v2_{size}"), 32 if size == "l" else 24, 1280)


def efficientnet_stages() -> list[nn.Sequential]:
    """Return the stem of EfficientNet-B0 and its stages, without what classifies."""
    return _efficient_stages(stages_of("efficientnet"), 32)


def _efficient_stages(
    stages: Iterable[ResidualStage], stem: int, *, wide_squeeze: bool = False
) -> list[nn.Sequential]:
    def narrow(stage: ResidualStage, inside: int, wide: int) -> int:
        return 0 if stage.fused else max(1, (wide if wide_squeeze else inside) // 4)

    first = nn.Sequential(*with_norm(3, stem, 3, 2, activation="silu"))
    return [first, *residuals(stages, stem, "silu", narrow=narrow)]


def _efficient(stages: list[ResidualStage], stem: int, last: int, *, wide_squeeze: bool = False) -> nn.Module:
    layers = _flat(_efficient_stages(stages, stem, wide_squeeze=wide_squeeze))
    layers += with_norm(stages[-1].outside, last, 1, activation="silu")
    return nn.Sequential(*layers, *classifies(last, dropped=0.2))


_GPU_STEM = {0: (32, 2), 1: (24, 1), 2: (32, 3)}
"""Channels of the first convolution of each GPUNet, and how many of the same follow."""


def gpunet(size: int) -> nn.Module:
    """Return GPUNet-0, -1 or -2 for images of 3 channels and 1,000 classes."""
    inside, count = _GPU_STEM[size]
    stages = stages_of(f"gpunet_{size}")
    layers: list[nn.Module] = with_norm(3, inside, 3, 2, activation="relu")
    for _ in range(count):
        layers += with_norm(inside, inside, 3, activation="relu")
    layers += _flat(
        residuals(stages, inside, "relu", narrow=lambda stage, inside, _: stage.squeezed * inside // 4)
    )
    layers += with_norm(stages[-1].outside, 1280, 1, activation="relu")
    return nn.Sequential(*layers, *classifies(1280, dropped=0.2))
