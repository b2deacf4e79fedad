"""Which rank of a stage updates which parameter, and how the others get the new values (ZeRO).

Parameters are dealt out whole, largest first, to the rank that is least loaded for its room: any optimizer
works on whole parameters, and rooms may be uneven. Where ranks of a stage compute samples together and hold
weights in parts, it is the part that is whole, and ranks of equal parts deal it out among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foreshard.runtime.job import Job
from foreshard.runtime.layout import Layout
from foreshard.runtime.migrate import Held
from foreshard.runtime.sequence import SequenceLayer
from foreshard.runtime.slices import Cut, Interval, common, parsed, sliced
from foreshard.runtime.tensor_split import LayerSplit, split_of
from foreshard.spec.plan import Stage

Key = tuple[int, str]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The trainable parameters of a model; tied ones are one, under the first of their names.

    Attributes
    ----------
    sizes : dict of (layer, name) to elements
    users : dict of (layer, name) to layers
    splits : dict of layer to LayerSplit
        How layers are cut for tensor-parallel ranks; layers that are not have none.
    cuts : dict of (layer, name) to Cut
    shared : frozenset of (layer, name)
        Whole on every rank that computes together, where each has a part of the gradient.
    sequential : frozenset of layers
        That may take a part of the sequence.
    """

    sizes: dict[Key, int]
    users: dict[Key, tuple[int, ...]]
    splits: dict[int, LayerSplit] = field(default_factory=dict)
    cuts: dict[Key, Cut] = field(default_factory=dict)
    shared: frozenset[Key] = frozenset()
    sequential: frozenset[int] = frozenset()

    def degree(self, key: Key, degree: int) -> int:
        """Return how many parts ranks of a degree hold a parameter in: as many, or one."""
        return self.splits[key[0]].degree(key[1], degree) if key in self.cuts else 1

    def of(self, layers: Iterable[int]) -> dict[Key, int]:
        """Return the sizes of the parameters that layers use."""
        held = set(layers)
        return {key: size for key, size in self.sizes.items() if held.intersection(self.users[key])}


def parameters_of(job: Job) -> Parameters:
    """Return the trainable parameters of a job's model, from modules without storage."""
    first = {name: min(group) for group in map(tuple, job.tied) for name in group}
    sizes: dict[Key, int] = {}
    users: dict[Key, list[int]] = {}
    splits: dict[int, LayerSplit] = {}
    sequential = []
    for layer in range(job.num_layers):
        with torch.device("meta"):
            module = job.layer(layer)
        if isinstance(module, SequenceLayer):
            sequential.append(layer)
        split = split_of(module, job.tensor_plan, job.path, [own for at, own in first if at == layer])
        if split is not None:
            splits[layer] = split
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                key = first.get((layer, name), (layer, name))
                sizes[key] = parameter.numel()
                users.setdefault(key, []).append(layer)
    return Parameters(
        sizes=sizes, users={key: tuple(layers) for key, layers in users.items()}, splits=splits,
        cuts={(layer, name): cut for layer, split in splits.items() for name, cut in split.cuts.items()},
        shared=frozenset((layer, name) for layer, split in splits.items() for name in split.shared),
        sequential=frozenset(sequential),
    )  # fmt: skip


