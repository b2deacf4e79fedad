"""Tensors from the ranks of one stage to the ranks of the next, cut by sample.

The samples of a micro-batch are split over the ranks of a stage, evenly or not, and the next stage may
split them in another way: every rank sends the rows that the other side takes. What shape arrives is told
once for each number of samples, again with every message where shapes change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foreshard.errors import SpecError
from foreshard.runtime.engine.clock import Clock

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
_HEADER = 2 + _MAX_TENSORS * (2 + _MAX_DIMS)
Shapes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A rank on the other side and the samples of the micro-batch it holds."""

    rank: int
    span: Span


class Exchange:
    """Sends and receives rows of micro-batches inside one group.

    Parameters
    ----------
    group : ProcessGroup
        Of all ranks that train, place i being ``ranks[i]``; tells shapes.
    carriers : (ProcessGroup, ProcessGroup)
        Of the same ranks, for tensors of even and of odd routes: forwards and backwards must not wait for
        each other where a group keeps one order for all it carries.
    ranks : sequence of int
    rank : int
        This rank.
    clock : Clock
    fixed_shapes : bool
        Whether rows have the same shape in every step.
    """

    def __init__(
        self,
        group: Any,
        carriers: tuple[Any, Any],
        ranks: Sequence[int],
        rank: int,
        clock: Clock,
        *,
        fixed_shapes: bool = True,
    ):
        self._group, self._carriers, self._rank, self._clock = group, carriers, rank, clock
        self._place = {r: place for place, r in enumerate(ranks)}
        self._fixed = fixed_shapes and not clock.virtual
        self._told: dict[tuple[int, int, int], Shapes] = {}
        self._heard: dict[tuple[int, int, int], Shapes] = {}
        self._sending: list[tuple[Any, Tensor]] = []
        self.seen: dict[tuple[int, int], list[float]] = {}  # bytes and seconds by link, where time is virtual

    def send(
        self, tensors: Sequence[Tensor], mine: Span, peers: Sequence[Peer], *, route: int, tag: int
    ) -> None:
        """Send the rows that each peer holds of the tensors' rows `mine`.

        Parameters
        ----------
        tensors : sequence of Tensor, shape (samples of mine, ...)
        mine : (first, last)
        peers : sequence of Peer
        route : int
            Names the boundary and direction; equal routes carry equal shapes per row.
        tag : int
            Distinguishes messages under way.
        """
        for peer in peers:
            lo, hi = max(mine[0], peer.span[0]), min(mine[1], peer.span[1])
            if lo >= hi:
                continue
            rows = [t.detach()[lo - mine[0] : hi - mine[0]].contiguous() for t in tensors]
            self._tell(rows, peer.rank, hi - lo, route, tag)
            for number, row in enumerate(rows):
                wire = row.view(torch.uint8) if row.dtype is torch.bool else row
                place = tag * (_MAX_TENSORS + 1) + 1 + number
                self._isend(self._carriers[route % 2], wire, peer.rank, place)

    def receive(
        self, mine: Span, peers: Sequence[Peer], *, route: int, tag: int, device: torch.device
    ) -> list[Tensor]:
        """Return the rows `mine`, put together from what the peers hold."""
        parts: list[list[Tensor]] = []
        for peer in peers:
            lo, hi = max(mine[0], peer.span[0]), min(mine[1], peer.span[1])
            if lo < hi:
                parts.append(self._receive_part(peer.rank, hi - lo, route, tag, device))
        if len(parts) == 1:
            return parts[0]
        return [_joined(rows) for rows in zip(*parts, strict=True)]

    def settle(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _isend(self, group: Any, tensor: Tensor, target: int, tag: int) -> None:
        self._sending.append((group.send([tensor], self._place[target], tag), tensor))
        if len(self._sending) > 64:
            self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]

    def _recv(self, group: Any, tensor: Tensor, source: int, tag: int) -> None:
        group.recv([tensor], self._place[source], tag).wait()

    def _tell(self, rows: Sequence[Tensor], target: int, count: int, route: int, tag: int) -> None:
        shapes = tuple((row.dtype, tuple(row.shape)) for row in rows)
        key = (target, count, route)
        if self._fixed and key in self._told:
            if self._told[key] != shapes:
                raise SpecError(
                    f"a layer's output changed from {_text(self._told[key])} to {_text(shapes)}",
                    key="fixed_shapes",
                    rule="Rows of a boundary keep their shape",
                    fix="Set fixed_shapes = False in the job",
                )
            return
        self._told[key] = shapes
        size = sum(row.numel() * row.element_size() for row in rows)
        stamp = self._clock.sent(size, self._rank, target)
        if self._clock.virtual:
            total = self.seen.setdefault((self._rank, target), [0.0, 0.0])
            total[0] += size
            total[1] += stamp - self._clock.now()
        self._isend(self._group, _header(shapes, stamp), target, tag * (_MAX_TENSORS + 1))

    def _receive_part(
        self, source: int, count: int, route: int, tag: int, device: torch.device
    ) -> list[Tensor]:
        key = (source, count, route)
        if not self._fixed or key not in self._heard:
            header = torch.empty(_HEADER, dtype=torch.int64)
            self._recv(self._group, header, source, tag * (_MAX_TENSORS + 1))
            self._heard[key], stamp = _parsed(header)
            if self._clock.virtual:
                self._clock.received(stamp)
        tensors = []
        for number, (dtype, shape) in enumerate(self._heard[key]):
            wire = torch.empty(shape, dtype=torch.uint8 if dtype is torch.bool else dtype, device=device)
            self._recv(self._carriers[route % 2], wire, source, tag * (_MAX_TENSORS + 1) + 1 + number)
            tensors.append(wire.view(torch.bool) if dtype is torch.bool else wire)
        return tensors


