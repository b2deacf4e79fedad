"""Random numbers in layers (dropout and the like) drawn per sample, so that they do not depend on the plan.

A draw is a function of (seed, step, position, layer, number of the call in the layer). Cutting the batch in
another way, moving the layer, or recomputing it in the backward draws the same numbers. Operations that draw
from the process's generator and cannot be done by sample are refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from foreshard.errors import SpecError
from foreshard.runtime.engine.counter_rng import Window, at_least, bits, key_of, normal, uniform
from foreshard.runtime.job.user_code import user_code

Windows = Callable[[int, tuple[int, ...]], Window | None]
"""(number of the draw, shape) -> part of a larger draw that this is; None for a draw of its own."""
_LAYER_RULE = "A layer takes what the layer before it gives, the first what inputs(batch) gives"
_PER_CHANNEL = (functional.dropout1d, functional.dropout2d, functional.dropout3d)
_REFUSED = frozenset(
    {
        "randint",
        "randint_like",
        "randperm",
        "multinomial",
        "normal",
        "poisson",
        "binomial",
        "normal_",
        "uniform_",
        "exponential_",
        "random_",
        "cauchy_",
        "geometric_",
        "log_normal_",
        "gumbel_softmax",
        "fractional_max_pool2d_with_indices",
        "fractional_max_pool3d_with_indices",
    }
)
_REFUSED_IN_TRAINING = frozenset(
    {
        "alpha_dropout",
        "feature_alpha_dropout",
        "feature_dropout",
        "alpha_dropout_",
        "feature_alpha_dropout_",
        "feature_dropout_",
        "rrelu",
    }
)
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


class SampleDraws(TorchFunctionMode):
    """Replaces operations that draw by draws per sample (row of the first dimension)."""

    def __init__(self, key: tuple[int, ...], positions: Sequence[int], windows: Windows | None = None):
        super().__init__()
        self._key, self._positions, self._calls, self._heads = key, positions, 0, False
        self._windows = windows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Draw by sample; run everything else as it is."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _DRAWS:
            return _DRAWS[name](self, func, *args, **kwargs)
        if name in _REFUSED or (name in _REFUSED_IN_TRAINING and _trains(args, kwargs)):
            raise _refusal(name)
        if name in _RECURRENT and len(args) > 6 and isinstance(args[5], float) and args[5] > 0 and args[6]:
            raise _refusal(f"{name} with dropout")
        return func(*args, **kwargs)

    def _dropout(
        self,
        func: Any,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool | None = None,
    ) -> Tensor:
        if not (training if train is None else train) or p == 0.0:
            return input
        shape = input.shape[:2] + (1,) * (input.dim() - 2) if func in _PER_CHANNEL else input.shape
        dropped = self._dropped(input, shape, p)
        return input.copy_(dropped) if inplace else dropped

    def _attention(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0.0:
            more = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            return func(query, key, value, **more)  # type: ignore[no-any-return]
        weights = _attention_weights(query, key, attn_mask, is_causal, scale, enable_gqa)
        if enable_gqa:
            value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        return self._dropped(weights, weights.shape, dropout_p) @ value

    def _heads_attention(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the attention of nn.MultiheadAttention, which draws inside; its rows are (sample, head)."""
        before, self._heads = self._heads, True
        try:
            with self:
                return _opened(func)(*args, **kwargs)
        finally:
            self._heads = before

    def _rand_like(self, func: Any, input: Tensor, **more: Any) -> Tensor:
        dtype = more.get("dtype") or input.dtype
        return self._number(input.shape, dtype, input.device, gaussian=func is torch.randn_like)

    def _rand(self, func: Any, *size: Any, **more: Any) -> Tensor:
        if more.get("generator") is not None or more.get("out") is not None:
            return func(*size, **more)  # type: ignore[no-any-return]
        given = more.get("size", size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        dtype = more.get("dtype") or torch.get_default_dtype()
        return self._number(given, dtype, more.get("device") or "cpu", gaussian=func is torch.randn)

    def _bernoulli(self, func: Any, input: Tensor, p: Any = None, **more: Any) -> Tensor:
        if more.get("generator") is not None or more.get("out") is not None:
            return func(input, p, **more) if p is not None else func(input, **more)  # type: ignore[no-any-return]
        chance = input if p is None else p
        drawn = self._number(input.shape, torch.float64, input.device, gaussian=False)
        return (drawn < chance).to(input.dtype)

    def _bernoulli_(self, func: Any, input: Tensor, p: Any = 0.5, **more: Any) -> Tensor:
        if more.get("generator") is not None:
            return func(input, p, **more)  # type: ignore[no-any-return]
        return input.copy_(self._number(input.shape, torch.float64, input.device, gaussian=False) < p)

    def _dropped(self, values: Tensor, shape: Sequence[int], p: float) -> Tensor:
        """Return 0 with probability p, else the value/(1 - p), by draws of a shape; rows by sample.

        For the backward a byte of each draw is kept.
        """
        kept = torch.where(at_least(self._bits(shape, values.device), p), values, 0.0)
        return kept if p >= 1.0 else kept / (1 - p)

    def _number(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, gaussian: bool
    ) -> Tensor:
        drawn = self._bits(shape, device)
        return normal(drawn, self._bits(shape, device), dtype) if gaussian else uniform(drawn, dtype)

    def _bits(self, shape: Sequence[int], device: torch.device | str) -> Tensor:
        rows, count = shape[0] if len(shape) else 0, len(self._positions)
        each = rows // count if self._heads and count else 1
        if rows != count * each:
            raise SpecError(
                f"draws for a tensor of {rows} rows and {count} samples",
                key="model",
                rule="Dropout and the like are applied to tensors whose first dimension is the sample",
                fix="Let the sample be the first dimension where the layer draws",
            )
        self._calls += 1
        keys = [key_of(*self._key, position, self._calls) for position in self._positions]
        window = None if self._windows is None else self._windows(self._calls, tuple(shape))
        if window is not None:
            whole, dim, first = window  # its first dimension is that of the rows
            window = (each, *whole[1:]), dim, first
        return bits(keys, (each, *shape[1:]), device, window).flatten(0, 1)


_DRAWS: dict[str, Callable[..., Any]] = {
    "dropout": SampleDraws._dropout,
    "dropout_": functools.partial(SampleDraws._dropout, inplace=True),
    "dropout1d": SampleDraws._dropout,
    "dropout2d": SampleDraws._dropout,
    "dropout3d": SampleDraws._dropout,
    "scaled_dot_product_attention": SampleDraws._attention,
    "multi_head_attention_forward": SampleDraws._heads_attention,
    "rand_like": SampleDraws._rand_like,
    "randn_like": SampleDraws._rand_like,
    "rand": SampleDraws._rand,
    "randn": SampleDraws._rand,
    "bernoulli": SampleDraws._bernoulli,
    "bernoulli_": SampleDraws._bernoulli_,
}


@contextmanager
def sample_randomness(
    *, seed: int, step: int, layer: int, positions: Sequence[int], windows: Windows | None = None
) -> Iterator[None]:
    """Make the draws of the body a function of the samples, not of the batch.

    Positions are those of the samples in the first dimension, in order. Where ranks compute the layer
    together, `windows` says which part of the whole layer's draw each of theirs is. A body that fails, or
    draws in a way that cannot be done by sample, is an error.
    """
    with user_code(f"layer {layer}", rule=_LAYER_RULE), SampleDraws((seed, step, layer), positions, windows):
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


@functools.cache
def _opened(func: FunctionType) -> FunctionType:
    """Return a function of torch that does not hand itself over to the mode, so that its parts do."""
    free = {**func.__globals__, "has_torch_function": lambda given: False}
    return FunctionType(func.__code__, free, func.__name__, func.__defaults__, func.__closure__)


def _trains(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return the training flag of a call; True where it has none."""
    flags = [*args[1:], kwargs.get("training"), kwargs.get("train")]
    return next((value for value in flags if isinstance(value, bool)), True)


def _refusal(name: str) -> SpecError:
    return SpecError(
        f"{name} draws from the process's generator: the result would depend on the plan",
        key="model",
        value=name,
        rule="Layers draw by dropout, rand, randn, rand_like, randn_like and bernoulli",
        fix="Draw by one of these",
    )
