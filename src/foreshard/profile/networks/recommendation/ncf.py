"""Neural collaborative filtering: He et al. 2017 (NeuMF, arXiv 1708.05031), on MovieLens-20M."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

USERS, ITEMS = 138_493, 26_744
"""Of MovieLens-20M."""


class NeuMF(nn.Module):
    """The product of two vectors of user and item, and an MLP of two others, joined by one layer."""

    def __init__(self, factors: int, widths: Sequence[int], dropped: float) -> None:
        super().__init__()
        half = widths[0] // 2
        self.users, self.items = nn.Embedding(USERS, factors), nn.Embedding(ITEMS, factors)
        self.deep_users, self.deep_items = nn.Embedding(USERS, half), nn.Embedding(ITEMS, half)
        layers: list[nn.Module] = []
        for read, made in pairwise(widths):
            layers += [nn.Linear(read, made), nn.ReLU(), nn.Dropout(dropped)]
        self.mlp, self.head = nn.Sequential(*layers), nn.Linear(widths[-1] + factors, 1)

    def forward(self, user: Tensor, item: Tensor, liked: Tensor) -> Tensor:
        """Return the loss; users and items have shape (samples,), `liked` (samples, 1)."""
        product = self.users(user) * self.items(item)
        deep = self.mlp(torch.cat([self.deep_users(user), self.deep_items(item)], 1))
        scores = self.head(torch.cat([product, deep], 1))
        return functional.binary_cross_entropy_with_logits(scores.float(), liked.float())


def ncf(factors: int, widths: Sequence[int], *, dropped: float = 0.5) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return NeuMF, and a user, an item and whether the one liked the other."""
    one = torch.zeros(1, dtype=torch.long)
    return NeuMF(factors, widths, dropped), (one, one, torch.zeros(1, 1))
