"""GPUNet: Wang et al. 2022 (arXiv 2205.00841), in the shapes of NVIDIA's DeepLearningExamples.

Convolutions, then inverted residuals whose first stages widen by one full convolution; stages differ in
activation, filter, width and squeeze. Layers that drop whole paths at random are left out: they skip no work.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from foreshard.profile.networks.mobilenet import Activation, InvertedResidual, Shape, relu, silu, with_norm

_LAST = 1280


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """Inverted residuals of one shape; the first may change channels and has the stride."""

    outside: int
    blocks: int
    expansion: int
    stride: int = 1
    kernel: int = 3
    swish: bool = False
    squeezed: bool = False
    fused: bool = False


_STAGES = {
    0: (
        _Stage(outside=32, blocks=2, expansion=5, stride=2, fused=True),
        _Stage(outside=64, blocks=3, expansion=5, stride=2, fused=True),
        _Stage(outside=256, blocks=3, expansion=5, stride=2, swish=True),
        _Stage(outside=704, blocks=2, expansion=5, stride=2, squeezed=True),
    ),
    1: (
        _Stage(outside=64, blocks=2, expansion=4, stride=2, swish=True, fused=True),
        _Stage(outside=96, blocks=2, expansion=4, stride=2, swish=True, fused=True),
        _Stage(outside=160, blocks=1, expansion=2, stride=2, swish=True, squeezed=True),
        _Stage(outside=288, blocks=4, expansion=5),
        _Stage(outside=448, blocks=4, expansion=4, stride=2, squeezed=True),
    ),
    2: (
        _Stage(outside=32, blocks=1, expansion=6, stride=2, kernel=5, swish=True, squeezed=True, fused=True),
        _Stage(outside=112, blocks=3, expansion=3, stride=2, swish=True, fused=True),
        _Stage(outside=144, blocks=6, expansion=6, stride=2, swish=True),
        _Stage(outside=160, blocks=4, expansion=3, kernel=5),
        _Stage(outside=224, blocks=8, expansion=3, stride=2, swish=True, squeezed=True),
        _Stage(outside=832, blocks=7, expansion=2, kernel=5),
    ),
}
"""Stages of each size: figure 6 of the paper, and the configurations that its code is published with."""
_STEM = {0: (32, 2), 1: (24, 1), 2: (32, 3)}
"""Channels of the first convolution, and how many of the same follow."""


def gpunet(size: int) -> nn.Module:
    """Return GPUNet-0, -1 or -2 for images of 3 channels and 1,000 classes."""
    inside, count = _STEM[size]
    layers: list[nn.Module] = with_norm(3, inside, 3, 2, activation=relu)
    for _ in range(count):
        layers += with_norm(inside, inside, 3, activation=relu)
    for stage in _STAGES[size]:
        activation: Activation = silu if stage.swish else relu
        for i in range(stage.blocks):
            shape = Shape(
                inside=inside,
                wide=inside * stage.expansion,
                outside=stage.outside,
                kernel=stage.kernel,
                stride=stage.stride if i == 0 else 1,
                narrow=inside // 4 if stage.squeezed else 0,
                fused=stage.fused,
            )
            layers.append(InvertedResidual(shape, activation, activation, nn.Sigmoid))
            inside = stage.outside
    layers += [*with_norm(inside, _LAST, 1, activation=relu), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(_LAST, 1000))
