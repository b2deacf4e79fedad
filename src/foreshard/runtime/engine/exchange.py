"""Sends tensors from the ranks of one pipeline stage to the ranks of the next, row by row.

The samples (rows) of a micro-batch are split over the ranks of a stage, evenly or not, and the next stage may
split them differently: rows go to the ranks that hold them there, in messages of the backend or by a
schedule. The shapes of a message are announced once for each number of samples, or with every message where
shapes change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from foreshard.errors import SpecError
from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.state.layout import RankLayout, Seat, micro_batches, ranks_of, samples_of, sends_parts
from foreshard.spec.plan import Group
from foreshard.transport.stage_message import ScheduleFor, StageMessages

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
)
_MAX_TENSORS, _MAX_DIMS = 8, 6
"""Of a layer's output; they fix the size of a header, so that a receiver needs no message before it."""
_FIELDS = 2 + _MAX_DIMS  # dtype, number of dimensions, sizes
_HEADER = 2 + _MAX_TENSORS * _FIELDS
_MAX_PENDING = 64  # sends that are kept before finished ones are dropped
Shapes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
Channel = tuple[int, int, bool]
"""(source, target, whether it carries gradients backward)."""
Span = tuple[int, int]
"""(first, past the last) sample of a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Ranks of the neighbouring stage that hold the same tensors, of some samples of the micro-batch.

    `beside` are the ranks of the own stage that hold the same as this one, itself among them.
    """

    ranks: tuple[int, ...]
    beside: tuple[int, ...]
    span: Span

    def targets_of(self, rank: int) -> list[int]:
        """Return the peers that a rank sends to: every one of them gets the tensors once."""
        first, count = self.beside.index(rank), len(self.beside)
        return list(self.ranks[first::count])

    def source_of(self, rank: int) -> int:
        """Return the peer that a rank receives from."""
        return self.ranks[self.beside.index(rank) % len(self.ranks)]


