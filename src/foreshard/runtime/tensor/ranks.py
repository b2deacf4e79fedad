"""The ranks that compute a layer together (tensor parallelism): a mesh of DTensors over their process group.

All of them hold the same layers, some weights in parts. The input of a cut product is the same on all ranks,
and so is its output, after a sum over them. With sequence parallelism the stream between the products is cut
over the sequence: it is gathered before a product, and the sum is scattered after it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from foreshard.errors import SpecError
from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.engine.gradient_sync import latest
from foreshard.runtime.membership.peer_group import PeerGroup, TypedGroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

_number = itertools.count()
_HALF_RING = 0.5
"""Of a ring all-reduce: a reduce-scatter or an all-gather."""


class TensorRanks:
    """A rank's place among the tensor-parallel ranks of its stage, and their mesh.

    Cut modules keep a reference to it, so that a new generation of process groups reaches all of them.
    """

    def __init__(self) -> None:
        self.index, self.degree = 0, 1
        self.sequence = False
        self.bytes_summed: list[tuple[int, float]] | None = None
        """For virtual clocks: bytes of each collective, and its part of a ring all-reduce."""
        self._mesh: DeviceMesh | None = None
        self._meshes: dict[tuple[int, int], DeviceMesh] = {}
        self._tensors: Any = None
        self._group: TypedGroup | None = None
        self._name: Any = None
        self._peers: PeerGroup | None = None
        self._last_input: tuple[Tensor, int, DTensor] | None = None

    def connect(self, group: PeerGroup, device: torch.device) -> None:
        """Make the mesh over the process group of the ranks."""
        # takes a second to load, which runs without tensor parallelism are spared
        import torch.distributed.tensor as tensors
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.distributed_c10d import GroupName

        self.disconnect()
        self._tensors = tensors
        place, size, number = group.place, len(group.ranks), next(_number)
        self.index, self.degree, self._peers = place, size, group
        kinds = dist.ProcessGroup.BackendType
        kind = kinds.NCCL if group.uses_nccl else kinds.GLOO
        self._group = TypedGroup(group, kind, torch.device(device.type))
        self._name = GroupName(f"foreshard-tensor-{number}")
        self._group._set_group_name(self._name)
        torch._C._distributed_c10d._register_process_group(self._name, self._group)
        if (size, place) not in self._meshes:
            # Without a default group, ranks are counted within this mesh. No two meshes of a process may be
            # equal: torch caches operations by mesh, and would use another mesh's group.
            self._meshes[size, place] = DeviceMesh(
                device.type, list(range(size)), _init_backend=False, _rank=place
            )
            self._meshes[size, place]._thread_id = number
        self._mesh = self._meshes[size, place]
        self._mesh._dim_group_names = [self._name]

    def disconnect(self) -> None:
        """Let go of the group."""
        if self._group is not None:
            torch._C._distributed_c10d._unregister_process_group(self._name)
        self._group = self._mesh = self._last_input = self._peers = None
        self.index, self.degree = 0, 1

    # -- tensor parallelism ---------------------------------------------------------------------------------

    def replicated(self, tensor: Tensor) -> DTensor:
        """Return a tensor that is whole on every rank, whose gradient is the sum over the ranks.

        Products of the same input (queries, keys, values) share it, and so one sum of gradients.
        """
        if isinstance(tensor, self._tensors.DTensor):
            return tensor
        last = self._last_input
        if last is not None and last[0] is tensor and last[1] == tensor._version:
            return last[2]
        given = self._distributed(tensor, self._tensors.Replicate())
        self._count_backward(given, tensor.numel() * tensor.element_size())
        self._last_input = (tensor, tensor._version, given)
        return given

    def forget_input(self) -> None:
        """Forget the last input of a product; called after every layer."""
        self._last_input = None

    def part(self, tensor: Tensor, dim: int) -> DTensor:
        """Return the whole of which a tensor is this rank's part along a dimension."""
        return self._distributed(tensor, self._tensors.Shard(dim % tensor.dim()))

    def addend(self, tensor: Tensor) -> DTensor:
        """Return the sum of which a tensor is this rank's addend."""
        return self._distributed(tensor, self._tensors.Partial())

    def summed(self, addends: DTensor) -> Tensor:
        """Return the sum over the ranks: whole on every rank, or this rank's part of the sequence."""
        if not self.sequence:
            found = self._placed(addends, self._tensors.Replicate())
            self._count(_num_bytes(found))
            return found
        self.sequence_span(addends.shape[1])
        found = self._placed(addends, self._tensors.Shard(1))
        size = addends.numel() * found.element_size()
        self._count(size, _HALF_RING)
        self._count_backward(found, size, _HALF_RING)
        return found

    def gathered(self, parts: DTensor) -> Tensor:
        """Return the parts of all ranks as one tensor, on every rank."""
        found = self._placed(parts, self._tensors.Replicate())
        self._count(_num_bytes(found), _HALF_RING)
        return found

    # -- sequence parallelism -------------------------------------------------------------------------------

    def sequence_span(self, length: int) -> tuple[int, int]:
        """Return (first, past the last) token of this rank's part of a sequence, which the degree divides."""
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

    def scatter_sequence(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a sequence that all ranks have."""
        self.sequence_span(tensor.shape[1])
        whole = self._distributed(tensor, self._tensors.Replicate())
        found = self._placed(whole, self._tensors.Shard(1))
        self._count_backward(found, _num_bytes(tensor), _HALF_RING)
        return found

    def gather_sequence(self, own: Tensor) -> Tensor:
        """Return the sequence that ranks have parts of, for what all of them compute alike."""
        return self.gathered(self.part(own, 1))

    def gather_for_products(self, own: Tensor) -> DTensor:
        """Return the sequence that ranks have parts of, for cut products; gradients are reduce-scattered."""
        found: DTensor = self.part(own, 1).redistribute(placements=[self._tensors.Replicate()])
        size = found.numel() * own.element_size()
        self._count(size, _HALF_RING)
        self._count_backward(found, size, _HALF_RING)
        return found

    # -- virtual clocks -------------------------------------------------------------------------------------

    def advance_clock(self, clock: Clock) -> None:
        """Bring a virtual clock to the end of an action's collectives, of the slowest of these ranks."""
        if self._peers is None or not self.bytes_summed:
            return
        sizes, self.bytes_summed = self.bytes_summed, []
        latest(self._peers, now := torch.tensor([clock.now()], dtype=torch.float64))
        links_s = sum(part * clock.all_reduce_s(size, self._peers.ranks) for size, part in sizes)
        clock.advance_to(float(now[0]) + links_s)

    def _count_backward(self, tensor: Tensor, size: int, part: float = 1.0) -> None:
        """Count the collective of a tensor's gradient, when it comes."""
        if self.bytes_summed is not None and tensor.requires_grad:
            tensor.register_hook(lambda grad: self._count(size, part))

    def _count(self, size: int, part: float = 1.0) -> None:
        if self.bytes_summed is not None:
            self.bytes_summed.append((size, part))

    def _distributed(self, tensor: Tensor, placement: Placement) -> DTensor:
        return self._tensors.DTensor.from_local(  # type: ignore[no-any-return]
            tensor, self._mesh, [placement], run_check=False
        )

    def _placed(self, tensor: DTensor, placement: Placement) -> Tensor:
        return tensor.redistribute(placements=[placement]).to_local()


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
