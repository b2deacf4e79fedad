"""Modules that no catalog knows, as a user hands them to `foreshard predict FILE:FACTORY`.

Each factory returns a module on the processor, inputs of one sample, and the loss of what the module returns.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Cast(nn.Module):
    """A module under autocast."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return what the module returns, computed in bf16."""
        with torch.autocast("cuda", torch.bfloat16):
            return self.inner(*inputs)


def _square(made: torch.Tensor) -> torch.Tensor:
    return made.float().square().mean()


class Recurrent(nn.Module):
    """A language model of two layers of LSTM."""

    def __init__(self, width: int = 1024, words: int = 10_000) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores of words (samples, tokens, words)."""
        made, _ = self.layers(self.table(tokens))
        return self.head(made)


def _next_word(scores: torch.Tensor) -> torch.Tensor:
    words = scores.shape[-1]
    labels = torch.zeros(scores.shape[0], scores.shape[1], dtype=torch.long, device=scores.device)
    return F.cross_entropy(scores.float().view(-1, words), labels.view(-1))


def lstm() -> tuple:
    """A language model of two layers of LSTM over 128 tokens."""
    return Cast(Recurrent()), torch.zeros(1, 128, dtype=torch.long), _next_word


def encoder() -> tuple:
    """Twelve layers of torch's own encoder with dropout, 512 tokens wide 1,024."""
    layer = nn.TransformerEncoderLayer(
        1024, 16, 4096, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
    )
    inner = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    return Cast(inner), torch.zeros(1, 512, 1024), _square


def _twice(channels: int, out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (channels, out):
        layers += [nn.Conv2d(before, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)]
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Four levels down and up, each joined to its like."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = [width << level for level in range(5)]
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.wider = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, 2) for a in reversed(sizes[:4]))
        self.up = nn.ModuleList(_twice(2 * a, a) for a in reversed(sizes[:4]))
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores of two classes for every pixel."""
        kept = []
        for level, block in enumerate(self.down):
            images = block(images if level == 0 else F.max_pool2d(images, 2))
            kept.append(images)
        for wider, block, like in zip(self.wider, self.up, reversed(kept[:4]), strict=True):
            images = block(torch.cat([like, wider(images)], 1))
        return self.last(images)


def unet() -> tuple:
    """A U-Net over images of 256 x 256."""
    return Cast(UNet()), torch.zeros(1, 3, 256, 256), _square


class Recommender(nn.Module):
    """Eight tables, a perceptron below and one above, and products of all pairs between."""

    def __init__(self, rows: int = 200_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(8))
        self.below = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        self.above = nn.Sequential(nn.Linear(width + 81, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
        self.last = nn.Linear(1024, 1)

    def forward(self, dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return a score (samples, 1) of features (samples, 13) and rows (samples, 8, 4)."""
        low = self.below(dense)
        found = [low, *(table(indices[:, at]) for at, table in enumerate(self.tables))]
        stacked = torch.stack(found, 1)
        pairs = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        return self.last(self.above(torch.cat([low, pairs], 1)))


def recommender() -> tuple:
    """A recommender with tables of 200,000 rows, four looked up in each."""
    return Cast(Recommender()), (torch.zeros(1, 13), torch.zeros(1, 8, 4, dtype=torch.long)), _square


class Mixer(nn.Module):
    """A block that mixes patches, then channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches = nn.Sequential(nn.Linear(patches, 384), nn.GELU(), nn.Linear(384, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, made: torch.Tensor) -> torch.Tensor:
        """Return patches (samples, patches, width) mixed."""
        made = made + self.patches(self.first(made).transpose(1, 2)).transpose(1, 2)
        return made + self.channels(self.second(made))


def mixer() -> tuple:
    """A mixer of twelve blocks over 196 patches of 768 channels."""
    return Cast(nn.Sequential(*(Mixer(196, 768) for _ in range(12)))), torch.zeros(1, 196, 768), _square
