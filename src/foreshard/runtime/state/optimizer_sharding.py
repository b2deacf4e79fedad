"""Which rank of a stage updates which parameter, and which ranks keep what of it (ZeRO).

Whole parameters are assigned, largest first, to the rank with least load for its memory: an optimizer may
need the whole parameter, and memory may be uneven. Tensor-parallel ranks hold parts of weights; then the part
takes the place of the parameter, and ranks that hold the same part share the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from foreshard.runtime.state.layout import RankLayout, shares_updates
from foreshard.runtime.state.parameters import Parameters
from foreshard.runtime.state.shard_keys import ParameterKey, Shards
from foreshard.runtime.state.slices import Interval, common, parse_name, slice_name
from foreshard.spec.plan import Stage


def assign_updaters(
    ranks: Sequence[int],
    sizes: Mapping[ParameterKey, int],
    memory_bytes: Mapping[int, float] | None = None,
) -> dict[ParameterKey, int]:
    """Return the rank that updates each parameter.

    Parameters
    ----------
    ranks : sequence of int
        Of a stage.
    sizes : mapping of (layer, name) to elements
    memory_bytes : mapping of rank to bytes, optional
        To which loads are proportional; equal loads if not given.

    Examples
    --------
    >>> assign_updaters([3, 4], {(0, "a"): 4, (0, "b"): 3, (1, "c"): 2})
    {(0, 'a'): 3, (0, 'b'): 4, (1, 'c'): 4}
    """
    memory = memory_bytes or dict.fromkeys(ranks, 1.0)
    load = dict.fromkeys(ranks, 0.0)
    found: dict[ParameterKey, int] = {}
    for key in sorted(sizes, key=lambda k: (-sizes[k], k)):
        rank = min(ranks, key=lambda r: ((load[r] + sizes[key]) / memory[r], r))
        load[rank] += sizes[key]
        found[key] = rank
    return found


class OptimizerSharding:
    """Which rank updates which parameter under a layout, and which shards each rank keeps.

    The parameters of a stage are divided in proportion to the memory of its ranks, if it is known of all.
    """

    def __init__(
        self,
        layout: RankLayout,
        parameters: Parameters,
        memory_bytes: Mapping[int, float | None] | None = None,
    ):
        self.layout, self.parameters = layout, parameters
        self._updaters: dict[tuple[int, int], dict[ParameterKey, int]] = {}
        self._stages: dict[ParameterKey, list[tuple[int, int]]] = {}
        self._num_slices: dict[ParameterKey, int] = {}
        for g, group in enumerate(layout.plan.groups):
            for s, stage in enumerate(group.stages):
                own = parameters.of(layer for lo, hi in stage.layers for layer in range(lo, hi))
                if shares_updates(stage):
                    first = shard_peers(stage, 0)
                    updaters = assign_updaters(first, own, _memory_of(stage, memory_bytes or {}))
                    self._updaters[g, s] = {key: first.index(rank) for key, rank in updaters.items()}
                for key in own:
                    self._stages.setdefault(key, []).append((g, s))
                    if key in parameters.cuts:
                        parts = parameters.degree(key, stage.tp)
                        self._num_slices[key] = math.lcm(self._num_slices.get(key, 1), parts)

    def updater(self, rank: int, key: ParameterKey) -> int | None:
        """Return the rank of the same stage that updates a rank's part of a parameter.

        None where every rank that holds the parameter updates it.
        """
        seat, stage = self.layout.seats[rank], self.layout.stage_of(rank)
        updaters = self._updaters.get((seat.group, seat.stage))
        return None if updaters is None else shard_peers(stage, seat.tensor)[updaters[key]]

    def _slices(self, stage: Stage, tensor: int, key: ParameterKey) -> Interval:
        """Return which slices of a parameter a rank holds, of those that the plan cuts it into."""
        num, parts = self._num_slices.get(key, 1), self.parameters.degree(key, stage.tp)
        if parts == 1:
            return 0, num, num
        return num // parts * tensor, num // parts * (tensor + 1), num

    def names(self, rank: int, key: ParameterKey) -> list[ParameterKey]:
        """Return the slices of a parameter that a rank holds, by name."""
        lo, hi, num = self._slices(self.layout.stage_of(rank), self.layout.seats[rank].tensor, key)
        return [(key[0], slice_name(key[1], index, num)) for index in range(lo, hi)]

    def summed_by(self, key: ParameterKey) -> tuple[int, ...]:
        """Return the ranks that keep the gradient sum of a parameter, or of a slice, in rising order."""
        name, index, num = parse_name(key[1])
        whole = (key[0], name)
        found: set[int] = set()
        for g, s in self._stages[whole]:
            stage = self.layout.plan.groups[g].stages[s]
            for tensor in range(stage.tp):
                lo, hi, _ = common(self._slices(stage, tensor, whole), (index, index + 1, num))
                if lo < hi:
                    peers = shard_peers(stage, tensor)
                    if stage.zero >= 2 and shares_updates(stage):
                        peers = (peers[self._updaters[g, s][whole]],)
                    found.update(peers)
        return tuple(sorted(found))

    def adds(self, rank: int, key: ParameterKey) -> bool:
        """Return whether a rank's gradient counts.

        Tensor-parallel ranks that hold a parameter whole have the same gradient, of which the first counts,
        unless each rank has used the parameter for its part of the heads or of the sequence.
        """
        parts = self.parameters.degree(key, self.layout.stage_of(rank).tp)
        alike = parts == 1 and key not in self.parameters.shared and not self.layout.cuts_sequence(rank)
        return not alike or self.layout.seats[rank].tensor == 0

    def updated(self, rank: int) -> list[ParameterKey]:
        """Return the parameters that a rank updates, in whole or in part."""
        own = self.parameters.of(self.layout.layers_of(rank))
        return [key for key in own if self.updater(rank, key) in (None, rank)]

    def shards(self, rank: int) -> Shards:
        """Return what a rank holds between steps."""
        if rank not in self.layout.seats:
            return frozenset()
        stage, layers = self.layout.stage_of(rank), self.layout.layers_of(rank)
        updated = self.updated(rank)
        values = updated if stage.zero >= 3 and shares_updates(stage) else self.parameters.of(layers)
        return frozenset(
            [
                *(("frame", layer, "") for layer in layers),
                *(("value", *name) for key in values for name in self.names(rank, key)),
                *(("state", *name) for key in updated for name in self.names(rank, key)),
            ]
        )

    def shards_by_rank(self, ranks: Iterable[int]) -> dict[int, Shards]:
        """Return what every given rank holds between steps."""
        return {rank: self.shards(rank) for rank in ranks}


def _memory_of(stage: Stage, memory_bytes: Mapping[int, float | None]) -> dict[int, float] | None:
    """Return the memory of each data-parallel part by its first rank: the smallest of its ranks'."""
    known = [size for rank in stage.ranks if (size := memory_bytes.get(rank))]
    if len(known) < len(stage.ranks):
        return None
    return {stage.ranks[lo]: min(known[lo : lo + stage.tp]) for lo in range(0, len(known), stage.tp)}


def shard_peers(stage: Stage, tensor: int) -> tuple[int, ...]:
    """Return the ranks of a stage that hold the same parts of weights: one of each data-parallel part."""
    return stage.ranks[tensor :: stage.tp]
