"""What moves when a plan changes: who sends what to whom.

Every rank reads the same table of who holds what and works out the same moves, so nothing is negotiated. The
runtime moves tensors by it, the lab's simulator times whole layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

from foreshard.spec.plan import Plan

Item = TypeVar("Item")
Moves = dict[tuple[int, int], list[Item]]
"""(source, target) -> items, in the order in which they are sent."""


def moves_between(
    held: Mapping[int, AbstractSet[Item]],
    wanted: Mapping[int, AbstractSet[Item]],
    *,
    layer_of: Callable[[Item], int],
    order: Callable[[Item], Any],
    weight: Callable[[Item], float] = lambda item: 1.0,
) -> tuple[Moves[Item], frozenset[int]]:
    """Return the moves that give every rank what it wants, and layers of which nobody holds an item.

    An item comes from the holder that has sent the least so far, the items of a layer from one rank as far as
    one has them; what a rank has already stays. Items that a rank lacks are sorted by `order`; `weight` is in
    bytes, or anything in proportion.
    """
    found: Moves[Item] = {}
    load = dict.fromkeys(held, 0.0)
    missing: set[int] = set()
    holders: dict[Item, list[int]] = {}
    for rank in sorted(held):
        for item in held[rank]:
            holders.setdefault(item, []).append(rank)
    for target in sorted(wanted):
        near: dict[int, int] = {}
        for item in sorted(wanted[target] - held.get(target, frozenset()), key=order):
            sources, layer = holders.get(item), layer_of(item)
            if not sources:
                missing.add(layer)
                continue
            size = weight(item)
            source = near.get(layer, -1)
            if source not in sources:
                source = min(sources, key=lambda rank: (load[rank] + size, rank))
                near[layer] = source
            load[source] += size
            found.setdefault((source, target), []).append(item)
    return dict(sorted(found.items())), frozenset(missing)


def layers_of(plan: Plan) -> dict[int, frozenset[int]]:
    """Return the layers that each rank of a plan holds."""
    return {
        rank: frozenset(layer for first, stop in stage.layers for layer in range(first, stop))
        for group in plan.groups
        for stage in group.stages
        for rank in stage.ranks
    }
