"""Seconds of the ops of a pipeline by part: device tasks of their layers, and what the host adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from foreshard.graph.pipeline_schedules import Op
from foreshard.predict.tasks.host import joined_s
from foreshard.spec.prediction import TIME_PARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSeconds:
    """Seconds that ops are made of: of the device by part, and of the host, both (4, stages, chunks).

    `outside` is what sharded weights add to a forward and its backward, shape (stages, chunks, 2); `short`
    are the samples of the last micro-batch over those of the others, shape (stages, 1).
    """

    device: dict[str, np.ndarray]
    host: np.ndarray
    outside: np.ndarray
    short: np.ndarray
    sharpness: float

    def parts(self) -> dict[str, np.ndarray]:
        """Return the seconds of each op by part, of any micro-batch and of the last: (4, stages, chunks, 2).

        The host runs ahead from op to op, so what counts is its time over the device's for a forward and its
        backward, with what sharded weights add to them.
        """
        scale = np.stack([np.ones_like(self.short), self.short], axis=-1)  # (stages, 1, 2)
        parts = {name: value[..., None] * scale for name, value in self.device.items()}
        busy = sum(parts.values())
        pair = [Op.FORWARD, Op.BACKWARD]
        computed = busy[pair].sum(0)
        device_s = computed + self.outside
        added = joined_s(device_s, self.host[pair].sum(0)[..., None], self.sharpness) - device_s
        parts["host"] += busy / np.maximum(computed, 1e-12) * added
        return parts

    def sped_up(self, speeds: Mapping[str, float]) -> OpSeconds:
        """Return the ops with the tasks of some parts so many times as fast; `outside` stays."""
        device = {name: value / speeds.get(name, 1.0) for name, value in self.device.items()}
        return replace(self, device=device, host=self.host / speeds.get("host", 1.0))


def op_parts(
    sums: dict[str, np.ndarray],
    ends: dict[str, np.ndarray],
    first: np.ndarray,
    last: np.ndarray,
    between: np.ndarray,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return device seconds by part, shape (4, stages, chunks) each, and host seconds of every op.

    `sums` holds each task of `LayerTimes` over the layers of a chunk, `ends` each of `EndTimes` and the
    reduction of a table every micro-batch; `first` and `last` are 1 where a chunk holds the embedding, the
    head; `between` is host time outside the layers.
    """
    device = {name: np.zeros((4, *first.shape)) for name in TIME_PARTS}
    edge = first * ends["embedding_tensor"] / 2 + last * ends["head_tensor"] / 2
    weight = sums["backward_weight"] + first * ends["embedding_backward"] + last * ends["head_backward"] / 2
    given = sums["backward_input"] + last * ends["head_backward"] / 2
    device["compute"][Op.FORWARD] = (
        sums["forward"] + first * ends["embedding_forward"] + last * ends["head_forward"]
    )
    device["compute"][Op.BACKWARD] = given + weight
    device["compute"][Op.BACKWARD_INPUT] = given
    device["compute"][Op.BACKWARD_WEIGHT] = weight
    device["tensor_comm"][Op.FORWARD] = sums["tensor_forward"] + edge
    device["context_comm"][Op.FORWARD] = sums["context_forward"]
    device["expert_comm"][Op.FORWARD] = sums["expert_forward"]
    for op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        device["recompute"][op] = sums["recompute"]
        device["tensor_comm"][op] = sums["tensor_backward"] + sums["tensor_recompute"] + edge
        device["context_comm"][op] = sums["context_backward"]
        device["expert_comm"][op] = sums["expert_backward"] + sums["expert_recompute"]
        device["host"][op] = sums["offload_backward"]
    reduce = sums["reduce_backward"] + first * ends["embedding_reduce"] + last * ends["head_reduce"]
    device["data_comm"][Op.BACKWARD] = device["data_comm"][Op.BACKWARD_WEIGHT] = reduce
    device["host"][Op.FORWARD] = sums["offload_forward"]
    back = sums["host_backward"] + between
    return device, np.stack([sums["host_forward"] + between, back, back / 2, back / 2])
