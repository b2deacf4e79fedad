"""Counter-based random numbers: a function of key and place, without state, the same on every device.

The numbers of a row are the finaliser of splitmix64 over key + place x golden ratio, in 64-bit integers,
which all devices compute alike. Rows of different keys do not depend on each other or on how rows are
batched.

Source
------
Steele, Lea and Flood 2014, fast splittable pseudorandom number generators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BATCHED = 1 << 24
"""Numbers computed together (128 MiB of int64); more go row by row, to bound memory."""


def key_of(*numbers: int) -> int:
    """Return 64 bits that depend on every number and its place."""
    state = 0
    for number in numbers:
        state = (state ^ number) + _GOLDEN & _MASK
        state = (state ^ state >> 30) * _FIRST & _MASK
        state = (state ^ state >> 27) * _SECOND & _MASK
        state ^= state >> 31
    return state


Window = tuple[Sequence[int], int, int]
"""Of a row that is part of a larger one: shape of the whole, dimension of the cut, first index."""


def bits(
    keys: Sequence[int],
    shape: Sequence[int],
    device: torch.device | str = "cpu",
    window: Window | None = None,
) -> Tensor:
    """Return 64 random bits as int64 for every element of rows of a shape; every row has a key.

    With a window rows are parts of larger ones, and get the bits that these would get there.
    """
    count = math.prod(shape)
    if len(keys) > 1 and len(keys) * count > _BATCHED:
        return torch.cat([bits([key], shape, device, window) for key in keys])
    place = _places(shape, device, window).mul_(_signed(_GOLDEN))
    start = torch.tensor([_signed(key) for key in keys], dtype=torch.int64).to(device)
    value = place + start[:, None]
    if value.is_cpu:
        _finish_on_host(value)
    else:
        _finish(value)
    return value.view(len(keys), *shape)


def _finish(value: Tensor) -> None:
    """Apply the finaliser of splitmix64 in place; signed numbers shift in their sign, which is cleared."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        value ^= (value >> shift).bitwise_and_((1 << 64 - shift) - 1)
        value *= _signed(factor)
    value ^= (value >> 31).bitwise_and_((1 << 33) - 1)


def _finish_on_host(value: Tensor) -> None:
    """Do the same by numpy, whose unsigned shifts and products take half of torch's time on a processor."""
    words = value.numpy().view(np.uint64)
    shifted = np.empty_like(words)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        words ^= np.right_shift(words, np.uint64(shift), out=shifted)
        words *= np.uint64(factor)
    words ^= np.right_shift(words, np.uint64(31), out=shifted)


def _places(shape: Sequence[int], device: torch.device | str, window: Window | None) -> Tensor:
    if window is None:
        return torch.arange(math.prod(shape), dtype=torch.int64, device=device)
    whole, dim, first = window
    all_places = torch.arange(math.prod(whole), dtype=torch.int64, device=device).view(*whole)
    return all_places.narrow(dim, first, shape[dim]).reshape(-1)


def at_least(drawn: Tensor, p: float) -> Tensor:
    """Return where uniform numbers of these bits are at least p."""
    if p >= 1.0:
        return torch.zeros_like(drawn, dtype=torch.bool)
    return drawn >= int(p * 2.0**64) - 2**63


def uniform(drawn: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uniform numbers in [0, 1) of these bits."""
    width = 53 if dtype is torch.float64 else 24 if dtype is torch.float32 else 8
    return ((drawn >> 64 - width) + 2 ** (width - 1)).to(dtype) * 2.0**-width


def normal(drawn: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers of two draws of bits.

    Source
    ------
    Box and Muller 1958.
    """
    radius = (-2.0 * torch.log1p(-uniform(drawn, torch.float64))).sqrt()
    return (radius * torch.cos(2.0 * math.pi * uniform(second, torch.float64))).to(dtype)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
