"""What the ranks of a stage that deal out parameters send each other (ZeRO): values and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foreshard.runtime.state.shard_keys import Key
from foreshard.spec.plan import Stage


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
        self,
        group: Any,
        stage: Stage,
        ranks: Sequence[int],
        rank: int,
        updaters: Mapping[Key, int],
        parameters: Mapping[Key, nn.Parameter],
        users: Mapping[Key, Sequence[int]],
    ):
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