class Exchange:
    """Sends and receives rows of micro-batches inside one pipeline.

    `group` is of all ranks that train, place i being ``ranks[i]``; it carries shapes, and what no channel
    carries. Channels are of two ranks in rising order, and carry tensors of the device. NCCL keeps the order
    of all that a group carries, so messages of one direction have a group of their own: they are sent and
    received in the order of the schedule. Without channels messages pass through host memory (gloo), where
    `schedule_for` may say how. With `fixed_shapes` rows have the same shape in every step.
    """

    def __init__(
        self,
        group: Any,
        channels: Mapping[Channel, Any] | None,
        ranks: Sequence[int],
        rank: int,
        clock: Clock,
        *,
        fixed_shapes: bool = True,
        schedule_for: ScheduleFor | None = None,
    ):
        self._group, self._channels, self._rank, self._clock = group, channels, rank, clock
        self._place = {r: place for place, r in enumerate(ranks)}
        self._by_schedule = None
        if schedule_for is not None:
            self._by_schedule = StageMessages(schedule_for, group, self._place.__getitem__, rank)
        self._fixed = fixed_shapes and not clock.virtual
        self._sent_shapes: dict[tuple[int, int, int], Shapes] = {}
        self._known_shapes: dict[tuple[int, int, int], Shapes] = {}
        self._pending: list[tuple[Any, Tensor]] = []

    def send(
        self, tensors: Sequence[Tensor], mine: Span, peers: Sequence[Peers], *, route: int, tag: int
    ) -> None:
        """Send the peers the rows that they hold, of tensors whose rows are the samples `mine`.

        A route names the boundary and direction: equal routes carry equal shapes per row. Tags tell messages
        under way apart.
        """
        for some, lo, hi in _overlaps(mine, peers):
            rows = [t.detach()[lo - mine[0] : hi - mine[0]].contiguous() for t in tensors]
            targets = some.targets_of(self._rank)
            for target in targets:
                self._send_shapes(rows, target, hi - lo, route, tag)
            for number, row in enumerate(rows):
                wire = row.view(torch.uint8) if row.dtype is torch.bool else row
                message = _message(tag, 1 + number)
                if self._by_schedule is not None:
                    self._pending += self._by_schedule.begin(wire.cpu(), some.beside, some.ranks, message)
                    self._drop_finished()
                    continue
                for target in targets:
                    self._isend_tensor(wire, target, route, message)

    def receive(
        self, mine: Span, peers: Sequence[Peers], *, route: int, tag: int, device: torch.device
    ) -> list[Tensor]:
        """Return the rows `mine`, put together from what the peers hold."""
        parts = [
            self._receive_part(some, hi - lo, route, tag, device) for some, lo, hi in _overlaps(mine, peers)
        ]
        if len(parts) == 1:
            return parts[0]
        return [_joined(rows) for rows in zip(*parts, strict=True)]

    def waiting_in_device(self) -> AbstractContextManager[None]:
        """Note that the rank waits in the body for its device, where peers are waited for there (NCCL)."""
        inside = self._channels is not None and self._group is not None
        return self._group.waiting_in_device() if inside else nullcontext()

    def wait_for_sends(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    def _isend_tensor(self, tensor: Tensor, target: int, route: int, tag: int) -> None:
        if self._channels is None:
            self._isend(self._group, tensor.cpu(), self._place[target], tag)
        else:
            channel = self._channels[self._rank, target, bool(route % 2)]
            self._isend(channel, tensor, int(target > self._rank), tag)

    def _receive_tensor(self, tensor: Tensor, some: Peers, source: int, route: int, tag: int) -> Tensor:
        """Return a tensor like the given one that peers have sent: by a schedule all, else the source."""
        if self._channels is None:
            wire = tensor if tensor.is_cpu else torch.empty_like(tensor, device="cpu")
            if self._by_schedule is None:
                self._group.recv([wire], self._place[source], tag).wait()
            else:
                self._by_schedule.receive(wire, some.ranks, some.beside, tag)
            return wire.to(tensor.device)
        channel = self._channels[source, self._rank, bool(route % 2)]
        channel.recv([tensor], int(source > self._rank), tag).wait()
        return tensor

    def _isend(self, group: Any, tensor: Tensor, place: int, tag: int) -> None:
        self._pending.append((group.send([tensor], place, tag), tensor))
        self._drop_finished()

    def _drop_finished(self) -> None:
        if len(self._pending) > _MAX_PENDING:
            self._pending = [(work, kept) for work, kept in self._pending if not work.is_completed()]

    def _send_shapes(self, rows: Sequence[Tensor], target: int, count: int, route: int, tag: int) -> None:
        shapes = tuple((row.dtype, tuple(row.shape)) for row in rows)
        key = (target, count, route)
        if self._fixed and key in self._sent_shapes:
            if self._sent_shapes[key] != shapes:
                raise SpecError(
                    f"a layer's output changed from {_text(self._sent_shapes[key])} to {_text(shapes)}",
                    key="fixed_shapes",
                    rule="Rows of a boundary keep their shape",
                    fix="Set fixed_shapes = False in the job",
                )
            return
        self._sent_shapes[key] = shapes
        size = sum(row.numel() * row.element_size() for row in rows)
        arrival_s = self._clock.sent(size, self._rank, target)
        self._isend(self._group, header_of(shapes, arrival_s), self._place[target], _message(tag, 0))

    def _receive_part(
        self, some: Peers, count: int, route: int, tag: int, device: torch.device
    ) -> list[Tensor]:
        source = some.source_of(self._rank)
        key = (source, count, route)
        if not self._fixed or key not in self._known_shapes:
            header = torch.empty(_HEADER, dtype=torch.int64)
            self._group.recv([header], self._place[source], _message(tag, 0)).wait()
            self._known_shapes[key], arrival_s = parse_header(header)
            self._clock.advance_to(arrival_s)
        tensors = []
        for number, (dtype, shape) in enumerate(self._known_shapes[key]):
            wire = torch.empty(shape, dtype=torch.uint8 if dtype is torch.bool else dtype, device=device)
            wire = self._receive_tensor(wire, some, source, route, _message(tag, 1 + number))
            tensors.append(wire.view(torch.bool) if dtype is torch.bool else wire)
        return tensors


def _overlaps(mine: Span, peers: Sequence[Peers]) -> Iterator[tuple[Peers, int, int]]:
    """Yield the peers that hold some of the same samples, with the first and past the last of these."""
    for some in peers:
        lo, hi = max(mine[0], some.span[0]), min(mine[1], some.span[1])
        if lo < hi:
            yield some, lo, hi


def _message(tag: int, number: int) -> int:
    """Return the tag of a header (number 0) or of one of the tensors behind it."""
    return tag * (_MAX_TENSORS + 1) + number


def check_sendable(outputs: Sequence[Any], layer: int, *, samples: int, is_last: bool) -> None:
    """Check that the outputs of a layer can go to other ranks: a plan may cut behind any layer.

    The outputs of the last layer go to the loss only, which may take anything but None.
    """
    kinds = ", ".join(_named(value) for value in outputs) or "nothing"
    if is_last and (not outputs or any(value is None for value in outputs)):
        raise SpecError(
            f"the layer gives {kinds}",
            key=f"layer {layer}",
            rule="The last layer gives what loss(output, batch) takes",
            fix="Return the output from its forward",
        )
    sendable = outputs and all(_is_sendable(value, samples) for value in outputs)
    if is_last or (sendable and len(outputs) <= _MAX_TENSORS):
        return
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
    raise SpecError(
        f"the layer gives {kinds} for {samples} samples",
        key=f"layer {layer}",
        rule=f"A layer gives a tensor or a tuple of up to {_MAX_TENSORS}, of {dtypes}, of up to {_MAX_DIMS} "
        "dimensions of which the first is the sample: the next layer may be another rank's",
        fix="Return such tensors from its forward; let later layers make the rest from them",
    )


def _is_sendable(value: Any, samples: int) -> bool:
    is_kind = isinstance(value, Tensor) and value.dtype in _DTYPES
    return is_kind and 1 <= value.dim() <= _MAX_DIMS and value.shape[0] == samples


def _named(value: Any) -> str:
    return _text(((value.dtype, tuple(value.shape)),)) if isinstance(value, Tensor) else type(value).__name__


def header_of(shapes: Shapes, arrival_s: float) -> Tensor:
    """Return a message that announces tensors, of a size that does not depend on them."""
    header = torch.zeros(_HEADER, dtype=torch.int64)
    header[0] = len(shapes)
    header[1:2] = torch.tensor([arrival_s], dtype=torch.float64).view(torch.int64)
    for number, (dtype, shape) in enumerate(shapes):
        fields = [_DTYPES.index(dtype), len(shape), *shape]
        at = 2 + number * _FIELDS
        header[at : at + len(fields)] = torch.tensor(fields)
    return header


def parse_header(header: Tensor) -> tuple[Shapes, float]:
    """Return the shapes in a header, and when the tensors arrive."""
    values = header.tolist()
    shapes = []
    for number in range(values[0]):
        at = 2 + number * _FIELDS
        shapes.append((_DTYPES[values[at]], tuple(values[at + 2 : at + 2 + values[at + 1]])))
    return tuple(shapes), float(header[1:2].view(torch.float64)[0])


def _text(shapes: Shapes) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in shapes)


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """Return rows of several ranks as one tensor."""
    if len({tuple(row.shape[1:]) for row in rows}) > 1:
        shapes = ", ".join(str(list(row.shape[1:])) for row in rows)
        raise SpecError(
            f"ranks of one stage made rows of different shapes: {shapes}",
            key="collate",
            rule="Where a plan splits the samples of a stage all rows have one shape",
            fix="Pad to one length in collate",
        )
    return torch.cat(list(rows))