def check_sendable(made: Sequence[Any], layer: int, *, samples: int, is_last: bool) -> None:
    """Check that what a layer gives for some samples can go to other ranks: a plan may cut behind any layer.

    What the last one gives goes to the loss only, which may take anything but nothing.

    Raises
    ------
    SpecError
        Naming the layer.
    """
    told = ", ".join(_named(value) for value in made) or "nothing"
    if is_last and (not made or any(value is None for value in made)):
        raise SpecError(
            f"the layer gives {told}",
            key=f"layer {layer}",
            rule="The last layer gives what loss(output, batch) takes",
            fix="Return the output from its forward",
        )
    sendable = made and all(_is_sendable(value, samples) for value in made)
    if is_last or (sendable and len(made) <= _MAX_TENSORS):
        return
    kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
    raise SpecError(
        f"the layer gives {told} for {samples} samples",
        key=f"layer {layer}",
        rule=f"A layer gives a tensor or a tuple of up to {_MAX_TENSORS}, of {kinds}, of up to {_MAX_DIMS} "
        "dimensions of which the first is the sample: the next layer may be another rank's",
        fix="Return such tensors from its forward; let later layers make the rest from them",
    )


def _is_sendable(value: Any, samples: int) -> bool:
    is_kind = isinstance(value, Tensor) and value.dtype in _DTYPES
    return is_kind and 1 <= value.dim() <= _MAX_DIMS and value.shape[0] == samples


def _named(value: Any) -> str:
    return _text(((value.dtype, tuple(value.shape)),)) if isinstance(value, Tensor) else type(value).__name__


def _header(shapes: Shapes, stamp: float) -> Tensor:
    header = torch.zeros(_HEADER, dtype=torch.int64)
    header[0] = len(shapes)
    header[1:2] = torch.tensor([stamp], dtype=torch.float64).view(torch.int64)
    for number, (dtype, shape) in enumerate(shapes):
        at = 2 + number * (2 + _MAX_DIMS)
        header[at], header[at + 1] = _DTYPES.index(dtype), len(shape)
        for place, size in enumerate(shape):
            header[at + 2 + place] = size
    return header


def _parsed(header: Tensor) -> tuple[Shapes, float]:
    values = header.tolist()
    shapes = []
    for number in range(values[0]):
        at = 2 + number * (2 + _MAX_DIMS)
        shapes.append((_DTYPES[values[at]], tuple(values[at + 2 : at + 2 + values[at + 1]])))
    return tuple(shapes), float(header[1:2].view(torch.float64)[0])


def _text(shapes: Shapes) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in shapes)


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """Return rows of several ranks as one tensor."""
    if len({tuple(row.shape[1:]) for row in rows}) > 1:
        told = ", ".join(str(list(row.shape[1:])) for row in rows)
        raise SpecError(
            f"ranks of one stage made rows of different shapes: {told}",
            key="collate",
            rule="Where a plan splits the samples of a stage all rows have one shape",
            fix="Pad to one length in collate",
        )
    return torch.cat(list(rows))
