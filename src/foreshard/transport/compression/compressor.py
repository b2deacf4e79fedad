"""What every compressed sum has in common: error feedback, and the ranks that exchange what is left."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foreshard.transport.all_reduce import AllReduce, backend_all_reduce

Shapes = tuple[tuple[int, ...], ...]
"""Of the parameters in a bucket, one after another."""


class SumRanks:
    """The ranks of a process group as a compressed sum uses them.

    Parameters
    ----------
    group : process group
        As those of ``torch.distributed``.
    rank, size : int
    all_reduce : AllReduce, optional
        Instead of the backend's.
    """

    def __init__(self, group: Any, rank: int, size: int, all_reduce: AllReduce | None = None):
        self._group, self.rank, self.size = group, rank, size
        self.all_reduce = all_reduce or backend_all_reduce(group)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have one shape."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._group.allgather([found], [tensor]).wait()
        return found

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send row r to rank r; return the rows that all ranks have sent here, shape (ranks, ...)."""
        found = torch.empty_like(parts)
        self._group.alltoall_base(found, parts, [], []).wait()
        return found


@dataclass(slots=True)
class WarmUp:
    """Steps at the start whose gradients are summed whole, and the step that is trained now.

    Gradients change fast at first, and second moments of Adam need them as they are.

    Source
    ------
    Whole sums at first: Tang et al. 2021, "1-bit Adam"; ``start_powerSGD_iter`` of torch's PowerSGD hook. A
    density that falls exponentially, momentum of what waits: Lin et al. 2018, "Deep Gradient Compression".
    """

    steps: int = 0
    step: int = 0
    momentum: float = 0.0  # of the optimizer, 0 where it updates nothing on this rank

    @property
    def is_over(self) -> bool:
        """Whether gradients are compressed in this step."""
        return self.step >= self.steps

    def density(self, last: float) -> float:
        """Return the part of the entries to send: from all down to the last, over as many steps again.

        Examples
        --------
        >>> [WarmUp(steps=2, step=step).density(0.01) for step in (2, 3, 4, 5)]
        [1.0, 0.1, 0.01, 0.01]
        """
        done = min((self.step - self.steps) / self.steps, 1.0) if self.steps else 1.0
        return float(last**done)


class Compressor(ABC):
    """An approximate sum of one bucket over all ranks, step after step.

    What a step leaves out is added to the gradient of the next one, on the rank that has left it out, so that
    all of a gradient arrives in the end. In a warm-up sums are whole.

    Where a method `sends_momenta`, ranks send the momentum of their gradients after the warm-up: what has
    waited is then not spread once more by the momentum of the optimizer, which sees gradients that make its
    momentum what has arrived.

    Source
    ------
    Error feedback: Karimireddy et al. 2019, "Error Feedback Fixes SignSGD", algorithm 2; momenta: Lin et al.
    2018, "Deep Gradient Compression", section 3, and Tang et al. 2021, "1-bit Adam".
    """

    sends_momenta = False

    def __init__(self, shapes: Shapes, warm_up: WarmUp):
        self.shapes, self.warm_up = shapes, warm_up
        self.error: Tensor | None = None
        self._factor: float | None = None  # of momentum, as all ranks have agreed
        self._momentum: Tensor | None = None  # of this rank's gradients
        self._arrived: Tensor | None = None  # sum of the step before

    def sum(self, flat: Tensor, ranks: SumRanks) -> None:
        """Replace a gradient, one contiguous dimension, by the approximate sum, in place.

        Half precision is computed in float32.
        """
        if not self.warm_up.is_over:
            ranks.all_reduce(flat)
            return
        is_full = flat.dtype in (torch.float32, torch.float64)
        gradient = flat if is_full else flat.to(torch.float32)
        gradient = self._added(gradient, ranks)
        if self.error is not None:
            gradient = gradient + self.error
        approximation, sent = self._exchange(gradient, ranks)
        self.error = gradient - sent
        flat.copy_(self._seen(approximation))

    def _added(self, gradient: Tensor, ranks: SumRanks) -> Tensor:
        """Return what a gradient adds to what this rank has to send."""
        if self._factor is None:
            self._factor = self._agreed(ranks)
        if not self._factor:
            return gradient
        if self._momentum is None:
            self._momentum = gradient.clone()
        else:
            self._momentum.mul_(self._factor).add_(gradient)
        return self._momentum

    def _agreed(self, ranks: SumRanks) -> float:
        """Return the momentum of the optimizer; ranks that update nothing have none of their own."""
        if not self.sends_momenta or not self.warm_up.steps:
            return 0.0
        mine = torch.tensor([self.warm_up.momentum], dtype=torch.float64)
        return max(float(other) for other in ranks.all_gather(mine))

    def _seen(self, total: Tensor) -> Tensor:
        """Return the gradient that makes a sum of momenta the optimizer's momentum."""
        if not self._factor:
            return total
        before, self._arrived = self._arrived, total
        return total if before is None else total - self._factor * before

    @abstractmethod
    def _exchange(self, flat: Tensor, ranks: SumRanks) -> tuple[Tensor, Tensor]:
        """Return the approximate sum, and what of it is this rank's part."""


def split_sizes(shapes: Shapes) -> list[int]:
    """Return the elements of each shape."""
    return [torch.Size(shape).numel() for shape in shapes]


def padded(flat: Tensor, rows: int, multiple: int) -> Tensor:
    """Return the elements in so many rows of equal length, a multiple, with zeros at the end."""
    length = -(-flat.numel() // (rows * multiple)) * multiple
    whole = flat.new_zeros(rows * length)
    whole[: flat.numel()] = flat
    return whole.view(rows, length)


def joined_bytes(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors of one length as bytes side by side, shape (rows, bytes)."""
    return torch.cat([part.contiguous().view(torch.uint8).view(part.shape[0], -1) for part in parts], dim=1)
