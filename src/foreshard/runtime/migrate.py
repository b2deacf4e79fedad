"""Layers on the move: who sends which items to whom when a plan changes, and the sending.

Every rank reads the same table of who holds what and works out the same moves, so nothing is negotiated. A layer
comes from the holder that has sent the least so far; what a rank has already stays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foreshard.runtime.clock import Clock
from foreshard.runtime.holding import Holding, Item

_TAG = 1 << 24
Key = tuple[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a rank has at the step that training goes on from.

    Attributes
    ----------
    layers : frozenset of int
        Whose values and buffers it has.
    states : frozenset of (layer, name)
        Whose optimizer state it has.
    """

    layers: frozenset[int] = frozenset()
    states: frozenset[Key] = frozenset()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {"layers": sorted(self.layers), "states": sorted(map(list, self.states))}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Held:
        """Return it from JSON."""
        states = frozenset((int(layer), str(name)) for layer, name in data["states"])
        return cls(layers=frozenset(map(int, data["layers"])), states=states)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One rank sends another the values of layers and the states of parameters."""

    source: int
    target: int
    layers: tuple[int, ...]
    states: tuple[Key, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a migration took."""

    bytes_in: int
    bytes_out: int
    seconds: float


def moves_of(
    held: Mapping[int, Held],
    wanted: Mapping[int, Held],
    weight: Callable[[int], float] = lambda layer: 1.0,
    link_cost: Callable[[int, int], float] = lambda source, target: 1.0,
) -> tuple[list[Move], frozenset[int]]:
    """Return the moves that give every rank what it wants, and layers that nobody has.

    Parameters
    ----------
    held, wanted : mapping of rank to Held
    weight : callable of layer
        Bytes, or anything in proportion.
    link_cost : callable of (source, target)
        Seconds a byte, or anything in proportion.
    """
    layers: dict[tuple[int, int], list[int]] = {}
    states: dict[tuple[int, int], list[Key]] = {}
    load = dict.fromkeys(held, 0.0)
    missing: set[int] = set()

    def source_of(holders: list[int], target: int, size: float) -> int:
        best = min(holders, key=lambda rank: (load[rank] + size * link_cost(rank, target), rank))
        load[best] += size * link_cost(best, target)
        return best

    for target in sorted(wanted):
        have = held.get(target, Held())
        for layer in sorted(wanted[target].layers - have.layers):
            holders = [rank for rank in sorted(held) if layer in held[rank].layers]
            if holders:
                layers.setdefault((source_of(holders, target, weight(layer)), target), []).append(layer)
            else:
                missing.add(layer)
        for key in sorted(wanted[target].states - have.states):
            holders = [rank for rank in sorted(held) if key in held[rank].states]
            if holders:
                near = [s for s in holders if key[0] in layers.get((s, target), ())]
                source = near[0] if near else source_of(holders, target, weight(key[0]))
                states.setdefault((source, target), []).append(key)
            else:
                missing.add(key[0])
    moves = [
        Move(source=s, target=t, layers=tuple(layers.get((s, t), ())), states=tuple(states.get((s, t), ())))
        for s, t in sorted({*layers, *states})
    ]
    return moves, frozenset(missing)


def migrate(
    holding: Holding, moves: Sequence[Move], group: Any, ranks: Sequence[int], clock: Clock
) -> Moved:
    """Send and receive what the moves say; the layers received must have been built.

    Raises
    ------
    RuntimeError
        From torch.distributed, when a peer is gone; what was held before is untouched.
    """
    place, began_s = {rank: i for i, rank in enumerate(ranks)}, clock.now()
    items = holding.items() if any(m.source == holding.rank for m in moves) else {}
    sending: list[tuple[Any, Tensor]] = []
    bytes_out = bytes_in = 0
    for number, move in enumerate(moves):
        if move.source == holding.rank:
            payload = _payload(items, move)
            bytes_out += payload[2].numel()
            stamp = clock.sent(payload[2].numel(), move.source, move.target)
            for part, tensor in enumerate(_stamped(payload, stamp)):
                work = group.send([tensor], place[move.target], _TAG + number * 4 + part)
                sending.append((work, tensor))
    received: list[tuple[Item, Tensor]] = []
    for number, move in enumerate(moves):
        if move.target == holding.rank:
            arrived, size = _receive(group, place[move.source], _TAG + number * 4, clock)
            received += arrived
            bytes_in += size
    for work, _ in sending:
        work.wait()
    for item, tensor in received:
        holding.put(item, tensor)
    return Moved(bytes_in=bytes_in, bytes_out=bytes_out, seconds=clock.now() - began_s)


def _payload(items: Mapping[Item, Tensor], move: Move) -> tuple[list[Any], list[Tensor], Tensor]:
    """Return what describes the items of a move, and their bytes one after another."""
    layers, states = set(move.layers), set(move.states)
    chosen = [
        (item, tensor) for item, tensor in items.items()
        if (item[0] != "state" and item[1] in layers)
        or (item[0] == "state" and (item[1], item[2].rpartition("/")[0]) in states)
    ]
    told = [[*item, str(t.dtype).removeprefix("torch."), list(t.shape)] for item, t in chosen]
    parts = [t.detach().contiguous().reshape(-1).view(torch.uint8) for _, t in chosen]
    flat = torch.cat([p.cpu() for p in parts]) if parts else torch.empty(0, dtype=torch.uint8)
    return told, parts, flat


def _stamped(payload: tuple[list[Any], list[Tensor], Tensor], stamp: float) -> list[Tensor]:
    text = json.dumps({"stamp": stamp, "items": payload[0]}).encode()
    words = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    sizes = torch.tensor([len(text), payload[2].numel()], dtype=torch.int64)
    return [sizes, words, payload[2]] if payload[2].numel() else [sizes, words]


def _receive(group: Any, source: int, tag: int, clock: Clock) -> tuple[list[tuple[Item, Tensor]], int]:
    sizes = torch.empty(2, dtype=torch.int64)
    group.recv([sizes], source, tag).wait()
    words = torch.empty(int(sizes[0]), dtype=torch.uint8)
    group.recv([words], source, tag + 1).wait()
    flat = torch.empty(int(sizes[1]), dtype=torch.uint8)
    if flat.numel():
        group.recv([flat], source, tag + 2).wait()
    told = json.loads(bytes(words.tolist()))
    if clock.virtual:
        clock.received(told["stamp"])
    found, offset = [], 0
    for kind, layer, name, dtype, shape in told["items"]:
        kept = torch.empty(shape, dtype=getattr(torch, dtype))
        size = kept.numel() * kept.element_size()
        kept.reshape(-1).view(torch.uint8).copy_(flat[offset : offset + size])
        offset += size
        found.append(((kind, layer, name), kept))
    return found, flat.numel()
