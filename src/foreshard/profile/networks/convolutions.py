"""What networks for images share: a convolution and its norm, activations, squeezes, what classifies."""

from __future__ import annotations

from torch import Tensor, nn

_ACTIVATIONS = {"relu": nn.ReLU, "relu6": nn.ReLU6, "hardswish": nn.Hardswish, "silu": nn.SiLU}


def activated(name: str) -> nn.Module:
    """Return an activation in place: relu, relu6, hardswish or silu."""
    return _ACTIVATIONS[name](inplace=True)


def with_norm(
    inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1, activation: str = ""
) -> list[nn.Module]:
    """Return a convolution that keeps the side but for its stride, its norm, and what follows."""
    convolution = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outside), *([activated(activation)] if activation else [])]


def classifies(width: int, *, dropped: float = 0.0) -> list[nn.Module]:
    """Return the mean over an image of so many channels, and a layer to 1,000 classes."""
    dropout = [nn.Dropout(dropped)] if dropped else []
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), *dropout, nn.Linear(width, 1000)]


class Squeezed(nn.Module):
    """Channels scaled by what their means say (squeeze and excitation, arXiv 1709.01507)."""

    def __init__(self, channels: int, narrow: int, activation: str, gate: nn.Module) -> None:
        super().__init__()
        squeeze, widen = nn.Conv2d(channels, narrow, 1), nn.Conv2d(narrow, channels, 1)
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), squeeze, activated(activation), widen, gate)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled channels."""
        scaled: Tensor = x * self.scale(x)
        return scaled
