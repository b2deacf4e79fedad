"""A language model that attends to the segment before: Dai et al. 2019 (Transformer-XL, arXiv 1901.02860)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB = 267_735
"""Words of WikiText-103 (Merity et al. 2016, arXiv 1609.07843), each at least three times in it."""
CUTOFFS = (19_997, 39_997, 199_997)
"""Where clusters of rarer words begin."""
SHARES = (0.9704, 0.0101, 0.0171, 0.0024)
"""Of the words of a text that are of each cluster.

Where the frequency of a word falls as a power of its rank (Zipf), the 103,227,021 words of WikiText-103, of
which the rarest kind comes three times, set that power: 1.275.
"""


class RelativeAttention(nn.Module):
    """Attention to the words of two segments, scored by content and by distance."""

    def __init__(self, width: int, heads: int, dropped: float, dropped_scores: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.distance = nn.Linear(width, width, bias=False)
        self.out, self.norm = nn.Linear(width, width, bias=False), nn.LayerNorm(width)
        self.dropout, self.dropped_scores = nn.Dropout(dropped), nn.Dropout(dropped_scores)

    def forward(self, x: Tensor, memory: Tensor, distances: Tensor, biases: Sequence[Tensor]) -> Tensor:
        """Return the attended words; shape (words, samples, width), as everything here."""
        words = x.shape[0]
        query, key, value = self.qkv(torch.cat([memory, x])).unflatten(2, (3 * self.heads, -1)).chunk(3, 2)
        far = self.distance(distances).unflatten(1, (self.heads, -1))
        query = query[-words:]
        scores = torch.einsum("ibnd,jbnd->bnij", query + biases[0], key)
        scores = scores + _shifted(torch.einsum("ibnd,jnd->bnij", query + biases[1], far))
        scores = scores * (x.shape[2] // self.heads) ** -0.5
        later = torch.ones(words, key.shape[0], device=x.device).triu(1 + len(memory)).bool()
        weights = self.dropped_scores(scores.masked_fill(later, -float("inf")).softmax(-1))
        attended = torch.einsum("bnij,jbnd->ibnd", weights, value).flatten(2)
        normed: Tensor = self.norm(x + self.dropout(self.out(attended)))
        return normed


def _shifted(scores: Tensor) -> Tensor:
    """Return scores by distance as scores by place: row i moves left by its place from the end."""
    samples, heads, words, places = scores.shape
    padded = torch.cat([scores.new_zeros(samples, heads, words, 1), scores], 3)
    return padded.view(samples, heads, places + 1, words)[:, :, 1:].reshape(samples, heads, words, places)


class RelativeBlock(nn.Module):
    """Relative attention and an MLP, normed after each."""

    def __init__(self, width: int, heads: int, inner: int, dropped: float, dropped_scores: float) -> None:
        super().__init__()
        self.attention = RelativeAttention(width, heads, dropped, dropped_scores)
        drop = nn.Dropout(dropped)
        self.mlp = nn.Sequential(
            nn.Linear(width, inner), nn.ReLU(inplace=True), drop, nn.Linear(inner, width), drop
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, memory: Tensor, distances: Tensor, biases: Sequence[Tensor]) -> Tensor:
        """Return the block's output; shape (words, samples, width)."""
        x = self.attention(x, memory, distances, biases)
        made: Tensor = self.norm(x + self.mlp(x))
        return made


