"""A translator of recurrent layers: Wu et al. 2016 (arXiv 1609.08144), in the second version of MLPerf.

All layers of the decoder read what attention found by the output of its first one, at the same step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foreshard.profile.networks.language.transformer import smoothed_loss

VOCAB = 32_320
"""Pieces of words of both languages (WMT 2016, English and German)."""


class AdditiveAttention(nn.Module):
    """Scores of sums of queries and keys, normed: Bahdanau et al. 2014 (arXiv 1409.0473)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.weight, self.bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Return what each query finds; shape (words, samples, width), as queries and keys."""
        keys, query = keys.transpose(0, 1), query.transpose(0, 1)
        sums = self.query(query)[:, :, None] + self.key(keys)[:, None]
        weight = self.weight / self.weight.norm() * self.scale
        scores = torch.tanh(sums + self.bias) @ weight
        return (scores.softmax(-1) @ keys).transpose(0, 1)


class Gnmt(nn.Module):
    """Four recurrent layers each of an encoder, whose first reads both ways, and of a decoder."""

    def __init__(self, width: int, layers: int, dropped: float) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, width)
        self.both_ways = nn.LSTM(width, width, bidirectional=True)
        self.encoder = nn.ModuleList(nn.LSTM(width * (2 - (i > 0)), width) for i in range(layers - 1))
        self.first, self.attention = nn.LSTM(width, width), AdditiveAttention(width)
        self.decoder = nn.ModuleList(nn.LSTM(2 * width, width) for _ in range(layers - 1))
        self.head, self.dropout = nn.Linear(width, VOCAB), nn.Dropout(dropped)

    def forward(self, source: Tensor, target: Tensor, right: Tensor) -> Tensor:
        """Return the loss with smoothed labels; words have shape (samples, words)."""
        keys = self._encoded(source.t())
        x, _ = self.first(self.words(target.t()))
        found = self.attention(x, keys)
        for place, layer in enumerate(self.decoder):
            made, _ = layer(torch.cat([self.dropout(x), found], 2))
            x = made + x if place else made
        return smoothed_loss(self.head(x).flatten(0, 1), right.t().flatten())

    def _encoded(self, source: Tensor) -> Tensor:
        x, _ = self.both_ways(self.dropout(self.words(source)))
        for place, layer in enumerate(self.encoder):
            made, _ = layer(self.dropout(x))
            x = made + x if place else made
        return x


def gnmt(width: int, layers: int, *, words: int = 30) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return GNMT and a pair of sentences, each filled up to so many pieces of words."""
    text = torch.zeros(1, words, dtype=torch.long)
    return Gnmt(width, layers, 0.2), (text, text, text)
