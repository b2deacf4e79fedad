"""Transfers between pipeline stages: which ops they join and how they hold both ends.

Ops are numbered stage by stage, ``num_ops`` on each; ``source`` and ``target`` are the ops that send and
need each transfer, ``backward`` tells gradients from activations.

Source
------
megatron/core/pipeline_parallel/schedules.py: forward_backward_pipelining_without_interleaving,
forward_backward_pipelining_with_interleaving, recv_tensor_from_previous_stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreshard.graph.pipeline_schedules import Op
from foreshard.spec.plan import TURNING


def transfers(
    op: np.ndarray,
    stage: np.ndarray,
    chunk: np.ndarray,
    micro_batch: np.ndarray,
    ops: np.ndarray,
    after: np.ndarray,
    before: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Op that sends and op that needs it, for every activation and gradient that leaves a stage.

    `after` and `before` are the places of `next_places`.
    """
    to = np.where(op == Op.FORWARD, after[stage, chunk], before[stage, chunk])
    num_chunks = ops.shape[2]
    sends = (op != Op.BACKWARD_WEIGHT) & (to >= 0) & (to // num_chunks != stage)
    source = np.flatnonzero(sends)
    there = *divmod(to[source], num_chunks), micro_batch[source]
    back = np.maximum(ops[(Op.BACKWARD, *there)], ops[(Op.BACKWARD_INPUT, *there)])
    return source, np.where(op[source] == Op.FORWARD, ops[(Op.FORWARD, *there)], back)


def next_places(schedule: str, num_stages: int, num_chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where a sample goes from each chunk of each stage, and where from, shape (stages, chunks) each.

    A place is ``stage * num_chunks + chunk``, -1 where the model begins or ends. Chunks follow each other;
    where pipelines turn, the second leads back; under dualpipe it is a pipeline of its own, the other way.
    """
    down = [stage * num_chunks for stage in range(num_stages)]
    if schedule == "dualpipe":
        paths = [down, [place + 1 for place in reversed(down)]]
    elif schedule in TURNING:
        paths = [[*down, *(place + 1 for place in reversed(down))]]
    else:
        paths = [[place + chunk for chunk in range(num_chunks) for place in down]]
    after, before = np.full((2, num_stages * num_chunks), -1)
    for path in paths:
        after[path[:-1]], before[path[1:]] = path[1:], path[:-1]
    return after.reshape(num_stages, num_chunks), before.reshape(num_stages, num_chunks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferEnds:
    """When the two ends of each transfer communicate, if they hold their stage while they do.

    Call g of a stage lies before op g of that stage. A second receive follows the send of its call, other
    receives start with it.
    """

    send_call: np.ndarray
    receive_call: np.ndarray
    receive_second: np.ndarray
    send_holds: np.ndarray
    receive_holds: np.ndarray


def plain_ends(source: np.ndarray, target: np.ndarray, backward: np.ndarray, num_ops: int) -> TransferEnds:
    """Return the calls of Megatron's loop without interleaving."""
    send_call, receive_call = source % num_ops + 1, target % num_ops
    # a send and a receive with the same neighbour are one call; else the send comes first
    num_stages = max(source.max(initial=0), target.max(initial=0)) // num_ops + 1
    sends_backward = np.full((num_stages, num_ops + 1), -1)
    sends_backward[source // num_ops, send_call] = backward
    return TransferEnds(
        send_call=send_call,
        receive_call=receive_call,
        receive_second=sends_backward[target // num_ops, receive_call] == backward,
        send_holds=np.ones(len(source), dtype=bool),
        receive_holds=np.ones(len(source), dtype=bool),
    )


def interleaved_ends(
    source: np.ndarray,
    target: np.ndarray,
    backward: np.ndarray,
    num_ops: int,
    warm_up: np.ndarray,
    overlap: bool,
) -> TransferEnds:
    """Return the calls of Megatron's interleaved loop; ``overlap`` frees those of the steady state."""
    num_stages = len(warm_up)
    warm = warm_up[target // num_ops]
    all_warm_up = 2 * warm == num_ops
    send_steady = _is_steady(source % num_ops, warm_up[source // num_ops], num_ops)
    # between the ends of the pipeline, the receiver works num_stages visits behind the sender
    visit = _visit_of(source % num_ops, warm_up[source // num_ops], backward, num_ops) + num_stages
    wraps = target // num_ops == np.where(backward, num_stages - 1, 0)
    position = np.where(wraps, _position_of(visit, warm, backward, num_ops), target % num_ops)
    receive_steady = _is_steady(position, warm, num_ops)
    # the last warm-up call receives the first steady forward, the last steady call the backward after it
    receive_free = (receive_steady & (backward | (position > warm))) | (
        backward & (position == num_ops - warm) & ~all_warm_up
    )
    # without overlap one steady call serves a forward and the backward after it
    joined = not overlap
    return TransferEnds(
        send_call=source % num_ops + 1 + (send_steady & ~backward & joined),
        receive_call=position - (receive_steady & backward & joined),
        receive_second=backward & all_warm_up & (position == warm),
        send_holds=~send_steady | joined,
        receive_holds=~receive_free | joined,
    )


def _is_steady(position: np.ndarray, warm_up: np.ndarray, num_ops: int) -> np.ndarray:
    return (position >= warm_up) & (position < num_ops - warm_up)


def _visit_of(position: np.ndarray, warm_up: np.ndarray, backward: np.ndarray, num_ops: int) -> np.ndarray:
    """How many ops of the same direction the stage runs before the one at a position."""
    steady = (position - warm_up) // 2 + np.where(backward, 0, warm_up)
    outside = position - np.where(backward, num_ops // 2, 0)
    return np.where(_is_steady(position, warm_up, num_ops), steady, outside)


def _position_of(visit: np.ndarray, warm_up: np.ndarray, backward: np.ndarray, num_ops: int) -> np.ndarray:
    """Position of the op that ``visit`` others of its direction precede."""
    num_visits = num_ops // 2
    of_forward = np.where(visit < warm_up, visit, 2 * visit - warm_up)
    of_backward = np.where(visit < num_visits - warm_up, 2 * visit + 1 + warm_up, visit + num_visits)
    return np.where(backward, of_backward, of_forward)


def transfer_edges(
    ends: TransferEnds, source: np.ndarray, target: np.ndarray, transfer: np.ndarray, num_ops: int, hold: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Dependencies (task, before), and (stage, transfer) of what a stage waits for after its last op."""
    send_holds, receive_holds = ends.send_holds & hold, ends.receive_holds & hold
    send_stage, receive_stage = source // num_ops, target // num_ops
    sent = np.full((max(send_stage.max(initial=0), receive_stage.max(initial=0)) + 1, num_ops + 1), -1)
    sent[send_stage[send_holds], ends.send_call[send_holds]] = transfer[send_holds]
    sent_before = sent[receive_stage, ends.receive_call]
    second = receive_holds & ends.receive_second & (sent_before >= 0)
    edges = [
        (transfer[~send_holds], source[~send_holds]),
        (target[~receive_holds], transfer[~receive_holds]),
        (transfer[second], sent_before[second]),
    ]
    pending = []
    for holds, starts_call, stage, call in (
        (send_holds, send_holds, send_stage, ends.send_call),
        (receive_holds, receive_holds & ~second, receive_stage, ends.receive_call),
    ):
        first = starts_call & (call > 0)
        edges.append((transfer[first], (stage * num_ops + call - 1)[first]))
        followed = holds & (call < num_ops)
        edges.append(((stage * num_ops + call)[followed], transfer[followed]))
        final = holds & (call == num_ops)
        pending.append((stage[final], transfer[final]))
    return np.concatenate([np.stack(pair, axis=1) for pair in edges]), np.concatenate(
        [np.stack(pair, axis=1) for pair in pending]
    )
