"""PowerSGD: a matrix as the product of two narrow ones, which one step of the power method improves."""

from __future__ import annotations

import torch
from torch import Tensor

from foreshard.comm.compression.methods import is_low_rank
from foreshard.transport.compression.compressor import Compressor, Shapes, SumRanks, WarmUp, split_sizes


class LowRank(Compressor):
    """Sums matrices by factors of a rank; what is smaller than its factors is summed whole.

    A parameter of more than two dimensions is a matrix of its first one by the rest. Both all-reduces of a
    bucket carry all of its matrices. The right factor of a step is the start of the next.

    Source
    ------
    Vogels, Karimireddy, Jaggi 2019, "PowerSGD", algorithm 1.
    """

    def __init__(self, shapes: Shapes, warm_up: WarmUp, *, rank: int):
        super().__init__(shapes, warm_up)
        self._rank = rank
        self._right: dict[int, Tensor] = {}

    def _exchange(self, flat: Tensor, ranks: SumRanks) -> tuple[Tensor, Tensor]:
        approximation, sent = torch.empty_like(flat), flat.clone()
        matrices: dict[int, Tensor] = {}
        whole: list[tuple[Tensor, Tensor]] = []
        sizes = split_sizes(self.shapes)
        views = zip(flat.split(sizes), approximation.split(sizes), strict=True)
        for number, (shape, (part, result)) in enumerate(zip(self.shapes, views, strict=True)):
            if is_low_rank(shape, self._rank):
                matrices[number] = part.view(shape[0], -1)
            else:
                whole.append((part, result))
        left = {i: m @ self._start(i, m) for i, m in matrices.items()}
        total = torch.cat([*(p.reshape(-1) for p in left.values()), *(part for part, _ in whole)])
        ranks.all_reduce(total)
        at = 0
        for number, product in left.items():
            summed = total[at : at + product.numel()].view_as(product)
            left[number], at = torch.linalg.qr(summed)[0], at + product.numel()
        for part, result in whole:
            result.copy_(total[at : at + part.numel()])
            at += part.numel()
        own = {number: m.T @ left[number] for number, m in matrices.items()}
        if own:
            self._sum_right(own, ranks)
        at_each = dict(enumerate(zip(approximation.split(sizes), sent.split(sizes), strict=True)))
        for number, part_of in own.items():
            result, mine = at_each[number]
            torch.matmul(left[number], self._right[number].T, out=result.view(matrices[number].shape))
            torch.matmul(left[number], part_of.T, out=mine.view(matrices[number].shape))
        return approximation, sent

    def _start(self, number: int, matrix: Tensor) -> Tensor:
        """Return the right factor that the power method starts from, the same on all ranks."""
        if number not in self._right:
            drawn = torch.Generator().manual_seed(number)
            start = torch.randn(matrix.shape[1], self._rank, generator=drawn, dtype=matrix.dtype)
            self._right[number] = torch.linalg.qr(start)[0]
        return self._right[number]

    def _sum_right(self, own: dict[int, Tensor], ranks: SumRanks) -> None:
        """Sum the right factors of all matrices at once."""
        total = torch.cat([factor.reshape(-1) for factor in own.values()])
        ranks.all_reduce(total)
        parts = total.split([factor.numel() for factor in own.values()])
        for (number, factor), part in zip(own.items(), parts, strict=True):
            self._right[number] = part.view_as(factor).clone()
