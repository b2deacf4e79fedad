"""Batches and what layers pass on, whatever they are made of: as a tuple, on a device, in a precision."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return what a layer takes or gives as a tuple."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def moved(value: Any, device: torch.device) -> Any:
    """Return a batch on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(moved(item, device) for item in value)
    return value


class _Handed(torch.autograd.Function):
    """The same values as a new tensor: a leaf that needs a gradient cannot be changed in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def handed(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return leaves as the first layer behind a cut takes them: it may change them in place."""
    return tuple(_Handed.apply(t) if isinstance(t, Tensor) and t.requires_grad else t for t in values)


def computing_in(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which layers and the loss compute: autocast for bf16 and fp16."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def loss_input(outputs: tuple[Any, ...] | list[Tensor], precision: str) -> Any:
    """Return what the loss takes of the last layer's outputs; sums over tokens leave the range of fp16."""
    if precision == "fp16":
        outputs = [t.float() if t.dtype is torch.float16 else t for t in outputs]
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