def peers_at(group: Group, seat: Seat, virtual: int, count: int) -> list[Peers]:
    """Return the ranks of a virtual stage with which a seat exchanges a micro-batch of so many samples."""
    own, other = group.stages[seat.stage], group.stages[virtual % len(group.stages)]
    beside = ranks_of(own.ranks, seat.inner, own.tp)
    found = []
    for inner, span in enumerate(samples_of(other, count)):
        ranks = ranks_of(other.ranks, inner, other.tp)
        if sends_parts(group, own, other):  # each has a part of its own, which its counterpart needs
            found.append(Peers(ranks=ranks[seat.tensor :][:1], beside=beside[seat.tensor :][:1], span=span))
        else:
            found.append(Peers(ranks=ranks, beside=beside, span=span))
    return found


def channels_of(layout: RankLayout) -> list[Channel]:
    """Return the channels of all ranks, in the one order in which ranks open them.

    Every rank waits for the other end of its first channel in this order, so no ranks wait for each other
    in a circle.
    """
    found: set[Channel] = set()
    for rank, seat in layout.seats.items():
        group, stage = layout.group_of(rank), layout.stage_of(rank)
        step, stop = len(group.stages), len(group.stages) * group.num_chunks
        sizes = {hi - lo for lo, hi in micro_batches(group)}
        for virtual, way, size in product(range(seat.stage, stop, step), (-1, 1), sizes):
            if 0 <= virtual + way < stop:
                peers = peers_at(group, seat, virtual + way, size)
                for some, _, _ in _overlaps(samples_of(stage, size)[seat.inner], peers):
                    found.update((rank, target, way < 0) for target in some.targets_of(rank))
    return sorted(found)
