"""Top-k: the entries of largest magnitude, with their places."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foreshard.transport.compression.compressor import Compressor, Shapes, SumRanks, WarmUp, joined_bytes


class TopK(Compressor):
    """Sums the largest entries of each rank's bucket, a `fraction` of all: above 0 and at most 1.

    Every rank gathers those of all others, so that what arrives grows with the number of ranks. After a
    warm-up the fraction falls from 1 over as many steps again.

    Source
    ------
    Aji and Heafield 2017, "Sparse Communication for Distributed Gradient Descent".
    """

    sends_momenta = True

    def __init__(self, shapes: Shapes, warm_up: WarmUp, *, fraction: float):
        super().__init__(shapes, warm_up)
        self._fraction = fraction

    def _exchange(self, flat: Tensor, ranks: SumRanks) -> tuple[Tensor, Tensor]:
        count = max(1, math.ceil(self.warm_up.density(self._fraction) * flat.numel()))
        places = torch.topk(flat.abs(), count, sorted=False).indices
        values = flat[places]
        mine = joined_bytes([values.view(1, -1), places.to(torch.int32).view(1, -1)]).view(-1)
        total, width = torch.zeros_like(flat), count * flat.element_size()
        for message in ranks.all_gather(mine):
            at = message[width:].view(torch.int32).to(torch.int64)
            total.index_add_(0, at, message[:width].view(flat.dtype))
        sent = torch.zeros_like(flat)
        sent[places] = values
        return total, sent
