"""How many micro-batches in flight every option of a stage has memory for, and what that asks of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foreshard.cost.memory import StageLoad, optimizer_state_bytes, stage_peak_bytes
from foreshard.cost.memory_activations import Recompute, recompute_of
from foreshard.planner.pricing.stage_options import StageKind
from foreshard.planner.pricing.stage_types import StageTypes, row
from foreshard.planner.request import PlanRequest
from foreshard.predict.memory import nccl_channels

MAX_STAGES = 16


def rooms_in(
    request: PlanRequest,
    kinds: Sequence[StageKind],
    types: StageTypes,
    reserve_bytes: float,
    interleaved: tuple[int, int | None],
) -> np.ndarray:
    """Return the micro-batches in flight that fit on every stage of every option, shape (types, options).

    `interleaved` are the chunks of layers of a device, and how many stages to have memory for.
    """
    joint = [i for i, kind in enumerate(kinds) if kind.beside]
    number, kinds = len(kinds), [*kinds, *(kinds[i].turned for i in joint)]  # as their other ranks see them
    devices = [request.cluster.nodes[kind.node_group].device for kind in kinds]
    capacity = np.array([[device.capacity_bytes - reserve_bytes for device in devices]])
    load, (chunks, stages) = _load(request, kinds, types), interleaved
    alone = types.has_embedding * types.has_head > 0
    rooms = np.zeros((len(types.has_head), len(kinds)), dtype=int)
    for depth in range(1, (stages or MAX_STAGES) + 1):
        held = float(depth)
        if chunks > 1 and stages:  # as the engine counts chunks
            held = (2 * (depth - 1) + (chunks - 1) * stages + 1) / chunks
        peak = stage_peak_bytes(replace(load, in_flight=np.where(alone, depth, held)), request.framework)
        rooms += (peak <= capacity) & (rooms == depth - 1)
    rooms[:, joint] = np.minimum(rooms[:, joint], rooms[:, number:])
    return rooms[:, :number]


def fewest_devices(kinds: Sequence[StageKind], types: StageTypes, rooms: np.ndarray) -> float:
    """Return the least devices any pipeline takes; of more than a link domain has, its messages leave it."""
    devices = np.array([kind.split * kind.width for kind in kinds])
    least = np.append(np.where(rooms > 0, devices[None, :], np.inf).min(1), np.inf)
    places = len(types.table) - 1
    after = np.full(places + 1, np.inf)
    after[places] = 0.0
    for start in range(places - 1, -1, -1):
        after[start] = (least[types.table[start]] + after).min()
    return float(after[0])


def _load(request: PlanRequest, kinds: Sequence[StageKind], types: StageTypes) -> StageLoad:
    model, framework = request.model, request.framework
    tp = np.array([[float(kind.tp) for kind in kinds]])
    cp = np.array([[float(kind.cp) for kind in kinds]])
    width = np.array([[float(kind.width * kind.cp) for kind in kinds]])
    ep = np.array([[float(kind.ep) for kind in kinds]])
    unit = framework.vocab_multiple * tp
    copies = 1.0 if request.cluster.num_devices == 1 else 2.0
    return StageLoad(
        kinds=tuple((block, types.counts[:, i : i + 1]) for i, (block, _) in enumerate(model.block_kinds())),
        has_embedding=types.has_embedding,
        has_head=types.has_head,
        hidden=model.hidden,
        vocab=np.ceil(model.vocab / unit) * unit,
        tied=float(model.tied_embeddings),
        in_flight=1.0,
        num_micro_batches=1e6,
        num_stages=np.where(types.has_embedding * types.has_head > 0, 1.0, 2.0),
        channels=np.array(
            [[float(nccl_channels(request.cluster.nodes[kind.node_group].device)) for kind in kinds]]
        ),
        micro_batch=np.array([[float(kind.micro_batch) for kind in kinds]]),
        seq_len=float(request.seq_len),
        tp=tp,
        cp=cp,
        ep=ep,
        etp=1.0,
        dp=width * copies,
        expert_dp=np.maximum(1.0, width * tp * copies / ep),
        shard_size=width,
        zero=np.array([[float(kind.zero) for kind in kinds]]),
        sp=(tp > 1) * 1.0,
        activation_bytes_per_element=4.0 if request.precision in ("fp32", "tf32") else 2.0,
        fp8=float(request.precision in ("fp8", "mxfp8")),
        fp4=float(request.precision == "nvfp4"),
        recompute=row([recompute_of(kind.recompute, 1) for kind in kinds], Recompute),
        offload_optimizer=0.0,
        offload_activations=0.0,
        state_bytes=optimizer_state_bytes(request.optimizer, framework.moment_bytes),
        outer_params=float(model.learned_positions * model.hidden),
        embedding_trainable=float(not model.embedding_frozen),
        head_trainable=float(not model.head_frozen),
    )
