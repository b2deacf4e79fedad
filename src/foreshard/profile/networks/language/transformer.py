"""A translator of attention alone: Vaswani et al. 2017 (arXiv 1706.03762), normed before each part."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB = 33_712
"""Pieces of words of both languages (WMT 2014, English and German)."""
_DROPPED = 0.1


class HeadAttention(nn.Module):
    """Attention of words to words, by separate kernels; heads are rows of one batch of products."""

    def __init__(self, width: int, heads: int, *, of_itself: bool) -> None:
        super().__init__()
        self.heads, self.of_itself = heads, of_itself
        self.inputs = nn.ModuleList([nn.Linear(width, 3 * width)])
        if not of_itself:
            self.inputs = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, 2 * width)])
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(_DROPPED)

    def forward(self, x: Tensor, read: Tensor, mask: Tensor | None) -> Tensor:
        """Return what words of `x` take from those of `read`; shape (words, samples, width)."""
        width = x.shape[2]
        if self.of_itself:
            query, key, value = self.inputs[0](x).chunk(3, 2)
        else:
            query, (key, value) = self.inputs[0](x), self.inputs[1](read).chunk(2, 2)
        query = query * (width // self.heads) ** -0.5
        query, key, value = (self._by_head(part) for part in (query, key, value))
        scores = torch.bmm(query, key.transpose(1, 2))
        if mask is not None:
            scores = scores + mask
        weights = self.dropout(scores.softmax(-1))
        attended = torch.bmm(weights, value).transpose(0, 1).reshape(x.shape)
        made: Tensor = self.out(attended)
        return made

    def _by_head(self, x: Tensor) -> Tensor:
        words, samples, width = x.shape
        return x.reshape(words, samples * self.heads, width // self.heads).transpose(0, 1)


class TranslatorBlock(nn.Module):
    """Attention, in a decoder also to the source, and an MLP; each normed first and added to its input."""

    def __init__(self, width: int, heads: int, inner: int, *, decodes: bool) -> None:
        super().__init__()
        self.attention = HeadAttention(width, heads, of_itself=True)
        self.source = HeadAttention(width, heads, of_itself=False) if decodes else None
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 + decodes))
        self.mlp = nn.Sequential(
            nn.Linear(width, inner), nn.ReLU(), nn.Dropout(_DROPPED), nn.Linear(inner, width)
        )
        self.dropout = nn.Dropout(_DROPPED)

    def forward(self, x: Tensor, source: Tensor | None, mask: Tensor | None) -> Tensor:
        """Return the block's output; shape (words, samples, width)."""
        normed = self.norms[0](x)
        x = x + self.dropout(self.attention(normed, normed, mask))
        if self.source is not None and source is not None:
            x = x + self.dropout(self.source(self.norms[1](x), source, None))
        made: Tensor = x + self.dropout(self.mlp(self.norms[-1](x)))
        return made


class Translator(nn.Module):
    """An encoder of the source and a decoder of the target, which share one table of words with the head."""

    def __init__(self, width: int, heads: int, inner: int, blocks: int) -> None:
        super().__init__()
        self.words, self.width = nn.Embedding(VOCAB, width), width
        self.encoder = nn.ModuleList(
            TranslatorBlock(width, heads, inner, decodes=False) for _ in range(blocks)
        )
        self.decoder = nn.ModuleList(
            TranslatorBlock(width, heads, inner, decodes=True) for _ in range(blocks)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(_DROPPED)

    def forward(self, source: Tensor, target: Tensor, right: Tensor) -> Tensor:
        """Return the loss with smoothed labels; words have shape (samples, words)."""
        x = self._embedded(source)
        for block in self.encoder:
            x = block(x, None, None)
        read = self.norms[0](x)
        y = self._embedded(target)
        words = y.shape[0]
        mask = torch.full((words, words), -float("inf"), device=y.device, dtype=y.dtype).triu(1)
        for block in self.decoder:
            y = block(y, read, mask)
        scores = functional.linear(self.norms[1](y).transpose(0, 1).flatten(0, 1), self.words.weight)
        return smoothed_loss(scores, right.flatten())

    def _embedded(self, words: Tensor) -> Tensor:
        places = torch.empty(words.shape[1], self.width, device=words.device, dtype=self.words.weight.dtype)
        x = self.words(words) * self.width**0.5 + places
        dropped: Tensor = self.dropout(x).transpose(0, 1)
        return dropped


def smoothed_loss(scores: Tensor, right: Tensor, smoothing: float = 0.1) -> Tensor:
    """Return the cross entropy to labels of which `smoothing` is spread over all words."""
    logarithms = scores.log_softmax(-1, dtype=torch.float32)
    nll, spread = -logarithms.gather(1, right[:, None])[:, 0], -logarithms.mean(-1)
    return ((1.0 - smoothing) * nll + smoothing * spread).sum()


def transformer(
    width: int, heads: int, inner: int, blocks: int, *, words: int = 32
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a translator, and a pair of sentences of so many pieces of words each."""
    text = torch.zeros(1, words, dtype=torch.long)
    return Translator(width, heads, inner, blocks), (text, text, text)
