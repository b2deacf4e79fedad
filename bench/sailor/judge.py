"""Sailor's iteration time, restated: what its simulator computes, for groups of replicas that may differ.

A `Group` is what Sailor calls a pipeline: replicas with the same cuts, each stage as slow as its slowest
replica. Sailor gives every group the same micro-batch and as many of them; here each group has its own. All
else is its formula (`Simulator.get_time_per_pipeline`, `estimate_sync_time`, `check_config_fits`).
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

NUM_LAYERS = 26
BUCKET_BYTES = 500_000_000
STATE_BYTES_PER_PARAM = 24
RESERVED_BYTES = {1: 2.0e9, 2: 3.0e9, 4: 3.0e9}
GPU_BYTES = {"A100-40": 40 * 1024**3, "V100-16": 16 * 1024**3}
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [start, stop) on `tp` devices of a kind."""

    gpu: str
    tp: int
    start: int
    stop: int


Replica = tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Replicas that cut the layers alike and take `rounds` micro-batches each."""

    replicas: tuple[Replica, ...]
    micro_batch: int
    rounds: int


@functools.cache
def profile() -> dict:
    """Return the derived profile (`profile.json` says whose it is)."""
    return json.loads(Path(__file__).with_name("profile.json").read_text())


@functools.cache
def times() -> dict[tuple[str, int, int], dict]:
    """Return the measured layer times by GPU, tensor-parallel degree and micro-batch."""
    return {(row["gpu"], row["tp"], row["micro_batch"]): row for row in profile()["times"]}


def kind_of(layer: int) -> int:
    """Return which of the stored layers a layer is: embedding, first block, block or head."""
    return 3 if layer == NUM_LAYERS - 1 else min(layer, 2)


@functools.cache
def compute_seconds(gpu: str, tp: int, start: int, stop: int, micro_batch: int) -> float:
    """Return forward and backward of one micro-batch over layers [start, stop); inf if not measured."""
    row = times().get((gpu, tp, micro_batch))
    if row is None:
        return math.inf
    kinds = [kind_of(layer) for layer in range(start, stop)]
    return sum(row["forward_s"][kind] + row["backward_s"][kind] for kind in kinds)


@functools.cache
def total(key: str, tp: int, start: int, stop: int) -> int:
    """Return parameters or activation floats of layers [start, stop) on each of `tp` devices."""
    return sum(profile()[key][str(tp)][kind_of(layer)] for layer in range(start, stop))


def gradient_bytes(start: int, stop: int) -> int:
    """Return the bytes of the gradient of layers [start, stop), not split."""
    return FLOAT_BYTES * total("params", 1, start, stop)


@functools.cache
def memory_bytes(tp: int, start: int, stop: int, micro_batch: int, in_flight: int) -> float:
    """Return the bytes on one device of a stage that holds the activations of `in_flight` micro-batches."""
    states = STATE_BYTES_PER_PARAM * total("params", tp, start, stop)
    activations = FLOAT_BYTES * micro_batch * total("activation_floats", tp, start, stop)
    return states + activations * in_flight + RESERVED_BYTES[tp]


@functools.cache
def transfer_seconds(
    size_bytes: float, sender: str, sender_tp: int, receiver: str, receiver_tp: int
) -> float:
    """Return the seconds of a message: bandwidth in GB/s is a parabola in the logarithm of its MB."""
    a, b, c = profile()["links"][f"{sender} {sender_tp} {receiver} {receiver_tp}"]
    x = math.log2(size_bytes / 1e6)
    return size_bytes / 1e9 / (a * x * x + b * x + c)


@functools.cache
def all_reduce_seconds(size_bytes: float, num_replicas: int, sender: str, receiver: str) -> float:
    """Return a ring all-reduce in buckets, over the link between one device of each kind."""
    seconds = 0.0
    while size_bytes > 0 and num_replicas > 1:
        bucket = min(size_bytes, BUCKET_BYTES)
        seconds += 2 * (num_replicas - 1) * transfer_seconds(bucket / num_replicas, sender, 1, receiver, 1)
        size_bytes -= bucket
    return seconds


def pipeline_seconds(group: Group) -> float:
    """Return the seconds of a group up to its synchronisation."""
    stages = list(zip(*group.replicas, strict=True))
    compute = [
        max(compute_seconds(s.gpu, s.tp, s.start, s.stop, group.micro_batch) for s in alike)
        for alike in stages
    ]
    messages = _message_seconds(stages, group.micro_batch)
    slowest = max(c + m for c, m in zip(compute, messages, strict=True))
    update = max(times()[s.gpu, s.tp, group.micro_batch]["update_s"] for alike in stages for s in alike)
    return (group.rounds - 1) * slowest + sum(messages) + sum(compute) + update


def _message_seconds(stages: list[tuple[Stage, ...]], micro_batch: int) -> list[float]:
    """Return what each stage waits for its neighbours in a micro-batch; both ends count by their rule."""
    depth = len(stages)
    seconds = []
    for i, alike in enumerate(stages):
        forth = (
            _slowest_message(alike, stages[i + 1], alike[0].stop - 1, micro_batch) if i < depth - 1 else 0.0
        )
        back = _slowest_message(alike, stages[i - 1], alike[0].start, micro_batch) if i else 0.0
        if i == 0:
            seconds.append(forth if depth <= 3 else 2 * forth)
        else:
            seconds.append(2 * back if i == depth - 1 else forth + back)
    return seconds


def _slowest_message(
    senders: tuple[Stage, ...], receivers: tuple[Stage, ...], layer: int, micro_batch: int
) -> float:
    size = message_bytes(layer, micro_batch)
    return max(
        transfer_seconds(size, s.gpu, s.tp, r.gpu, r.tp) for s, r in zip(senders, receivers, strict=True)
    )


def message_bytes(layer: int, micro_batch: int) -> int:
    """Return the bytes of a layer's output."""
    return FLOAT_BYTES * profile()["message_floats"][kind_of(layer)] * micro_batch


