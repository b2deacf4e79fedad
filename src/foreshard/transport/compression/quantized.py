"""Sums of numbers of few bits: signs with one scale, and 8 bits with a scale for every block."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foreshard.comm.compression.methods import BLOCK
from foreshard.transport.compression.compressor import (
    Compressor,
    Shapes,
    SumRanks,
    WarmUp,
    joined_bytes,
    padded,
    split_sizes,
)

_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest number of each format."""


class Signs(Compressor):
    """Sums the sign of every entry times the mean magnitude of its parameter on the rank.

    Source
    ------
    Bernstein et al. 2018, "signSGD"; scaled as in Karimireddy et al. 2019. Every rank gathers all signs.
    """

    sends_momenta = True

    def _exchange(self, flat: Tensor, ranks: SumRanks) -> tuple[Tensor, Tensor]:
        sizes = split_sizes(self.shapes)
        parts = flat.split(sizes)
        scales = torch.stack([part.abs().sum() / max(part.numel(), 1) for part in parts])
        bits = torch.from_numpy(np.packbits(flat.numpy() >= 0))
        width, each = scales.numel() * scales.element_size(), torch.tensor(sizes)
        total = torch.zeros_like(flat)
        mine = torch.cat([scales.view(torch.uint8), bits])
        for message in ranks.all_gather(mine):
            theirs = message[:width].clone().view(flat.dtype)
            total += _signed(message[width:], theirs, each, flat)
        return total, _signed(bits, scales, each, flat)


def _signed(bits: Tensor, scales: Tensor, sizes: Tensor, like: Tensor) -> Tensor:
    """Return the numbers that signs and scales mean."""
    unpacked = torch.from_numpy(np.unpackbits(bits.numpy(), count=like.numel())).to(like.dtype)
    return unpacked.mul_(2.0).sub_(1.0).mul_(torch.repeat_interleave(scales, sizes))


class EightBit(Compressor):
    """A reduce-scatter and an all-gather of 8-bit numbers, with a scale for every `BLOCK` of them.

    A rank quantizes its gradient once for all others, sums the part that it owns in full precision, and
    quantizes the sum. What that leaves out is its own error too. `kind` is int8 or float8_e4m3fn.
    """

    def __init__(self, shapes: Shapes, warm_up: WarmUp, *, kind: torch.dtype):
        super().__init__(shapes, warm_up)
        self._kind = kind

    def _exchange(self, flat: Tensor, ranks: SumRanks) -> tuple[Tensor, Tensor]:
        rows = padded(flat, ranks.size, BLOCK)
        message = self._encoded(rows)
        own = self._decoded(ranks.all_to_all(message), flat.dtype).sum(0, keepdim=True)
        second = self._encoded(own)
        sent = self._decoded(message, flat.dtype)
        sent[ranks.rank] -= (own - self._decoded(second, flat.dtype))[0]
        total = torch.cat([self._decoded(m, flat.dtype) for m in ranks.all_gather(second)])
        return total.view(-1)[: flat.numel()], sent.view(-1)[: flat.numel()]

    def _encoded(self, rows: Tensor) -> Tensor:
        """Return numbers and scales as bytes, shape (rows, bytes)."""
        blocks = rows.view(rows.shape[0], -1, BLOCK).to(torch.float32)
        scales = blocks.abs().amax(2) / _MAX[self._kind]
        scaled = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
        whole = scaled.round_() if self._kind == torch.int8 else scaled
        return joined_bytes([whole.to(self._kind).view(rows.shape[0], -1), scales])

    def _decoded(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers of a message, shape (rows, numbers)."""
        count = message.shape[1] * BLOCK // (BLOCK + 4)
        numbers = message[:, :count].contiguous().view(self._kind).view(len(message), -1, BLOCK)
        scales = message[:, count:].contiguous().view(torch.float32)
        return (numbers.to(torch.float32) * scales[..., None]).to(dtype).view(len(message), -1)
