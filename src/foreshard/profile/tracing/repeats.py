"""Operations that a trace has seen before: a block repeated thirty times is worked out once.

An operation that writes to nothing it reads makes tensors whose shapes follow from what it reads, so that one
that reads the same shapes again makes the same ones again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from foreshard.profile.tracing.operations import Call, storage_of, tensors_of

_empty = torch.ops.aten.empty_strided.default
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SCALARS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)


@dataclass(frozen=True, slots=True)
class _Made:
    """What an operation made: (shape, strides, dtype) of each tensor, whether alone; and its kernels."""

    tensors: tuple[tuple[Any, ...] | None, ...]
    alone: bool
    calls: list[Call]


class Repeats:
    """What operations made, by what they read."""

    def __init__(self) -> None:
        self._made: dict[Any, _Made] = {}

    def key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation's results follow from; None where they do not follow from shapes alone."""
        if not _is_pure(func):
            return None
        try:
            return func, _key(args), _key(tuple(kwargs.items()))
        except _NoKeyError:
            return None

    def again(self, key: Any) -> tuple[Any, list[Call]] | None:
        """Return new tensors as an operation of this key made them, and its kernels; None the first time."""
        made = self._made.get(key) if key is not None else None
        if made is None:
            return None
        tensors = [
            None if known is None else _empty(known[0], known[1], dtype=known[2], device="meta")
            for known in made.tensors
        ]
        return (tensors[0] if made.alone else tuple(tensors)), made.calls

    def add(self, key: Any, args: Any, out: Any, calls: list[Call]) -> None:
        """Note what an operation made, unless results share memory with what it read or with each other."""
        alone = not isinstance(out, tuple)
        values = (out,) if alone else out
        if key is None or not all(value is None or isinstance(value, torch.Tensor) for value in values):
            return
        made = [value for value in values if value is not None]
        if any(tensor.layout is not torch.strided for tensor in made):
            return
        storages = [storage_of(tensor) for tensor in (*made, *tensors_of(args))]
        if len(set(storages[: len(made)])) < len(made) or set(storages[: len(made)]) & set(
            storages[len(made) :]
        ):
            return
        self._made[key] = _Made(
            tuple(value if value is None else (value.shape, value.stride(), value.dtype) for value in values),
            alone,
            calls,
        )


class _NoKeyError(Exception):
    """A value that is no shape, number or name."""


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        plain = value.__class__ in _PLAIN and value.layout is torch.strided and value.device.type == "meta"
        if not plain:
            raise _NoKeyError
        return value.shape, value.stride(), value.dtype, value.untyped_storage().nbytes()
    if isinstance(value, tuple | list):
        return tuple(map(_key, value))
    if isinstance(value, _SCALARS):
        return value.__class__, value  # 1, 1.0 and True are equal
    raise _NoKeyError


@cache
def _is_pure(func: Any) -> bool:
    """Return whether an operation neither writes to its arguments nor returns views of them."""
    schema = func._schema
    return all(value.alias_info is None for value in (*schema.arguments, *schema.returns))
