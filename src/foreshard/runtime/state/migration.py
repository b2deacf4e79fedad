"""Layers that change ranks: the pieces that move between two plans, and sending them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.state.rank_state import RankState
from foreshard.runtime.state.shard_keys import Held, Item, Piece
from foreshard.runtime.state.slices import finer, grains
from foreshard.spec.plan_moves import moves_between

_TAG = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemMove:
    """One rank sends another some pieces, in order."""

    source: int
    target: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a migration took."""

    bytes_in: int
    bytes_out: int
    seconds: float


def moves_of(
    held: Mapping[int, Held],
    wanted: Mapping[int, Held],
    weight: Callable[[Piece], float] = lambda piece: 1.0,
    link_cost: Callable[[int, int], float] = lambda source, target: 1.0,
) -> tuple[list[ItemMove], frozenset[int]]:
    """Return the moves that give every rank what it wants, and layers of which nobody has a piece.

    A piece is the finest slice that either side tells apart; see `plan_moves.moves_between`.

    Parameters
    ----------
    held, wanted : mapping of rank to Held
    weight : callable of piece
        Bytes, or anything in proportion.
    link_cost : callable of (source, target)
        Seconds a byte, or anything in proportion.
    """
    held, wanted = _in_common(held, wanted)
    found, missing = moves_between(
        held,
        wanted,
        layer_of=lambda piece: piece[1],
        order=lambda piece: (piece[1], piece[0] != "value", piece),
        weight=weight,
        link_cost=link_cost,
    )
    return [ItemMove(source=s, target=t, pieces=tuple(pieces)) for (s, t), pieces in found.items()], missing


def _in_common(
    held: Mapping[int, Held], wanted: Mapping[int, Held]
) -> tuple[Mapping[int, Held], Mapping[int, Held]]:
    """Return both in slices of one size."""
    grain = grains(piece for side in (held, wanted) for pieces in side.values() for piece in pieces)
    if not grain:
        return held, wanted
    made = [{rank: frozenset(finer(p, grain)) for rank, p in side.items()} for side in (held, wanted)]
    return made[0], made[1]


def migrate(
    holding: RankState, moves: Sequence[ItemMove], group: Any, ranks: Sequence[int], clock: Clock
) -> Moved:
    """Send and receive what the moves say; the layers received must have been built.

    Raises
    ------
    RuntimeError
        From torch.distributed, when a peer is gone; what was held before is untouched.
    """
    place, began_s = {rank: i for i, rank in enumerate(ranks)}, clock.now()
    holding.remember()
    sending: list[tuple[Any, Tensor]] = []
    bytes_out = bytes_in = 0
    for number, move in enumerate(moves):
        if move.source == holding.rank:
            payload = _payload(holding, move)
            bytes_out += payload[1].numel()
            stamp = clock.sent(payload[1].numel(), move.source, move.target)
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


def _payload(holding: RankState, move: ItemMove) -> tuple[list[Any], Tensor]:
    """Return what describes the items of a move, and their bytes one after another."""
    chosen = [pair for piece in move.pieces for pair in holding.items_of(piece)]
    described = [[*item, str(t.dtype).removeprefix("torch."), list(t.shape)] for item, t in chosen]
    parts = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for _, t in chosen]
    return described, torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _stamped(payload: tuple[list[Any], Tensor], stamp: float) -> list[Tensor]:
    text = json.dumps({"stamp": stamp, "items": payload[0]}).encode()
    words = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    sizes = torch.tensor([len(text), payload[1].numel()], dtype=torch.int64)
    return [sizes, words, payload[1]] if payload[1].numel() else [sizes, words]


def _receive(group: Any, source: int, tag: int, clock: Clock) -> tuple[list[tuple[Item, Tensor]], int]:
    sizes = torch.empty(2, dtype=torch.int64)
    group.recv([sizes], source, tag).wait()
    words = torch.empty(int(sizes[0]), dtype=torch.uint8)
    group.recv([words], source, tag + 1).wait()
    flat = torch.empty(int(sizes[1]), dtype=torch.uint8)
    if flat.numel():
        group.recv([flat], source, tag + 2).wait()
    message = json.loads(bytes(words.tolist()))
    if clock.virtual:
        clock.received(message["stamp"])
    found, offset = [], 0
    for kind, layer, name, dtype, shape in message["items"]:
        kept = torch.empty(shape, dtype=getattr(torch, dtype))
        size = kept.numel() * kept.element_size()
        kept.reshape(-1).view(torch.uint8).copy_(flat[offset : offset + size])
        offset += size
        found.append(((kind, layer, name), kept))
    return found, flat.numel()
