"""Values of tensors that follow from nothing given: positions, masks, tables that a module makes itself.

Modules ask for such values (whether positions are consecutive, whether a mask is all ones), which the meta
device cannot answer. They also ask whether all values are finite, which is taken for granted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from foreshard.profile.tracing.operations import storage_of, tensors_of

aten = torch.ops.aten

_MOST = 2**20  # elements of a tensor whose values are kept
_SHAPE_ONLY = {
    getattr(aten, name).default
    for name in ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full")
}
_UNKNOWN = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


_OF_FINITE = {aten.isnan.default: False, aten.isinf.default: False}
_EQUAL = {aten.eq.Tensor: True, aten.ne.Tensor: False}  # of a tensor with itself: whether it is a number
_INFINITE = {aten.eq.Scalar: False, aten.ne.Scalar: True}
_OVER_ELEMENTS = (aten.all.default, aten.all.dim, aten.any.default, aten.any.dim)
_JOINED: dict[Any, Callable[..., bool]] = {
    aten.mul.Tensor: lambda a, b: a and b,
    aten.logical_and.default: lambda a, b: a and b,
    aten.bitwise_and.Tensor: lambda a, b: a and b,
    aten.logical_or.default: lambda a, b: a or b,
    aten.bitwise_or.Tensor: lambda a, b: a or b,
    aten.logical_not.default: lambda a: not a,
    aten.bitwise_not.default: lambda a: not a,
    **dict.fromkeys(_OVER_ELEMENTS, lambda a: a),
}


class Constants:
    """The values, by the place in memory that a tensor looks at.

    Attributes
    ----------
    finite : bool
        Whether the module was told that values are finite.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[Any, ...], torch.Tensor] = {}
        self._everywhere: dict[tuple[Any, ...], bool] = {}
        self.finite = False

    def scalar_of(self, tensor: Any) -> Any:
        """Return the number that a tensor of one element holds; None where it follows from what is given."""
        value = self._values.get(place_of(tensor))
        if value is not None:
            return value.item()
        answer = self._everywhere.get(place_of(tensor))
        self.finite |= answer is not None
        return answer

    def knows(self, tensor: Any) -> bool:
        """Return whether the values of a tensor follow from nothing given."""
        return place_of(tensor) in self._values

    def _note_finite(self, func: Any, args: Any, out: Any) -> None:
        """Note the answer, the same for every element, of a question after numbers that are not finite."""
        answer = None
        if func in _OF_FINITE:
            answer = _OF_FINITE[func]
        elif func in _EQUAL and place_of(args[0]) == place_of(args[1]):
            answer = _EQUAL[func]
        elif func in _INFINITE and args[1] in (math.inf, -math.inf):
            answer = _INFINITE[func]
        elif func in _JOINED:
            operands = args[:1] if func in _OVER_ELEMENTS else args
            asked = [self._everywhere.get(place_of(a)) for a in operands if isinstance(a, torch.Tensor)]
            if None not in asked and len(asked) == len(operands):
                answer = _JOINED[func](*asked)
        if answer is not None:
            self._everywhere[place_of(out)] = answer

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note the values that an operation makes, if it reads none that are not known."""
        self._note_finite(func, args, out)
        tensors, made = tensors_of((*args, *kwargs.values())), tensors_of(out)
        known = func in _SHAPE_ONLY or all(place_of(tensor) in self._values for tensor in tensors)
        random = torch.Tag.nondeterministic_seeded in func.tags or func in _UNKNOWN
        small = all(tensor.numel() <= _MOST for tensor in made)
        if known and small and not random and made:
            again = tree_map(self._on_cpu, (args, kwargs))
            values = tensors_of(func(*again[0], **again[1]))
            # an operation in place changes the values of all views, which share their memory as well
            self._values |= {place_of(tensor): value for tensor, value in zip(made, values, strict=True)}
        elif func._schema.is_mutable:
            self._forget([*tensors, *made])

    def _on_cpu(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found = self._values.get(place_of(value))
            return torch.empty(value.shape, dtype=value.dtype) if found is None else found
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def _forget(self, tensors: list[Any]) -> None:
        """Drop what is known of the memory of tensors, whichever view looks at it."""
        gone = {place_of(tensor)[0] for tensor in tensors}
        self._values = {place: value for place, value in self._values.items() if place[0] not in gone}
        self._everywhere = {place: value for place, value in self._everywhere.items() if place[0] not in gone}


def place_of(tensor: Any) -> tuple[Any, ...]:
    """Return what tensors that look alike at the same memory share."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    storage = storage_of(tensor)
    return storage, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride()
