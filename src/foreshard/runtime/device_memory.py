"""The memory of an emulated device, enforced: a rank that holds more than is stated ends the run by name.

Counted are the tensors that a rank holds: parameters, buffers, gradients, optimizer states, and what is saved
from forwards to backwards. What a kernel needs for itself, and what is made again in a backward, is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from foreshard.errors import InfeasibleError
from foreshard.quantity import memory
from foreshard.runtime.state.rank_state import RankState


def does_not_fit(rank: int, bytes_held: float, limit_bytes: float, parts: str, file: str) -> InfeasibleError:
    """Return the error of a rank that holds more memory than is stated."""
    return InfeasibleError(
        f"rank {rank} holds {memory(bytes_held)} ({parts})",
        file=file,
        key="ranks.memory",
        value=limit_bytes,
        rule=f"The device of rank {rank} has {memory(limit_bytes)}",
        fix="Give it fewer layers or samples at once, recompute, shard states (zero), or state more memory",
    )


class DeviceMemory:
    """The memory of one rank.

    What is saved for backwards is counted in the first step of each plan, and taken to be the same in the
    others: counting takes time, which a clock of processor time would see. `saved_bytes` is there now,
    `most_saved_bytes` was at most under this plan.
    """

    def __init__(self, rank: int, limit_bytes: float, file: str):
        self._rank, self._limit_bytes, self._file = rank, limit_bytes, file
        self._buckets: Any = None
        self._state_bytes = 0
        self.saved_bytes = self.most_saved_bytes = 0
        self._saved: dict[int, int] = {}

    @contextmanager
    def within(self, state: RankState) -> Iterator[None]:
        """Raise where a step of the body makes the rank hold more than its device has."""
        own = dict(map(_storage_of, _tensors_of(state)))
        self._state_bytes = sum(own.values())
        if state.buckets is self._buckets:
            self._check(self.most_saved_bytes)
            yield
            return
        self._buckets, self.most_saved_bytes = state.buckets, 0
        self._check(0)
        with saved_tensors_hooks(
            lambda tensor: _Saved(tensor, self, counts=_storage_of(tensor)[0] not in own),
            lambda saved: saved.tensor,
        ):
            yield

    def add(self, storage: int, size_bytes: int) -> None:
        """Count a tensor saved for a backward; storages that are saved several times count once."""
        users = self._saved.get(storage, 0)
        self._saved[storage] = users + 1
        if not users:
            self.saved_bytes += size_bytes
            self.most_saved_bytes = max(self.most_saved_bytes, self.saved_bytes)
            self._check(self.saved_bytes)

    def drop(self, storage: int, size_bytes: int) -> None:
        """Count a saved tensor no more: its backward is done."""
        self._saved[storage] -= 1
        if not self._saved[storage]:
            del self._saved[storage]
            self.saved_bytes -= size_bytes

    def _check(self, saved_bytes: int) -> None:
        held = self._state_bytes + saved_bytes
        if held > self._limit_bytes:
            states = f"{memory(self._state_bytes)} parameters, gradients and optimizer states"
            parts = f"{states}, {memory(saved_bytes)} saved for backwards"
            raise does_not_fit(self._rank, held, self._limit_bytes, parts, self._file)


class _Saved:
    """A tensor saved for a backward, counted as long as the graph holds it.

    Detached: a graph that holds its own output is never freed.
    """

    def __init__(self, tensor: Tensor, memory: DeviceMemory, *, counts: bool):
        self.tensor = tensor.detach()
        self._memory = memory
        self._counted = _storage_of(tensor) if counts else None
        if self._counted is not None:
            memory.add(*self._counted)

    def __del__(self) -> None:
        if self._counted is not None:
            self._memory.drop(*self._counted)


def _tensors_of(state: RankState) -> Iterator[Tensor]:
    for module in state.modules.values():
        for parameter in module.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from module.buffers()
    yield from (bucket.flat for bucket in state.buckets)
    if state.optimizer is not None:
        for entries in state.optimizer.state.values():
            yield from (value for value in entries.values() if isinstance(value, Tensor))


def _storage_of(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's storage, by an address that lasts when ZeRO frees and fills it, and its bytes."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a DTensor its part
    storage = local.untyped_storage()
    return storage._cdata, storage.nbytes()
