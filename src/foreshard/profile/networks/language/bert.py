"""Encoders trained on masked words, then fine-tuned on questions: Devlin et al. 2018 (arXiv 1810.04805)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB = 30_528
"""Pieces of words: the 30,522 of the uncased vocabulary, filled up to a multiple of eight."""
_POSITIONS = 512
_HEAD_WIDTH = 64
_DROPPED = 0.1


class MaskedAttention(nn.Module):
    """Attention by separate kernels: scores, mask, softmax and dropout each pass through memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dropout = nn.Dropout(_DROPPED)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the attended words, shape (samples, words, width); `mask` is added to the scores."""
        query, key, value = (
            linear(x).unflatten(2, (-1, _HEAD_WIDTH)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(_HEAD_WIDTH) + mask
        attended: Tensor = self.dropout(scores.softmax(-1)) @ value
        return attended.transpose(1, 2).flatten(2)


class EncoderBlock(nn.Module):
    """Attention and an MLP, each dropped from, added to its input and then normed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.out = MaskedAttention(width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-12) for _ in range(2))
        self.dropout = nn.Dropout(_DROPPED)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the block's output; shape (samples, words, width)."""
        x = self.norms[0](x + self.dropout(self.out(self.attention(x, mask))))
        made: Tensor = self.norms[1](x + self.dropout(self.inner(x)))
        return made


class Bert(nn.Module):
    """Embeddings of words, places and segments, blocks, and a layer over the first word."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, width)
        self.places, self.segments = nn.Embedding(_POSITIONS, width), nn.Embedding(2, width)
        self.norm, self.dropout = nn.LayerNorm(width, eps=1e-12), nn.Dropout(_DROPPED)
        self.blocks = nn.ModuleList(EncoderBlock(width) for _ in range(blocks))
        self.pool = nn.Linear(width, width)

    def forward(self, words: Tensor, segments: Tensor, present: Tensor) -> Tensor:
        """Return the words as the last block leaves them; shape (samples, words, width)."""
        places = torch.arange(words.shape[1], device=words.device).expand_as(words)
        x = self.words(words) + self.places(places) + self.segments(segments)
        x = self.dropout(self.norm(x))
        mask = (1.0 - present[:, None, None].to(x.dtype)) * -10_000.0
        for block in self.blocks:
            x = block(x, mask)
        return x


class QuestionAnswering(nn.Module):
    """Finds where in a text an answer begins and ends (SQuAD)."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.bert, self.places = Bert(width, blocks), nn.Linear(width, 2)

    def forward(self, words: Tensor, segments: Tensor, present: Tensor, ends: Tensor) -> Tensor:
        """Return the loss; `ends` are the places of the first and the last word, shape (samples, 2)."""
        begin, end = self.places(self.bert(words, segments, present)).unbind(2)
        losses = (functional.cross_entropy(begin, ends[:, 0]), functional.cross_entropy(end, ends[:, 1]))
        return (losses[0] + losses[1]) / 2


class PreTraining(nn.Module):
    """Guesses masked words, and whether the second segment follows the first.

    Only masked words pass through the head over the vocabulary, whose table is that of the words.
    """

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.bert = Bert(width, blocks)
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=1e-12))
        self.bias, self.follows = nn.Parameter(torch.zeros(VOCAB)), nn.Linear(width, 2)

    def forward(
        self, words: Tensor, segments: Tensor, present: Tensor, masked: Tensor, right: Tensor, follows: Tensor
    ) -> Tensor:
        """Return the loss; `masked` are the places that are guessed, `right` their words."""
        x = self.bert(words, segments, present)
        first = torch.tanh(self.bert.pool(x[:, 0]))
        x = x.gather(1, masked[:, :, None].expand(-1, -1, x.shape[2])).flatten(0, 1)
        scores = functional.linear(self.transform(x), self.bert.words.weight) + self.bias
        guessed = functional.cross_entropy(scores, right.flatten())
        return guessed + functional.cross_entropy(self.follows(first), follows)


def bert_squad(width: int, blocks: int, *, words: int = 384) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return BERT that answers questions, and an example of so many words."""
    text = torch.zeros(1, words, dtype=torch.long)
    return QuestionAnswering(width, blocks), (text, text, text, torch.zeros(1, 2, dtype=torch.long))


def bert_pretraining(
    width: int, blocks: int, *, words: int, masked: int
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return BERT in pre-training, and an example of so many words, `masked` of which are guessed."""
    text, places = torch.zeros(1, words, dtype=torch.long), torch.zeros(1, masked, dtype=torch.long)
    follows = torch.zeros(1, dtype=torch.long)
    return PreTraining(width, blocks), (text, text, text, places, places, follows)