class Deal:
    """Which rank updates which parameter under a layout, and who keeps what.

    Parameters
    ----------
    layout : Layout
    parameters : Parameters
    rooms : mapping of rank to bytes, optional
        Memory, in proportion to which a stage deals out its parameters if it is known of all its ranks.
    """

    def __init__(
        self, layout: Layout, parameters: Parameters, rooms: Mapping[int, float | None] | None = None
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

    def pieces(self, rank: int) -> Held:
        """Return what a rank holds between steps."""
        if rank not in self.layout.seats:
            return frozenset()
        stage, layers = self.layout.stage_of(rank), self.layout.layers_of(rank)
        updated = self.updated(rank)
        values = updated if stage.zero >= 3 and is_dealt(stage) else self.parameters.of(layers)
        return frozenset([
            *(("frame", layer, "") for layer in layers),
            *(("value", *name) for key in values for name in self.names(rank, key)),
            *(("state", *name) for key in updated for name in self.names(rank, key)),
        ])  # fmt: skip


def _room_of(stage: Stage, rooms: Mapping[int, float | None]) -> dict[int, float] | None:
    """Return the room of each data-parallel part by its first rank: that of the least of its ranks."""
    known = [room for rank in stage.ranks if (room := rooms.get(rank))]
    if len(known) < len(stage.ranks):
        return None
    return {
        row[0]: min(known[lo : lo + stage.tp])
        for lo in range(0, len(known), stage.tp) for row in [stage.ranks[lo : lo + stage.tp]]
    }  # fmt: skip


def equals_of(stage: Stage, tensor: int) -> tuple[int, ...]:
    """Return the ranks of a stage that hold the same parts: one of each data-parallel part."""
    return stage.ranks[tensor :: stage.tp]


def is_dealt(stage: Stage) -> bool:
    """Return whether the ranks of a stage share out the updating."""
    return stage.zero >= 1 and stage.inner_dp > 1


class Shards:
    """What the ranks of a stage send each other because each keeps a part only.

    Level 1: after the update, new values. Level 2: after each backward, gradients to the rank that keeps
    them. Level 3: before each use, values, whose storage is given back after it.

    Parameters
    ----------
    group : ProcessGroup
        Of the ranks of the stage that hold the same parts, in order.
    stage : Stage
    ranks : sequence of int
        Those.
    rank : int
    updaters : mapping of (layer, name) to rank
    parameters : mapping of (layer, name) to Parameter
    users : mapping of (layer, name) to layers
    """

    def __init__(
        self, group: Any, stage: Stage, ranks: Sequence[int], rank: int, updaters: Mapping[Key, int],
        parameters: Mapping[Key, nn.Parameter], users: Mapping[Key, Sequence[int]],
    ):  # fmt: skip
        self._group, self._level, self._place = group, stage.zero, list(ranks).index(rank)
        self._all = _by_place(ranks, updaters, parameters, list(parameters))
        self._chunks = []
        for lo, hi in stage.layers:
            used = [key for key in parameters if any(lo <= layer < hi for layer in users[key])]
            self._chunks.append(_by_place(ranks, updaters, parameters, used))
        if self._level >= 3:
            self._give_back(self._all)

    def before(self, chunk: int) -> None:
        """Get the values that a chunk uses."""
        if self._level >= 3:
            self._spread(self._chunks[chunk])

    def after(self, chunk: int, *, summed: bool) -> None:
        """Send gradients to who keeps them, where the chunk's backward made some; give back values."""
        if summed and self._level >= 2:
            self._collect(self._chunks[chunk])
        if self._level >= 3:
            self._give_back(self._chunks[chunk])

    def updated(self) -> None:
        """Get the values that other ranks have updated."""
        if self._level < 3:
            self._spread(self._all)

    def _spread(self, dealt: Sequence[tuple[int, list[nn.Parameter]]]) -> None:
        for place, parameters in dealt:
            mine = place == self._place
            if mine:
                flat = torch.cat([p.data.reshape(-1) for p in parameters])
            else:
                flat = torch.empty(
                    sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
                )
            options = dist.BroadcastOptions()
            options.rootRank = place
            self._group.broadcast([flat], options).wait()
            if not mine:
                _fill(parameters, flat)

    def _collect(self, dealt: Sequence[tuple[int, list[nn.Parameter]]]) -> None:
        """Sum what the others have of a gradient into the bucket of who keeps it."""
        for place, parameters in dealt:
            mine = place == self._place
            parts = [
                torch.zeros(p.numel(), dtype=p.dtype, device=p.device)
                if mine or p.grad is None
                else p.grad.reshape(-1)
                for p in parameters
            ]
            flat = torch.cat(parts)
            options = dist.ReduceOptions()
            options.rootRank = place
            self._group.reduce([flat], options).wait()
            if mine:
                _add(parameters, flat)
            else:
                for parameter in parameters:
                    parameter.grad = None

    def _give_back(self, dealt: Sequence[tuple[int, list[nn.Parameter]]]) -> None:
        for place, parameters in dealt:
            if place != self._place:
                for parameter in parameters:
                    parameter.untyped_storage().resize_(0)


def _by_place(
    ranks: Sequence[int],
    updaters: Mapping[Key, int],
    parameters: Mapping[Key, nn.Parameter],
    keys: Sequence[Key],
) -> list[tuple[int, list[nn.Parameter]]]:
    """Return parameters by the place of their updater and by dtype, in an order that all ranks agree on."""
    found = []
    for place, rank in enumerate(ranks):
        for dtype in sorted({parameters[key].dtype for key in keys}, key=str):
            chosen = [
                parameters[k] for k in sorted(keys) if updaters[k] == rank and parameters[k].dtype == dtype
            ]
            if chosen:
                found.append((place, chosen))
    return found


def _fill(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    offset = 0
    for parameter in parameters:
        size = parameter.numel()
        storage = parameter.untyped_storage()
        if storage.size() == 0:
            storage.resize_(size * parameter.element_size())
        parameter.data.copy_(flat[offset : offset + size].view_as(parameter))
        offset += size


def _add(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    offset = 0
    for parameter in parameters:
        size = parameter.numel()
        assert parameter.grad is not None
        parameter.grad += flat[offset : offset + size].view_as(parameter)
        offset += size
