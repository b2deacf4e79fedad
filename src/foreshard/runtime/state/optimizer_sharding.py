"""Which rank of a stage updates which parameter, and who keeps what of it (ZeRO).

Parameters are dealt out whole, largest first, to the rank that is least loaded for its room: any optimizer
works on whole parameters, and rooms may be uneven. Where ranks of a stage compute samples together and hold
weights in parts, it is the part that is whole, and ranks of equal parts deal it out among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from foreshard.runtime.state.layout import RankLayout
from foreshard.runtime.state.parameters import Parameters
from foreshard.runtime.state.shard_keys import Held, Key
from foreshard.runtime.state.slices import Interval, common, parsed, sliced
from foreshard.spec.plan import Stage


def updater_of(
    ranks: Sequence[int], sizes: Mapping[Key, int], room: Mapping[int, float] | None = None
) -> dict[Key, int]:
    """Return the rank that updates each parameter.

    Parameters
    ----------
    ranks : sequence of int
        Of a stage.
    sizes : mapping of (layer, name) to elements
    room : mapping of rank to bytes, optional
        In proportion to which states are dealt; equal where not given.

    Examples
    --------
    >>> updater_of([3, 4], {(0, "a"): 4, (0, "b"): 3, (1, "c"): 2})
    {(0, 'a'): 3, (0, 'b'): 4, (1, 'c'): 4}
    """
    load = dict.fromkeys(ranks, 0.0)
    found: dict[Key, int] = {}
    for key in sorted(sizes, key=lambda k: (-sizes[k], k)):
        rank = min(ranks, key=lambda r: ((load[r] + sizes[key]) / (room[r] if room else 1.0), r))
        load[rank] += sizes[key]
        found[key] = rank
    return found


class OptimizerSharding:
    """Which rank updates which parameter under a layout, and who keeps what.

    Parameters
    ----------
    layout : RankLayout
    parameters : Parameters
    rooms : mapping of rank to bytes, optional
        Memory, in proportion to which a stage deals out its parameters if it is known of all its ranks.
    """

    def __init__(
        self, layout: RankLayout, parameters: Parameters, rooms: Mapping[int, float | None] | None = None
    ):
        self.layout, self.parameters = layout, parameters
        self._dealt: dict[tuple[int, int], dict[Key, int]] = {}
        self._stages: dict[Key, list[tuple[int, int]]] = {}
        self._grain: dict[Key, int] = {}
        for g, group in enumerate(layout.plan.groups):
            for s, stage in enumerate(group.stages):
                own = parameters.of(layer for lo, hi in stage.layers for layer in range(lo, hi))
                if is_dealt(stage):
                    first = equals_of(stage, 0)
                    dealt = updater_of(first, own, _room_of(stage, rooms or {}))
                    self._dealt[g, s] = {key: first.index(rank) for key, rank in dealt.items()}
                for key in own:
                    self._stages.setdefault(key, []).append((g, s))
                    if key in parameters.cuts:
                        parts = parameters.degree(key, stage.tp)
                        self._grain[key] = math.lcm(self._grain.get(key, 1), parts)

    def updater(self, rank: int, key: Key) -> int | None:
        """Return the rank of a rank's stage that updates its part of a parameter; None where it does itself.

        As do all others that hold one.
        """
        seat, stage = self.layout.seats[rank], self.layout.stage_of(rank)
        dealt = self._dealt.get((seat.group, seat.stage))
        return None if dealt is None else equals_of(stage, seat.tensor)[dealt[key]]

    def slices(self, rank: int, key: Key) -> Interval:
        """Return which slices of a parameter a rank holds, of those that the plan cuts it into."""
        return self._slices(self.layout.stage_of(rank), self.layout.seats[rank].tensor, key)

    def _slices(self, stage: Stage, tensor: int, key: Key) -> Interval:
        num, parts = self._grain.get(key, 1), self.parameters.degree(key, stage.tp)
        if parts == 1:
            return 0, num, num
        return num // parts * tensor, num // parts * (tensor + 1), num

    def names(self, rank: int, key: Key) -> list[Key]:
        """Return the slices of a parameter that a rank holds, by name."""
        lo, hi, num = self.slices(rank, key)
        return [(key[0], sliced(key[1], index, num)) for index in range(lo, hi)]

    def summed_by(self, key: Key) -> tuple[int, ...]:
        """Return the ranks that keep the sum of the gradient of a parameter, or a slice, rising."""
        whole, index, num = parsed(key[1])
        found: set[int] = set()
        for g, s in self._stages[key[0], whole]:
            stage = self.layout.plan.groups[g].stages[s]
            for tensor in range(stage.tp):
                lo, hi, _ = common(self._slices(stage, tensor, (key[0], whole)), (index, index + 1, num))
                if lo < hi:
                    equals = equals_of(stage, tensor)
                    one = stage.zero >= 2 and is_dealt(stage)
                    found.update((equals[self._dealt[g, s][key[0], whole]],) if one else equals)
        return tuple(sorted(found))

    def adds(self, rank: int, key: Key) -> bool:
        """Return whether a rank's gradient counts.

        What ranks that compute together hold whole has the same gradient on all of them, unless each has
        used it for its part of the sequence.
        """
        parts = self.parameters.degree(key, self.layout.stage_of(rank).tp)
        alike = parts == 1 and key not in self.parameters.shared and not self.layout.cuts_sequence(rank)
        return not alike or self.layout.seats[rank].tensor == 0

    def updated(self, rank: int) -> list[Key]:
        """Return the parameters that a rank updates, in whole or in part."""
        own = self.parameters.of(self.layout.layers_of(rank))
        return [key for key in own if self.updater(rank, key) in (None, rank)]

    def wanted(self, ranks: Iterable[int]) -> dict[int, Held]:
        """Return what every rank that is there holds between steps."""
        return {rank: self.pieces(rank) for rank in ranks}

    def pieces(self, rank: int) -> Held:
        """Return what a rank holds between steps."""
        if rank not in self.layout.seats:
            return frozenset()
        stage, layers = self.layout.stage_of(rank), self.layout.layers_of(rank)
        updated = self.updated(rank)
        values = updated if stage.zero >= 3 and is_dealt(stage) else self.parameters.of(layers)
        return frozenset(
            [
                *(("frame", layer, "") for layer in layers),
                *(("value", *name) for key in values for name in self.names(rank, key)),
                *(("state", *name) for key in updated for name in self.names(rank, key)),
            ]
        )


def _room_of(stage: Stage, rooms: Mapping[int, float | None]) -> dict[int, float] | None:
    """Return the room of each data-parallel part by its first rank: that of the least of its ranks."""
    known = [room for rank in stage.ranks if (room := rooms.get(rank))]
    if len(known) < len(stage.ranks):
        return None
    return {
        row[0]: min(known[lo : lo + stage.tp])
        for lo in range(0, len(known), stage.tp)
        for row in [stage.ranks[lo : lo + stage.tp]]
    }


def equals_of(stage: Stage, tensor: int) -> tuple[int, ...]:
    """Return the ranks of a stage that hold the same parts: one of each data-parallel part."""
    return stage.ranks[tensor :: stage.tp]


def is_dealt(stage: Stage) -> bool:
    """Return whether the ranks of a stage share out the updating."""
    return stage.zero >= 1 and stage.inner_dp > 1
