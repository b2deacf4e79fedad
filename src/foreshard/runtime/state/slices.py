"""Parameters in slices: how a stage of tensor-parallel ranks cuts them, and how slices are named.

A parameter that is cut lies in n equal slices, n being a multiple of every degree that holds it. The name of
slice i is the parameter's name and ``@i/n``; a name without that is the whole. The same names serve
gradients, moves and checkpoints, so that nothing else has to know at which degree a rank works.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foreshard.runtime.state.shard_keys import ParameterKey, ShardKey

Interval = tuple[int, int, int]
"""(first, past the last, of): slices of so many that a tensor holds."""
WHOLE: Interval = (0, 1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCut:
    """Where a parameter is cut: along a dimension.

    What lies fused along it (queries, keys, values) are blocks of relative sizes; each is cut by itself.
    """

    dim: int
    blocks: tuple[int, ...] = (1,)

    def divides(self, shape: Sequence[int], num: int) -> bool:
        """Return whether a tensor of a shape can be cut into so many slices."""
        size, whole = shape[self.dim], sum(self.blocks)
        return all(size * block % (whole * num) == 0 for block in self.blocks)

    def views(self, tensor: Tensor, lo: int, hi: int, of: int) -> list[Tensor]:
        """Return the parts of slices lo to hi of a tensor that holds `of` slices, block by block."""
        found, start, size = [], 0, tensor.shape[self.dim]
        for block in self.blocks:
            width = size * block // sum(self.blocks)
            found.append(tensor.narrow(self.dim, start + width * lo // of, width * (hi - lo) // of))
            start += width
        return found

    def taken(self, tensor: Tensor, lo: int, hi: int, of: int) -> Tensor:
        """Return slices lo to hi of a tensor that holds `of` slices."""
        if (lo, hi) == (0, of):
            return tensor
        return torch.cat(self.views(tensor, lo, hi, of), self.dim)

    def fill(self, tensor: Tensor, lo: int, hi: int, of: int, values: Tensor) -> None:
        """Replace slices lo to hi of a tensor that holds `of` slices."""
        places = self.views(tensor, lo, hi, of)
        parts = values.split([place.shape[self.dim] for place in places], self.dim)
        for place, part in zip(places, parts, strict=True):
            place.copy_(part)

    def joined(self, slices: Sequence[Tensor]) -> Tensor:
        """Return the whole of all its slices, in order.

        Examples
        --------
        >>> cut, whole = SliceCut(dim=0, blocks=(1, 1)), torch.arange(8)
        >>> cut.taken(whole, 1, 2, 2)
        tensor([2, 3, 6, 7])
        >>> cut.joined([cut.taken(whole, i, i + 1, 2) for i in range(2)])
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
        """
        by_slice = [self.views(part, 0, 1, 1) for part in slices]
        return torch.cat([part for parts in zip(*by_slice, strict=True) for part in parts], self.dim)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {"dim": self.dim, "blocks": list(self.blocks)}


def parse_cut(data: Mapping[str, Any]) -> SliceCut:
    """Return a cut from JSON, or raise ValueError."""
    dim, blocks = data["dim"], data["blocks"]
    are_ints = all(isinstance(n, int) and not isinstance(n, bool) for n in (dim, *blocks))
    if not blocks or not are_ints or dim < 0 or min(blocks) < 1:
        raise ValueError(f"{data!r} is not a cut")
    return SliceCut(dim=dim, blocks=tuple(blocks))


def slice_name(name: str, index: int, num: int) -> str:
    """Return the name of a slice.

    Examples
    --------
    >>> slice_name("up.weight", 1, 4), slice_name("up.weight", 0, 1)
    ('up.weight@1/4', 'up.weight')
    """
    return name if num == 1 else f"{name}@{index}/{num}"


def parse_name(name: str) -> tuple[str, int, int]:
    """Return the parameter's name, which slice, and of how many.

    Examples
    --------
    >>> parse_name("up.weight@1/4"), parse_name("up.weight")
    (('up.weight', 1, 4), ('up.weight', 0, 1))
    """
    whole, mark, position = name.rpartition("@")
    index, _, num = position.partition("/")
    if mark and index.isdecimal() and num.isdecimal():
        return whole, int(index), int(num)
    return name, 0, 1


def finer(shards: Iterable[ShardKey], counts: Mapping[ParameterKey, int]) -> Iterator[ShardKey]:
    """Yield shards cut into the given number of slices of each parameter."""
    for kind, layer, name in shards:
        whole, index, num = parse_name(name)
        each = counts.get((layer, whole), num) // num
        yield from ((kind, layer, slice_name(whole, index * each + i, num * each)) for i in range(each))


def common_slice_counts(shards: Iterable[ShardKey]) -> dict[ParameterKey, int]:
    """Return, by parameter that is cut, the least number of slices of which all its shards consist."""
    counts: dict[ParameterKey, int] = {}
    for _, layer, name in shards:
        whole, _, num = parse_name(name)
        if num > 1:
            counts[layer, whole] = math.lcm(num, counts.get((layer, whole), 1))
    return counts


def common(first: Interval, second: Interval) -> Interval:
    """Return the intersection of two intervals; empty where it ends at its beginning.

    Examples
    --------
    >>> common((0, 1, 2), (1, 2, 4)), common((0, 1, 2), (2, 3, 4))
    ((1, 2, 4), (2, 2, 4))
    """
    of = math.lcm(first[2], second[2])
    (a, b), (c, d) = ((i[0] * of // i[2], i[1] * of // i[2]) for i in (first, second))
    return max(a, c), max(max(a, c), min(b, d)), of


def within(part: Interval, holder: Interval) -> Interval:
    """Return the position of a part inside a tensor that holds an interval, in slices of that tensor.

    Examples
    --------
    >>> within((1, 2, 4), (0, 1, 2))
    (1, 2, 2)
    """
    of = math.lcm(part[2], holder[2])
    (lo, hi), (first, last) = ((i[0] * of // i[2], i[1] * of // i[2]) for i in (part, holder))
    return lo - first, hi - first, last - first
