"""Moves layers between ranks when the plan changes: who sends what to whom, and the sending.

Every rank reads the same table of who holds what and computes the same moves, so nothing is negotiated. A
layer comes from the holder that has sent least so far; what a rank already holds stays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.state.rank_state import RankState
from foreshard.runtime.state.shard_keys import ShardKey, Shards, TensorKey
from foreshard.runtime.state.slices import common_slice_counts, finer
from foreshard.spec.plan_moves import moves_between

_TAG = 1 << 24  # above the tags of a step's messages
_TAGS_PER_MOVE = 4  # sizes, description, bytes, one unused


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemMove:
    """One rank sends another some shards, in order."""

    source: int
    target: int
    shards: tuple[ShardKey, ...]


def moves_of(
    held: Mapping[int, Shards],
    wanted: Mapping[int, Shards],
    weight: Callable[[ShardKey], float] = lambda shard: 1.0,
) -> tuple[list[ItemMove], frozenset[int]]:
    """Return the moves that give every rank what it should hold, and the layers of which a shard is lost.

    The shards of a layer come from one rank as far as one has them; a shard is the finest slice that either
    side distinguishes. Weights are in proportion to bytes.
    """
    counts = common_slice_counts(shard for side in (held, wanted) for own in side.values() for shard in own)
    found, missing = moves_between(
        {rank: frozenset(finer(own, counts)) for rank, own in held.items()},
        {rank: frozenset(finer(own, counts)) for rank, own in wanted.items()},
        layer_of=lambda shard: shard[1],
        order=lambda shard: (shard[1], shard[0] != "value", shard),
        weight=weight,
    )
    return [ItemMove(source=s, target=t, shards=tuple(own)) for (s, t), own in found.items()], missing


def migrate(
    state: RankState, moves: Sequence[ItemMove], group: Any, ranks: Sequence[int], clock: Clock
) -> int:
    """Send and receive the shards of the moves, and return the bytes received; their layers must be built.

    What was held before is untouched when a peer is lost.
    """
    place = {rank: i for i, rank in enumerate(ranks)}
    state.keep_optimizer_state()
    sending: list[tuple[Any, Tensor]] = []
    bytes_in = 0
    for number, move in enumerate(moves):
        if move.source == state.rank:
            described, flat = _payload(state, move)
            arrival_s = clock.sent(flat.numel(), move.source, move.target)
            for part, tensor in enumerate(_messages(described, flat, arrival_s)):
                work = group.send([tensor], place[move.target], _TAG + number * _TAGS_PER_MOVE + part)
                sending.append((work, tensor))
    received: list[tuple[TensorKey, Tensor]] = []
    for number, move in enumerate(moves):
        if move.target == state.rank:
            arrived, size = _receive(group, place[move.source], _TAG + number * _TAGS_PER_MOVE, clock)
            received += arrived
            bytes_in += size
    for work, _ in sending:
        work.wait()
    for key, tensor in received:
        state.put(key, tensor)
    return bytes_in


def _payload(state: RankState, move: ItemMove) -> tuple[list[list[Any]], Tensor]:
    """Return a description of the tensors of a move, and their bytes one after another."""
    chosen = [pair for shard in move.shards for pair in state.tensors_of(shard)]
    described = [[*key, str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in chosen]
    parts = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for _, t in chosen]
    return described, torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _messages(described: list[list[Any]], flat: Tensor, arrival_s: float) -> list[Tensor]:
    text = json.dumps({"arrival_s": arrival_s, "tensors": described}).encode()
    words = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    sizes = torch.tensor([len(text), flat.numel()], dtype=torch.int64)
    return [sizes, words, flat] if flat.numel() else [sizes, words]


def _receive(group: Any, source: int, tag: int, clock: Clock) -> tuple[list[tuple[TensorKey, Tensor]], int]:
    sizes = torch.empty(2, dtype=torch.int64)
    group.recv([sizes], source, tag).wait()
    words = torch.empty(int(sizes[0]), dtype=torch.uint8)
    group.recv([words], source, tag + 1).wait()
    flat = torch.empty(int(sizes[1]), dtype=torch.uint8)
    if flat.numel():
        group.recv([flat], source, tag + 2).wait()
    message = json.loads(bytes(words.tolist()))
    clock.advance_to(message["arrival_s"])
    found, offset = [], 0
    for kind, layer, name, dtype, shape in message["tensors"]:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        size = tensor.numel() * tensor.element_size()
        tensor.reshape(-1).view(torch.uint8).copy_(flat[offset : offset + size])
        offset += size
        found.append(((kind, layer, name), tensor))
    return found, flat.numel()
