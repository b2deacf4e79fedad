"""Attention inside windows that shift from block to block: Liu et al. 2021 (Swin, arXiv 2103.14030)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreshard.profile.networks.convolutions import classifies

WINDOW = 7  # pixels of the side of a window


class WindowAttention(nn.Module):
    """Attention of the pixels of each window to each other, with a bias by relative position."""

    def __init__(self, width: int, heads: int, shift: int) -> None:
        super().__init__()
        self.heads, self.shift = heads, shift
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.relative = nn.Parameter(torch.zeros((2 * WINDOW - 1) ** 2, heads))

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended image; shape (samples, height, width, channels)."""
        samples, height, width, channels = x.shape
        x = functional.pad(x, (0, 0, 0, -width % WINDOW, 0, -height % WINDOW))
        rows, columns = x.shape[1] // WINDOW, x.shape[2] // WINDOW
        shifts = (self.shift * (rows > 1), self.shift * (columns > 1))
        if any(shifts):
            x = x.roll((-shifts[0], -shifts[1]), (1, 2))
        x = x.view(samples, rows, WINDOW, columns, WINDOW, channels).transpose(2, 3)
        x = x.reshape(samples * rows * columns, WINDOW**2, channels)
        query, key, value = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = query * (channels // self.heads) ** -0.5 @ key.transpose(2, 3) + self._bias()
        if any(shifts):
            mask = self._mask(rows, columns, shifts, scores)
            scores = (scores.unflatten(0, (samples, -1)) + mask[None, :, None]).flatten(0, 1)
        x = self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        x = x.view(samples, rows, columns, WINDOW, WINDOW, channels).transpose(2, 3)
        x = x.reshape(samples, rows * WINDOW, columns * WINDOW, channels)
        if any(shifts):
            x = x.roll(shifts, (1, 2))
        return x[:, :height, :width].contiguous()

    def _bias(self) -> Tensor:
        """Return the bias of each head and pair of pixels."""
        place = torch.arange(WINDOW**2, device=self.relative.device)
        row = place[:, None] // WINDOW - place // WINDOW + WINDOW - 1
        column = place[:, None] % WINDOW - place % WINDOW + WINDOW - 1
        bias: Tensor = self.relative[(row * (2 * WINDOW - 1) + column).flatten()]
        return bias.view(WINDOW**2, WINDOW**2, self.heads).permute(2, 0, 1)

    @staticmethod
    def _mask(rows: int, columns: int, shifts: tuple[int, int], like: Tensor) -> Tensor:
        """Return what forbids pairs that the shift brought together; shape (windows, pixels, pixels)."""
        parts = []
        for count, shift in zip((rows, columns), shifts, strict=True):
            place = torch.arange(count * WINDOW, device=like.device)
            last = count * WINDOW
            parts.append((place >= last - WINDOW).int() + (place >= last - shift).int() * (shift > 0))
        part = 3 * parts[0][:, None] + parts[1]
        part = part.view(rows, WINDOW, columns, WINDOW).transpose(1, 2).reshape(rows * columns, WINDOW**2)
        return (part[:, None] != part[:, :, None]).to(like.dtype) * -100.0


class WindowBlock(nn.Module):
    """Attention inside windows and an MLP, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int, shift: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), WindowAttention(width, heads, shift))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; shape (samples, height, width, channels)."""
        x = x + self.attention(x)
        out: Tensor = x + self.mlp(x)
        return out


class Merge(nn.Module):
    """Four pixels become one of twice the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduce = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the image of half the side."""
        x = functional.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        corners = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        merged: Tensor = self.reduce(self.norm(torch.cat(corners, -1)))
        return merged


class ChannelsLast(nn.Module):
    """Puts the channels behind the pixels, or before them again."""

    def __init__(self, back: bool = False) -> None:
        super().__init__()
        self.order = (0, 3, 1, 2) if back else (0, 2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the image in the other order."""
        return x.permute(self.order)


def swin(width: int, counts: Sequence[int], heads: Sequence[int]) -> nn.Module:
    """Return a Swin transformer of windows of 7 pixels for images of 3 channels and 1,000 classes."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), ChannelsLast(), nn.LayerNorm(width)]
    for stage, (count, split) in enumerate(zip(counts, heads, strict=True)):
        if stage:
            layers.append(Merge(width))
            width *= 2
        layers += [WindowBlock(width, split, (i % 2) * (WINDOW // 2)) for i in range(count)]
    return nn.Sequential(*layers, nn.LayerNorm(width), ChannelsLast(back=True), *classifies(width))
