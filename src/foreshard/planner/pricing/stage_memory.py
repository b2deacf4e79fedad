"""How many micro-batches in flight every option of a stage has memory for, and what that asks of devices.

The bytes are those of `cost.memory`, as in a prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from foreshard.cost.memory import StageLoad, peaks_in_flight
from foreshard.cost.memory_activations import Recompute, recompute_of
from foreshard.graph.shapes import RankShape
from foreshard.planner.pricing.stage_options import StageKind
from foreshard.planner.pricing.stage_types import StageTypes, row
from foreshard.planner.request import PlanRequest

MAX_STAGES = 16


def rooms_in(
    request: PlanRequest,
    kinds: Sequence[StageKind],
    types: StageTypes,
    rank: RankShape,
    reserve_bytes: float,
    interleaved: tuple[int, int | None],
    *,
    beside: float,
) -> np.ndarray:
    """Return the micro-batches in flight that fit on every stage of every option, shape (types, options).

    `interleaved` are the chunks of layers of a device, and how many stages to have memory for. None fits on a
    stage that has nothing for some of its chunks. With several pipelines `beside` each other, this one
    counted, a rank has a communicator to sum gradients, and pipelines have as many stages or more; one alone
    has two at least.
    """
    devices = [request.cluster.nodes[kind.node_group].device for kind in kinds]
    capacity = np.array([[device.capacity_bytes - reserve_bytes for device in devices]])
    load, (chunks, stages) = _load(request, kinds, types, rank, beside), interleaved
    alone = types.has_embedding * types.has_head > 0
    rooms = np.zeros((len(types.has_head), len(kinds)), dtype=int)
    depths = range(1, (stages or MAX_STAGES) + 1)
    held: Iterable[float] = map(float, depths)
    if chunks > 1 and stages:  # as the engine counts chunks
        held = ((2 * (depth - 1) + (chunks - 1) * stages + 1) / chunks for depth in depths)
    flying = (np.where(alone, depth, own) for depth, own in zip(depths, held, strict=True))
    for depth, peak in zip(depths, peaks_in_flight(load, request.framework, flying), strict=True):
        more = (peak <= capacity) & (rooms == depth - 1)
        if not more.any():
            break
        rooms += more
    return np.where(alone | (types.places >= chunks), rooms, 0)


def fewest_devices(kinds: Sequence[StageKind], types: StageTypes, rooms: np.ndarray) -> float:
    """Return the least devices any pipeline takes; of more than a link domain has, its messages leave it."""
    devices = np.array([kind.num_devices for kind in kinds])
    least = np.append(np.where(rooms > 0, devices[None, :], np.inf).min(1), np.inf)
    places = len(types.table) - 1
    after = np.full(places + 1, np.inf)
    after[places] = 0.0
    for start in range(places - 1, -1, -1):
        after[start] = (least[types.table[start]] + after).min()
    return float(after[0])


def _load(
    request: PlanRequest,
    kinds: Sequence[StageKind],
    types: StageTypes,
    rank: RankShape,
    beside: float,
) -> StageLoad:
    devices = [request.cluster.nodes[kind.node_group].device for kind in kinds]
    return request.setup.load(
        replace(rank, dp=rank.dp * beside),
        counts=[types.counts[:, i : i + 1] for i in range(types.counts.shape[1])],
        has_embedding=types.has_embedding,
        has_head=types.has_head,
        in_flight=1.0,
        num_micro_batches=1e6,
        num_stages=np.where(types.has_embedding * types.has_head > 0, 1.0, max(2.0, beside)),
        devices=devices,
        recompute=row([recompute_of(kind.recompute, 1) for kind in kinds], Recompute),
    )
