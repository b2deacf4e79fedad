"""How long tensors of a pass live: what a device holds beside what an earlier one kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from foreshard.profile.tracing.operations import storage_of, tensors_of


@dataclass(slots=True)
class Lifetimes:
    """Operations of a backward, or of a forward alone, at which storages are made and read last.

    A gradient lives from the operation that makes it to the last one that reads it. Storages of the forward
    live on while a trace runs, so that no other takes their number.
    """

    # num_bytes, made, read: of each storage that the backward makes
    num_bytes: list[float] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    # the last operation that reads a storage of the forward
    last: dict[int, int] = field(default_factory=dict)
    _current: dict[int, int] = field(default_factory=dict)

    def add(self, at: int, read: Any, made: Any) -> None:
        """Add the operation of that number."""
        before = {storage_of(tensor) for tensor in _dense(read)}
        for storage in before:
            if storage in self._current:
                self.read[self._current[storage]] = at
            else:
                self.last[storage] = at
        for tensor in _dense(made):
            storage = storage_of(tensor)
            again = self._current.get(storage)
            if storage in before or (again is not None and self.made[again] == at):
                continue  # a view, written in place, or two results of one storage
            self._current[storage] = len(self.made)
            self.num_bytes.append(float(tensor.untyped_storage().nbytes()))
            self.made.append(at)
            self.read.append(at)

    def beside(
        self,
        layers: Sequence[int],
        kept: Sequence[Mapping[int, float]],
        gradients: Iterable[Any],
    ) -> list[float]:
        """Return the most bytes that the backward of each layer holds beyond what it and earlier ones kept.

        Negative where it holds less.

        Parameters
        ----------
        layers : sequence of int
            Layer of each operation.
        kept : sequence of mapping of int to float
            Bytes of each storage that a layer kept; they go with the operation that reads them last.
        gradients : iterable of tensors
            Of parameters: they stay, and are counted elsewhere.
        """
        count = len(layers)
        own = {self._current.get(storage_of(tensor)) for tensor in _dense(list(gradients))}
        change = np.zeros(count + 1)
        for i, (size, first, last) in enumerate(zip(self.num_bytes, self.made, self.read, strict=True)):
            if i not in own:
                change[first] += size
                change[last + 1] -= size
        alive, place = change.cumsum()[:count], np.asarray(layers, dtype=int)
        found: list[float] = []
        for layer, storages in reversed(list(enumerate(kept))):
            mine = np.flatnonzero(place == layer)
            gone = int(mine[-1]) if len(mine) else 0  # what nobody reads goes with its layer
            freed = np.zeros(count + 1)
            for storage, size in storages.items():
                freed[self.last.get(storage, gone) + 1] += size
            alive = alive - freed.cumsum()[:count]
            found.append(float(alive[mine].max()) if len(mine) else 0.0)
            alive = alive + sum(storages.values())  # what earlier layers read of it is there as long
        return found[::-1]


def _dense(values: Any) -> list[Any]:
    """Return the tensors of some values that have a storage; sparse gradients have none."""
    return [tensor for tensor in tensors_of(values) if tensor.layout is torch.strided]