def sync_seconds(groups: tuple[Group, ...]) -> float:
    """Return the all-reduce over all replicas: the longest of any stage.

    A device reduces what it holds, over the slowest link between neighbours of the ring that hold any of it.
    Where all replicas cut alike this is Sailor's formula for one pipeline that holds them all.
    """
    replicas = [replica for group in groups for replica in group.replicas]
    slowest = 0.0
    for start, stop in {(s.start, s.stop) for replica in replicas for s in replica}:
        held = [tuple(s for s in replica if s.start < stop and s.stop > start) for replica in replicas]
        split = min(s.tp for stages in held for s in stages if (s.start, s.stop) == (start, stop))
        neighbours = set(pairwise(held))
        for pair in {(a.gpu, b.gpu) for x, y in neighbours for a in x for b in y}:
            slowest = max(
                slowest, all_reduce_seconds(gradient_bytes(start, stop) / split, len(replicas), *pair)
            )
    return slowest


def iteration_seconds(groups: tuple[Group, ...]) -> float:
    """Return the seconds of a step: the slowest group, then the all-reduce over all."""
    return max(pipeline_seconds(group) for group in groups) + sync_seconds(groups)


def fits(groups: tuple[Group, ...]) -> bool:
    """Return whether every stage fits by Sailor's check: the i-th of S holds S - i micro-batches."""
    return all(
        memory_bytes(s.tp, s.start, s.stop, group.micro_batch, len(replica) - i) <= GPU_BYTES[s.gpu]
        for group in groups
        for replica in group.replicas
        for i, s in enumerate(replica)
    )


def samples(groups: tuple[Group, ...]) -> int:
    """Return the samples that the micro-batches of all groups have room for."""
    return sum(len(group.replicas) * group.rounds * group.micro_batch for group in groups)


def devices(groups: tuple[Group, ...]) -> dict[str, int]:
    """Return the devices used of each kind."""
    used = dict.fromkeys(GPU_BYTES, 0)
    for group in groups:
        for replica in group.replicas:
            for s in replica:
                used[s.gpu] += s.tp
    return used
