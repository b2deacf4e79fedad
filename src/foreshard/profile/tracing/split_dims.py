"""A dimension that ranks share out, and how views of a tensor carry it along.

A dimension of outer x size x inner elements is split along its middle factor, which the ranks share out in
equal parts: three projections of 64 in one weight are 3 x 64 x 1, heads of 16 merged with their samples are
samples x heads x 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitDim:
    """Which dimension of a tensor is split."""

    dim: int
    # outer and size: factors of the dimension; the ranks share out `size`
    outer: int
    size: int
    starts: frozenset[int]  # storages of the weights that the split began with


class UnsplitError(Exception):
    """An operation that needs a whole tensor where there is a split one.

    Parameters
    ----------
    what : str
    starts : frozenset of int
        Weights that cannot be split, for this operation.
    """

    def __init__(self, what: str, starts: frozenset[int]):
        super().__init__(what)
        self.starts = starts


class FinerError(Exception):
    """A split that has to be made within each of so many equal parts of the weights' rows.

    Parameters
    ----------
    parts : int
    starts : frozenset of int
    """

    def __init__(self, parts: int, starts: frozenset[int]):
        super().__init__(parts)
        self.parts, self.starts = parts, starts


def joined(one: SplitDim, other: SplitDim, degree: int) -> SplitDim:
    """Return the split of two tensors of an operation, as dimensions of its result.

    Splits of one dimension are the same for a rank if both begin at the same place: 8 heads and 4 heads of
    keys, each repeated, are cut alike.
    """
    starts, size = one.starts | other.starts, gcd(one.size, other.size)
    if (one.dim, one.outer) != (other.dim, other.outer) or size % degree:
        raise UnsplitError("two splits that differ meet", starts)
    return SplitDim(dim=one.dim, outer=one.outer, size=size, starts=starts)


def viewed(split: SplitDim, old: Sequence[int], new: Sequence[int], degree: int) -> SplitDim:
    """Return the split of a tensor under another shape of the same elements.

    Examples
    --------
    >>> heads = viewed(SplitDim(dim=1, outer=1, size=64, starts=frozenset()), (10, 64), (10, 4, 16), 2)
    >>> heads.dim, heads.outer, heads.size
    (1, 1, 4)
    >>> merged = viewed(heads, (10, 4, 16), (40, 16), 2)
    >>> merged.dim, merged.outer, merged.size
    (0, 10, 4)
    """
    before, passed = prod(old[: split.dim]) * split.outer, 1
    for dim, length in enumerate(new):
        if not passed <= before < passed * length:
            passed *= length
            continue
        outer, rest = divmod(before, passed)
        room, over = divmod(length, outer)
        if not rest and not over and room % split.size == 0:
            return replace(split, dim=dim, outer=outer)
        if not rest and not over and split.size % room == 0:
            if room % degree:
                raise FinerError(room, split.starts)
            return replace(split, dim=dim, outer=outer, size=room)
        break
    raise UnsplitError(f"a view as {tuple(new)} cuts across ranks", split.starts)


def picked(split: SplitDim, length: int, lo: int, hi: int) -> SplitDim:
    """Return the split of elements [lo, hi) of the dimension that is split: whole blocks of it."""
    block = length // split.outer
    if lo % block == 0 and hi % block == 0:
        return replace(split, outer=(hi - lo) // block)
    parts, rest = divmod(length, hi - lo)
    if split.outer == 1 and not rest and lo % (hi - lo) == 0:
        raise FinerError(parts, split.starts)
    raise UnsplitError("a slice cuts across ranks", split.starts)


def local_shape(shape: Sequence[int], split: SplitDim | None, degree: int) -> tuple[int, ...]:
    """Return the shape of a rank's part."""
    if split is None:
        return tuple(shape)
    return tuple(length // degree if dim == split.dim else length for dim, length in enumerate(shape))


def local_tensor(tensor: Any, split: SplitDim | None, degree: int) -> Any:
    """Return a tensor like a rank's part: its dimensions lie in memory in the same order."""
    if split is None:
        return tensor
    shape, strides, step = local_shape(tensor.shape, split, degree), [0] * tensor.dim(), 1
    for dim in sorted(range(tensor.dim()), key=tensor.stride):
        if tensor.stride(dim):
            strides[dim], step = step, step * shape[dim]
    return tensor.new_empty_strided(shape, strides)
