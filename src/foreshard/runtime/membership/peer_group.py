"""Communication between ranks, whose failures are told from all others by where they are raised.

Every call of a process group goes through here. What fails here is a peer that is gone (`PeerLost`), and the
rank rebuilds; any other error, whatever its type and text, is one of the job or of the machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from foreshard.runtime.membership.progress import Progress
from foreshard.runtime.membership.wire import PeerLost

_NO_TAG = (1 << 30) + 1  # of no message of a step or a migration
_AT_ONCE = timedelta(milliseconds=1)


@contextlib.contextmanager
def communicating() -> Iterator[None]:
    """Turn errors of torch.distributed in the body into `PeerLost`."""
    try:
        yield
    except PeerLost:
        raise
    except RuntimeError as error:
        raise PeerLost(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}") from None


class Pending:
    """An operation under way."""

    def __init__(self, work: Any, peers: Sequence[int], progress: Progress):
        self._work, self._peers, self._progress = work, peers, progress

    def wait(self) -> None:
        """Wait until it is done."""
        with communicating(), self._progress.waiting(self._peers):
            self._work.wait()

    def is_completed(self) -> bool:
        """Return whether it is done."""
        return bool(self._work.is_completed())


class PeerGroup:
    """A process group of some ranks; every call raises `PeerLost` when one of them is gone.

    Place i of the backend is ``ranks[i]``; `place` is this rank's. Waiting is noted in `progress`.
    """

    def __init__(self, group: Any, ranks: Sequence[int], place: int, progress: Progress | None = None):
        self.backend, self.ranks, self.place = group, tuple(ranks), place
        self._progress = progress or Progress()
        self._others = tuple(rank for at, rank in enumerate(ranks) if at != place)

    @property
    def uses_nccl(self) -> bool:
        """Whether it carries tensors of accelerators."""
        return str(self.backend.name()) == "nccl"

    def allreduce(self, tensors: list[torch.Tensor], operation: Any = dist.ReduceOp.SUM) -> Pending:
        """Sum tensors over all ranks, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        return self.start(self.backend.allreduce, tensors, options)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Pending:
        """Gather the tensors of all ranks."""
        return self.start(self.backend.allgather, outputs, inputs)

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, gets: list[int], gives: list[int]
    ) -> Pending:
        """Send each rank its part of a tensor; equal parts of the first dimension where none are stated."""
        return self.start(self.backend.alltoall_base, output, given, gets, gives)

    def broadcast(self, tensor: torch.Tensor, place: int) -> Pending:
        """Copy a tensor from the rank at a place to all."""
        options = dist.BroadcastOptions()
        options.rootRank = place
        return self.start(self.backend.broadcast, [tensor], options)

    def reduce(self, tensor: torch.Tensor, place: int) -> Pending:
        """Sum tensors on the rank at a place."""
        options = dist.ReduceOptions()
        options.rootRank = place
        return self.start(self.backend.reduce, [tensor], options)

    def send(self, tensors: list[torch.Tensor], place: int, tag: int) -> Pending:
        """Send tensors to a place."""
        return self.start(self.backend.send, tensors, place, tag, peers=(self.ranks[place],))

    def recv(self, tensors: list[torch.Tensor], place: int, tag: int) -> Pending:
        """Receive tensors from a place."""
        return self.start(self.backend.recv, tensors, place, tag, peers=(self.ranks[place],))

    def start(self, begin: Callable[..., Any], *given: Any, peers: Sequence[int] | None = None) -> Pending:
        """Begin an operation of the backend."""
        with communicating():
            return Pending(begin(*given), self._others if peers is None else peers, self._progress)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Note that the rank waits for the others in the body."""
        return self._progress.waiting(self._others)

    def in_background(self) -> PeerGroup:
        """Return the group as another thread uses it, whose waiting is not that of the rank."""
        return PeerGroup(self.backend, self.ranks, self.place)

    def waiting_in_device(self) -> contextlib.AbstractContextManager[None]:
        """Note that the rank waits in the body for its device, which may itself wait for the others."""
        return self._progress.waiting()

    def cut(self) -> None:
        """Break all connections: a thread that waits on one gets its error.

        A receive that times out closes the connection to its peer, and gloo then fails whatever waits on it;
        to abort the group would only mark it.
        """
        for place in range(len(self.ranks)):
            if place != self.place and not self.uses_nccl:
                with contextlib.suppress(RuntimeError):
                    self.backend.recv([torch.empty(1)], place, _NO_TAG).wait(_AT_ONCE)


class TypedGroup(dist.ProcessGroup):
    """A group in the form that functional collectives and DTensors take; errors are `PeerLost`.

    torch calls it from C++ and in the backward: only a type survives on the way, no context does.
    """

    def __init__(self, group: PeerGroup, kind: Any, device: torch.device):
        super().__init__(group.place, len(group.ranks))  # type: ignore[call-arg]
        self._peers = group
        store = dist.HashStore()  # required by the constructor, unused by a group with a backend
        self._whole = dist.ProcessGroup(store, group.place, len(group.ranks))
        self._whole._set_default_backend(kind)
        self._whole._register_backend(device, kind, group.backend)

    def allreduce(self, tensors: Any, options: Any) -> Any:  # type: ignore[override]
        """Sum tensors."""
        return self._done("allreduce", tensors, options)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        """Gather the parts of all ranks."""
        options = options or dist.AllgatherOptions()  # type: ignore[attr-defined]
        return self._done("allgather_into_tensor_coalesced", outputs, inputs, options)

    def reduce_scatter_tensor_coalesced(  # type: ignore[override]
        self, outputs: Any, inputs: Any, options: Any
    ) -> Any:
        """Sum tensors, of which every rank keeps a part."""
        return self._done("reduce_scatter_tensor_coalesced", outputs, inputs, options)

    def _done(self, name: str, *given: Any) -> Any:
        works: list[Any] = []

        def begin() -> Any:
            works.append(getattr(self._whole, name)(*given))
            return works[0]

        self._peers.start(begin).wait()
        return works[0]
