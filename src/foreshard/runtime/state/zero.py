"""Messages between the ranks of a stage that shard parameters (ZeRO): values and gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foreshard.runtime.state.shard_keys import ParameterKey
from foreshard.spec.plan import Stage

Sharded = list[tuple[int, list[nn.Parameter]]]
"""Parameters by the place of their updater in the group, in an order that all ranks share."""
_LayerValues = tuple[int, Sharded]
"""(layer, its parameters)."""
_Broadcast = tuple[Any, Tensor, list[nn.Parameter]]
"""(work, values, parameters that take them)."""


class ZeroExchange:
    """Brings values and gradients to the ranks that need them.

    Level 1: after the update, new values to all. Level 2: after each backward, gradients to the rank that
    keeps them. Level 3: before each use, values to all, whose storage is freed after it; those of the next
    layer come while one computes. `ranks`, those of the group in order, are those of the stage that hold the
    same parts.
    """

    def __init__(
        self,
        group: Any,
        stage: Stage,
        ranks: Sequence[int],
        rank: int,
        updaters: Mapping[ParameterKey, int],
        parameters: Mapping[ParameterKey, nn.Parameter],
        users: Mapping[ParameterKey, Sequence[int]],
    ):
        self._group, self._level, self._place = group, stage.zero, list(ranks).index(rank)
        sharded = partial(_by_updater, ranks, updaters, parameters)
        self._all = sharded(list(parameters))
        self._chunks: list[Sharded] = []
        self._by_layer: list[dict[bool, list[_LayerValues]]] = []
        self._coming: deque[_LayerValues] = deque()
        self._under_way: list[_Broadcast] = []
        for lo, hi in stage.layers:
            used = [key for key in parameters if any(lo <= layer < hi for layer in users[key])]
            self._chunks.append(sharded(used))
            orders: dict[bool, list[_LayerValues]] = {}
            for backward, layers in ((False, range(lo, hi)), (True, range(hi - 1, lo - 1, -1))):
                left, orders[backward] = set(used), []
                for layer in layers:  # a tied parameter comes with the first of its layers
                    own = [key for key in used if key in left and layer in users[key]]
                    left.difference_update(own)
                    orders[backward].append((layer, sharded(own)))
            self._by_layer.append(orders)
        if self._level >= 3:
            self._free(self._all)

    def before(self, chunk: int, *, backward: bool) -> None:
        """Begin to get the values that a chunk uses, in the order in which its layers use them."""
        if self._level >= 3:
            self._coming = deque(self._by_layer[chunk][backward])
            self._begin_next()

    def await_layer(self, layer: int) -> None:
        """Wait for the values of a layer, and begin to get those of the next."""
        while any(layer == coming for coming, _ in self._coming):
            self._await_next()

    def await_all(self) -> None:
        """Wait for the values of all layers: those that this rank does not use pass to others."""
        while self._coming:
            self._await_next()

    def after(self, chunk: int, *, summed: bool) -> None:
        """Reduce gradients to their keepers if the chunk's backward made some, and free values."""
        self.await_all()
        if summed and self._level >= 2:
            self._reduce(self._chunks[chunk])
        if self._level >= 3:
            self._free(self._chunks[chunk])

    def after_update(self) -> None:
        """Get the values that other ranks have updated."""
        if self._level < 3:
            for place, parameters in self._all:
                self._finish(self._begin(place, parameters))

    def _begin_next(self) -> None:
        sharded = self._coming[0][1] if self._coming else []
        self._under_way = [self._begin(place, parameters) for place, parameters in sharded]

    def _await_next(self) -> None:
        arriving = self._under_way
        self._coming.popleft()
        self._begin_next()
        for broadcast in arriving:
            self._finish(broadcast)

    def _begin(self, place: int, parameters: list[nn.Parameter]) -> _Broadcast:
        """Begin to send values that this rank keeps, or to receive those of another rank."""
        if place == self._place:
            flat = torch.cat([p.data.reshape(-1) for p in parameters])
        else:
            size, first = sum(p.numel() for p in parameters), parameters[0]
            flat = torch.empty(size, dtype=first.dtype, device=first.device)
        return self._group.broadcast(flat, place), flat, [] if place == self._place else parameters

    def _finish(self, broadcast: _Broadcast) -> None:
        work, flat, parameters = broadcast
        work.wait()
        for parameter, values in _with_values(parameters, flat):
            restore_storage(parameter)
            parameter.data.copy_(values)

    def _reduce(self, sharded: Sharded) -> None:
        """Add the gradients of the other ranks to the bucket of the keeper."""
        for place, parameters in sharded:
            mine = place == self._place
            parts = (torch.zeros_like(p) if mine or p.grad is None else p.grad for p in parameters)
            flat = torch.cat([part.reshape(-1) for part in parts])
            self._group.reduce(flat, place).wait()
            for parameter, values in _with_values(parameters, flat):
                if mine:
                    assert parameter.grad is not None
                    parameter.grad += values
                else:
                    parameter.grad = None

    def _free(self, sharded: Sharded) -> None:
        for place, parameters in sharded:
            if place != self._place:
                for parameter in parameters:
                    parameter.untyped_storage().resize_(0)


def restore_storage(parameter: nn.Parameter) -> None:
    """Give a parameter storage; level 3 frees it between uses."""
    storage = parameter.untyped_storage()
    if storage.size() == 0:
        storage.resize_(parameter.numel() * parameter.element_size())


def _by_updater(
    ranks: Sequence[int],
    updaters: Mapping[ParameterKey, int],
    parameters: Mapping[ParameterKey, nn.Parameter],
    keys: Sequence[ParameterKey],
) -> Sharded:
    """Return parameters by the place of their updater and by dtype."""
    found = []
    for place, rank in enumerate(ranks):
        for dtype in sorted({parameters[key].dtype for key in keys}, key=str):
            own = [parameters[key] for key in sorted(keys) if updaters[key] == rank]
            if chosen := [parameter for parameter in own if parameter.dtype == dtype]:
                found.append((place, chosen))
    return found


def _with_values(parameters: Sequence[nn.Parameter], flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter with its values, in its shape, of what lies flat one after another."""
    parts = flat.split([p.numel() for p in parameters]) if parameters else ()
    return ((p, part.view(p.shape)) for p, part in zip(parameters, parts, strict=True))