class AdaptiveWords(nn.Module):
    """Words in clusters by frequency; tables embed and score: Grave et al. 2016 (arXiv 1609.04309).

    Which words of a text are of which cluster follows from its values: here the first are of the first, as
    many as `SHARES` says.
    """

    def __init__(self, width: int, cutoffs: Sequence[int], narrower: int) -> None:
        super().__init__()
        self.width, self.cutoffs, self.narrower = width, tuple(cutoffs), narrower
        ends = (0, *cutoffs, VOCAB)
        sizes = [b - a for a, b in pairwise(ends)]
        if narrower == 1:
            tables = [nn.Embedding(VOCAB, width)]
            self.biases = nn.ParameterList([torch.zeros(VOCAB)])
        else:
            widths = [width // narrower**place for place in range(len(sizes))]
            pairs = list(zip(sizes, widths, strict=True))
            tables = [nn.Embedding(size, narrow) for size, narrow in pairs]
            self.biases = nn.ParameterList(torch.zeros(size) for size in sizes)
            self.projections = nn.ParameterList(torch.zeros(width, narrow) for narrow in widths)
            self.head_projection = nn.Parameter(torch.zeros(width, width))
        self.tables = nn.ModuleList(tables)
        if cutoffs:
            self.cluster_weight = nn.Parameter(torch.zeros(len(cutoffs), width))
            self.cluster_bias = nn.Parameter(torch.zeros(len(cutoffs)))

    def counts(self, words: int) -> list[int]:
        """Return how many of the words of a text are of each cluster; the first takes what is left."""
        if not self.cutoffs:
            return [words]
        rarer = [max(1, round(words * share)) for share in SHARES[1:]]
        return [words - sum(rarer), *rarer]

    def embed(self, words: Tensor) -> Tensor:
        """Return the words as vectors; shape (words, samples, width)."""
        if self.narrower == 1:
            found: Tensor = self.tables[0](words)
            return found * self.width**0.5
        parts = words.split(self.counts(words.shape[0]))
        vectors = [
            functional.linear(table(part), projection)
            for part, table, projection in zip(parts, self.tables, self.projections, strict=True)
        ]
        return torch.cat(vectors) * self.width**0.5

    def forward(self, x: Tensor, right: Tensor) -> Tensor:
        """Return the loss of each word; shape (words x samples)."""
        if not self.cutoffs:
            scores = functional.linear(x.flatten(0, 1), self._weight(0), self.biases[0]).log_softmax(-1)
            return -scores.gather(1, right.flatten()[:, None])
        first = self.cutoffs[0]
        weight = torch.cat([self._weight(0)[:first], self.cluster_weight])
        bias = torch.cat([self.biases[0][:first], self.cluster_bias])
        samples = x.shape[1]
        narrowed = x if self.narrower == 1 else x @ self.head_projection
        heads = functional.linear(narrowed.flatten(0, 1), weight, bias).log_softmax(-1)
        counts = [count * samples for count in self.counts(x.shape[0])]
        flat, losses = right.flatten(), []
        starts = zip(heads.split(counts), x.flatten(0, 1).split(counts), flat.split(counts), strict=True)
        for place, (head, part, target) in enumerate(starts):
            if place == 0:
                losses.append(-head.gather(1, target[:, None]))
                continue
            tail = functional.linear(self._projected(part, place), *self._table(place)).log_softmax(-1)
            losses.append(-head[:, -place, None] - tail.gather(1, target[:, None]))
        return torch.cat(losses)

    def _projected(self, x: Tensor, place: int) -> Tensor:
        projected: Tensor = x if self.narrower == 1 else x @ self.projections[place]
        return projected

    def _table(self, place: int) -> tuple[Tensor, Tensor]:
        if self.narrower > 1:
            return self._weight(place), self.biases[place]
        begin, end = (*self.cutoffs, VOCAB)[place - 1 : place + 1]
        return self._weight(0)[begin:end], self.biases[0][begin:end]

    def _weight(self, place: int) -> Tensor:
        table: Tensor = self.tables[place].get_parameter("weight")
        return table


class TransformerXL(nn.Module):
    """Words, blocks that see the segment before, and a loss over the clusters of words."""

    def __init__(
        self,
        width: int,
        heads: int,
        inner: int,
        blocks: int,
        *,
        dropped: float,
        dropped_scores: float,
        cutoffs: Sequence[int],
        narrower: int,
    ) -> None:
        super().__init__()
        self.width = width
        self.words, self.dropout = AdaptiveWords(width, cutoffs, narrower), nn.Dropout(dropped)
        self.blocks = nn.ModuleList(
            RelativeBlock(width, heads, inner, dropped, dropped_scores) for _ in range(blocks)
        )
        self.content_bias = nn.Parameter(torch.zeros(heads, width // heads))
        self.distance_bias = nn.Parameter(torch.zeros(heads, width // heads))

    def forward(self, words: Tensor, right: Tensor) -> Tensor:
        """Return the loss; words and those that follow them have shape (samples, words)."""
        x = self.words.embed(words.t())
        distances = self.dropout(self._distances(2 * x.shape[0], x))
        x = self.dropout(x)
        for block in self.blocks:
            x.detach().clone()  # the memory of the segment that follows
            memory = torch.empty_like(x)  # of the segment before, as long as this one
            x = block(x, memory, distances, (self.content_bias, self.distance_bias))
        return self.words(self.dropout(x), right.t()).mean()

    def _distances(self, places: int, like: Tensor) -> Tensor:
        """Return sines and cosines of each distance; shape (places, width)."""
        place = torch.arange(places - 1, -1, -1.0, device=like.device, dtype=like.dtype)
        rates = 10_000.0 ** -(torch.arange(0.0, self.width, 2.0, device=like.device) / self.width)
        turns = place[:, None] * rates.to(like.dtype)
        return torch.cat([turns.sin(), turns.cos()], 1)


def transformer_xl(
    width: int,
    blocks: int,
    *,
    words: int,
    dropped: float,
    dropped_scores: float = 0.0,
    narrower: int = 1,
    cutoffs: Sequence[int] = CUTOFFS,
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return Transformer-XL and an example of so many words, with as many of the segment before.

    `narrower` is by how much the vectors of each cluster are narrower than those of the one before; without
    `cutoffs` there is one cluster, whose loss is a softmax over all words.
    """
    model = TransformerXL(
        width,
        width // 64,
        4 * width,
        blocks,
        dropped=dropped,
        dropped_scores=dropped_scores,
        cutoffs=cutoffs,
        narrower=narrower,
    )
    text = torch.zeros(1, words, dtype=torch.long)
    return model, (text, text)
