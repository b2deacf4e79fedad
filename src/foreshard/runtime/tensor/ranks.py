"""The ranks that compute a layer together (tensor parallelism): a mesh of DTensors over their process group.

Every rank of them holds the same layers, some weights in parts. What enters a cut product is the same on all
of them and so is what leaves; the sum in between is theirs. With sequence parallelism what lies between the
products is cut over the sequence: it is put together before a product, and what is summed is cut again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from foreshard.errors import SpecError
from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.engine.gradient_sync import latest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_number = itertools.count()


class TensorRanks:
    """A rank's place among those of a stage that share out its weights, and their mesh.

    Cut modules keep a reference to it, so that a new generation of process groups reaches all of them.
    """

    def __init__(self) -> None:
        self.index, self.degree = 0, 1
        self.sequence = False
        self.bytes_summed: list[tuple[int, float]] | None = (
            None  # and which part of a sum: for virtual clocks
        )
        self._mesh: DeviceMesh | None = None
        self._meshes: dict[tuple[int, int], DeviceMesh] = {}
        self._tensors: Any = None
        self._group: Any = None
        self._backend: Any = None
        self._ranks: tuple[int, ...] = ()
        self._entered: tuple[Tensor, int, DTensor] | None = None

    def connect(self, group: Any, ranks: Sequence[int], rank: int, device: torch.device) -> None:
        """Make the mesh over a process group of one backend (gloo, NCCL).

        Parameters
        ----------
        group : ProcessGroup
            Of the ranks, in order.
        ranks : sequence of int
        rank : int
            One of them.
        device : torch.device
        """
        # a second to load, which ranks that compute alone are spared
        import torch.distributed.tensor as tensors
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.distributed_c10d import GroupName

        self.disconnect()
        self._tensors = tensors
        place, size = list(ranks).index(rank), len(ranks)
        self.index, self.degree, self._ranks, self._backend = place, size, tuple(ranks), group
        store = dist.HashStore()  # for what a group keeps apart from its backend: nothing
        whole = dist.ProcessGroup(store, place, size)
        kinds = dist.ProcessGroup.BackendType
        kind = kinds.NCCL if device.type == "cuda" else kinds.GLOO
        whole._set_default_backend(kind)
        whole._register_backend(torch.device(device.type), kind, group)
        number = next(_number)
        name = GroupName(f"foreshard-tensor-{number}")
        whole._set_group_name(name)
        torch._C._distributed_c10d._register_process_group(name, whole)
        if (size, place) not in self._meshes:
            # no default group: ranks are counted in this mesh. It equals no other in this process, or what
            # torch remembers of an operation would use another's group
            self._meshes[size, place] = DeviceMesh(
                device.type, list(range(size)), _init_backend=False, _rank=place
            )
            self._meshes[size, place]._thread_id = number
        self._group, self._mesh = whole, self._meshes[size, place]
        self._mesh._dim_group_names = [name]

    def disconnect(self) -> None:
        """Let go of the group."""
        if self._group is not None:
            torch._C._distributed_c10d._unregister_process_group(self._group.group_name)
        self._group = self._mesh = self._entered = self._backend = None
        self.index, self.degree, self._ranks = 0, 1, ()

    def forget(self) -> None:
        """Forget what entered last; called behind every layer."""
        self._entered = None

    def entering(self, tensor: Tensor) -> DTensor:
        """Return a tensor that is whole on every rank; its gradient is the sum of theirs.

        Products that take the same tensor (queries, keys, values) share it, and so one sum of gradients.
        """
        if isinstance(tensor, self._tensors.DTensor):
            return tensor
        last = self._entered
        if last is not None and last[0] is tensor and last[1] == tensor._version:
            return last[2]
        given = self._alike(tensor)
        self._count_backward(given, tensor.numel() * tensor.element_size())
        self._entered = (tensor, tensor._version, given)
        return given

    def part(self, tensor: Tensor, dim: int) -> DTensor:
        """Return the whole of which a tensor is this rank's part along a dimension."""
        cut = self._tensors.Shard(dim % tensor.dim())
        return self._tensors.DTensor.from_local(tensor, self._mesh, [cut], run_check=False)  # type: ignore[no-any-return]

    def own(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of the sequence of what all ranks have."""
        self.span(tensor.shape[1])
        found = self._alike(tensor).redistribute(placements=[self._tensors.Shard(1)]).to_local()
        self._count_backward(found, tensor.numel() * tensor.element_size(), 0.5)
        return found

    def span(self, length: int) -> tuple[int, int]:
        """Return where this rank's part of a sequence begins and ends.

        Raises
        ------
        SpecError
            When the sequence does not come out even.
        """
        if length % self.degree:
            raise SpecError(
                f"a sequence of {length} cannot be cut over {self.degree} ranks",
                key="groups.sp",
                value=length,
                rule="With sp the tp of a stage divides the length of every sequence",
                fix=f"Pad to a multiple of {self.degree} in collate, or set sp to false",
            )
        each = length // self.degree
        return each * self.index, each * (self.index + 1)

    def whole(self, own: Tensor) -> DTensor:
        """Return the sequence that ranks have parts of, for cut products: its gradient is summed and cut."""
        found = self.part(own, 1).redistribute(placements=[self._tensors.Replicate()])
        size = found.numel() * own.element_size()
        self._count(size, 0.5)
        self._count_backward(found, size, 0.5)
        return found  # type: ignore[no-any-return]

    def together(self, own: Tensor) -> Tensor:
        """Return the sequence that ranks have parts of, for what all of them compute alike."""
        return self.gathered(self.part(own, 1))

    def summed(self, parts: DTensor) -> Tensor:
        """Return what all ranks' parts sum up to: on every rank, or its part of the sequence."""
        if self.sequence:
            self.span(parts.shape[1])
            found = parts.redistribute(placements=[self._tensors.Shard(1)]).to_local()
            size = parts.numel() * found.element_size()
            self._count(size, 0.5)
            self._count_backward(found, size, 0.5)
            return found
        found = parts.redistribute(placements=[self._tensors.Replicate()]).to_local()
        self._count(found.numel() * found.element_size())
        return found

    def meet(self, clock: Clock) -> None:
        """Bring a virtual clock to where the slowest of these ranks and their links end an action."""
        if self._backend is None or not self.bytes_summed:
            return
        sizes, self.bytes_summed = self.bytes_summed, []
        latest(self._backend, now := torch.tensor([clock.now()], dtype=torch.float64))
        clock.received(float(now[0]) + sum(part * clock.reduced_s(size, self._ranks) for size, part in sizes))

    def addend(self, tensor: Tensor) -> DTensor:
        """Return the sum of which a tensor is this rank's part."""
        return self._tensors.DTensor.from_local(  # type: ignore[no-any-return]
            tensor, self._mesh, [self._tensors.Partial()], run_check=False
        )

    def gathered(self, parts: DTensor) -> Tensor:
        """Return all ranks' parts put together, on every rank."""
        found = parts.redistribute(placements=[self._tensors.Replicate()]).to_local()
        self._count(found.numel() * found.element_size(), 0.5)  # the second half of a ring that sums
        return found

    def _alike(self, tensor: Tensor) -> DTensor:
        return self._tensors.DTensor.from_local(  # type: ignore[no-any-return]
            tensor, self._mesh, [self._tensors.Replicate()], run_check=False
        )

    def _count_backward(self, tensor: Tensor, size: int, part: float = 1.0) -> None:
        """Count what the gradient of a tensor will cost; half a ring puts together, or sums and cuts."""
        if self.bytes_summed is not None and tensor.requires_grad:
            tensor.register_hook(lambda grad: self._count(size, part))

    def _count(self, size: int, part: float = 1.0) -> None:
        if self.bytes_summed is not None:
            self.bytes_summed.append((size, part))


def peers_of(
    ranks: Sequence[int], index: int, degree: int, *, sends: bool, parts: bool = False
) -> Sequence[int]:
    """Return the ranks of the other side of a boundary that one sends to, or the one it receives from.

    Both sides have the same tensor on all ranks: every rank gets it once.

    Parameters
    ----------
    ranks : sequence of int
        That compute together on the other side.
    index, degree : int
        Which of how many this one is on its side.
    sends : bool
    parts : bool
        Whether both sides have it in as many parts instead: each goes to its like.

    Examples
    --------
    >>> peers_of([4, 5], 0, 1, sends=True), peers_of([4, 5], 3, 4, sends=True)
    ([4, 5], [])
    >>> peers_of([4, 5], 3, 4, sends=False)
    [5]
    """
    if sends and not parts:
        return [rank for other, rank in enumerate(ranks) if other % degree == index]
    return [ranks[index % len(ranks)]]


def ranks_of(ranks: Sequence[int], inner: int, degree: int) -> tuple[int, ...]:
    """Return the ranks of a stage that compute the same samples together."""
    return tuple(ranks[inner * degree : (inner + 1) * degree])
