"""Dropout that does not know who computes it: every sample draws its own mask, by step, layer and call.

The mask of a sample is a function of (seed, step, position, layer, number of the call in the layer). Cutting the
batch in another way, moving the layer or computing it a second time for the backward gives the same mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from foreshard.errors import SpecError
from foreshard.runtime.own_code import own_code

_LAYER_RULE = "A layer takes what the layer before it gives, the first what inputs(batch) gives"
_MASK = (1 << 64) - 1
_DROPOUTS = {
    torch.nn.functional.dropout, torch.dropout, torch.nn.functional.dropout1d, torch.nn.functional.dropout2d,
    torch.nn.functional.dropout3d,
}  # fmt: skip
_PER_CHANNEL = {torch.nn.functional.dropout1d, torch.nn.functional.dropout2d, torch.nn.functional.dropout3d}


class _SampleDropout(TorchFunctionMode):
    """Replaces dropout by one with a mask per sample (row of the first dimension)."""

    def __init__(self, key: tuple[int, ...], positions: Sequence[int]):
        super().__init__()
        self._key, self._positions, self._calls = key, positions, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Draw the masks of dropout; let everything else pass."""
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return self._dropped(func, *args, **kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self._attention(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _dropped(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False,
        train: bool | None = None,
    ) -> Tensor:  # fmt: skip
        if not (training if train is None else train) or p == 0.0:
            return input
        shape = input.shape[:2] + (1,) * (input.dim() - 2) if func in _PER_CHANNEL else input.shape
        return input * self._mask(shape, p, input)

    def _attention(
        self, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if dropout_p == 0.0:
            return func(query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        weights = _attention_weights(query, key, attn_mask, is_causal, scale, enable_gqa)
        if enable_gqa:
            value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        return weights * self._mask(weights.shape, dropout_p, weights) @ value

    def _mask(self, shape: Sequence[int], p: float, like: Tensor) -> Tensor:
        """Return 0 with probability p, 1/(1 - p) else; rows by sample."""
        if shape[0] != len(self._positions):
            raise SpecError(
                f"dropout on a tensor of {shape[0]} rows for {len(self._positions)} samples", key="model",
                rule="The first dimension of what passes dropout is the sample",
            )  # fmt: skip
        self._calls += 1
        rows = []
        for position in self._positions:
            generator = torch.Generator().manual_seed(_mixed(*self._key, position, self._calls) >> 1)
            rows.append(torch.rand(tuple(shape[1:]), generator=generator) >= p)
        keep = torch.stack(rows).to(like.device)
        return keep.to(like.dtype) / (1 - p)


@contextmanager
def sample_randomness(*, seed: int, step: int, layer: int, positions: Sequence[int]) -> Iterator[None]:
    """Make dropout in the body a function of the samples, not of the batch.

    Parameters
    ----------
    seed, step, layer : int
    positions : sequence of int
        Of the samples in the first dimension, in order.
    """
    with own_code(f"layer {layer}", rule=_LAYER_RULE), _SampleDropout((seed, step, layer), positions):
        yield


def _attention_weights(
    query: Tensor, key: Tensor, mask: Any, causal: bool, scale: float | None, gqa: bool
) -> Tensor:
    if gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
    scores = query @ key.transpose(-2, -1) * (scale if scale is not None else query.size(-1) ** -0.5)
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~keep, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    return scores.softmax(-1)


def _mixed(*numbers: int) -> int:
    """Return 64 bits that depend on every number and its place (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state
