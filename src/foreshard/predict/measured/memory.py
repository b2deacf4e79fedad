"""What a rank holds under a plan, from the bytes that were measured of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from foreshard.cost.memory_activations import recompute_of
from foreshard.graph.pipeline_schedules import Op, stage_order
from foreshard.predict.measured.costs import MeasuredCosts
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group, Plan, Stage
from foreshard.spec.prediction import MEMORY_PARTS, Memory

GATHERED_LAYERS = 2
"""Layers whose values ZeRO 3 holds whole: the one that computes, and the next."""


def measured_memory(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> Memory:
    """Return what the fullest rank holds, tensors only, and every stage's peak."""
    peaks, worst, where = [], None, 0
    for group in plan.groups:
        row = []
        for s, stage in enumerate(group.stages):
            parts = _stage_bytes(costs, group, stage, s)
            row.append(sum(parts.values()))
            for rank in stage.ranks:
                full = sum(parts.values()) / cluster.device_of(rank).capacity_bytes
                if worst is None or full > worst[0]:
                    worst, where = (full, parts), rank
        peaks.append(tuple(row))
    assert worst is not None
    peak, capacity = sum(worst[1].values()), cluster.device_of(where).capacity_bytes
    return Memory(
        peak_bytes=peak,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=peak,
        peak_rank=where,
        capacity_bytes=capacity,
        fits=peak <= capacity,
        breakdown_bytes=dict.fromkeys(MEMORY_PARTS, 0.0) | worst[1],
        per_stage_peak_bytes=tuple(peaks),
    )


def stage_parts(costs: MeasuredCosts, plan: Plan) -> tuple[tuple[dict[str, float], ...], ...]:
    """Return the parts of the peak of each stage of each group, bytes."""
    empty = dict.fromkeys(MEMORY_PARTS, 0.0)
    return tuple(
        tuple(empty | _stage_bytes(costs, group, stage, s) for s, stage in enumerate(group.stages))
        for group in plan.groups
    )


def rooms(
    costs: MeasuredCosts,
    starts: np.ndarray,
    stops: np.ndarray,
    *,
    tp: int,
    samples: int,
    capacity_bytes: float,
    recompute: str = "none",
) -> np.ndarray:
    """Return the micro-batches that stages can keep at once: most under which `measured_memory` fits.

    Of stages of layers [start, stop), on one device or tp, that share out nothing.

    Parameters
    ----------
    recompute : {'none', 'full'}

    Returns
    -------
    ndarray, shape (stages,)
        Whole numbers: 0 where not even one fits, inf where one keeps nothing.
    """
    held = _held_bytes(costs, starts[:, None], stops[:, None], tp)
    if recompute == "none":
        kept, beside = _kept_bytes(costs, starts, stops, tp, samples)
    else:
        kept, beside = _over_intervals(
            *_run_again(costs, np.arange(len(costs.layers) + 1), tp, samples), starts, stops
        )
    left = capacity_bytes - 2 * held.own - held.frozen - held.states
    room = np.divide(left - beside, kept, out=np.full(len(kept), np.inf), where=kept > 0)
    return np.where(left < np.maximum(beside, held.step), 0.0, np.floor(room))


def least_bytes(costs: MeasuredCosts) -> float:
    """Return what the whole model takes on one device without activations."""
    held = _held_bytes(costs, np.array([[0]]), np.array([[len(costs.layers)]]), 1)
    return float((2 * held.own + held.frozen + held.states).item())


class _HeldBytes(NamedTuple):
    """What stages hold whatever passes them, and at the optimizer's step; arrays of shape (stages,)."""

    own: np.ndarray  # trained parameters; their gradients take as much
    frozen: np.ndarray
    states: np.ndarray
    step: np.ndarray


def _held_bytes(costs: MeasuredCosts, starts: np.ndarray, stops: np.ndarray, tp: int) -> _HeldBytes:
    """Return what stages hold of their chunks of layers, starts and stops of shape (stages, chunks)."""
    frozen = costs.sums("", tp).upto("frozen_bytes")
    return _HeldBytes(
        own=costs.held("parameter_bytes", starts, stops, tp),
        frozen=(frozen[stops] - frozen[starts]).sum(-1),
        states=costs.held("state_bytes", starts, stops, tp),
        step=costs.held("step_bytes", starts, stops, tp),
    )


def _kept_bytes(
    costs: MeasuredCosts, starts: np.ndarray, stops: np.ndarray, tp: int, samples: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what intervals keep of a micro-batch until its backward, and the most that it holds beyond."""
    table = costs.layers_on("", tp)
    saved, beside = (
        np.array([number(layer) for layer in table])
        for number in (lambda layer: layer.saved_bytes(samples), lambda layer: layer.beside_bytes(samples))
    )
    return _over_intervals(saved, beside, starts, stops)


def _run_again(
    costs: MeasuredCosts, ends: np.ndarray, tp: int, samples: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what units of layers between `ends` hand on, and what they make when they run again."""
    made = np.add(*_kept_bytes(costs, ends[:-1], ends[1:], tp, samples))
    table = costs.layers_on("", tp)
    return np.array([table[end - 1].boundary_bytes(samples) for end in ends[1:]]), made


def _over_intervals(
    kept: np.ndarray, made: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return what is kept over intervals, and the most that is made beyond: what later ones kept is gone."""
    upto = np.concatenate(([0.0], np.cumsum(kept)))
    ends = np.stack((starts, stops), axis=-1).ravel()
    most = np.maximum.reduceat(np.append(upto[1:] + made, 0.0), ends)[::2]
    return upto[stops] - upto[starts], np.maximum(most - upto[stops], 0.0)


def _stage_bytes(costs: MeasuredCosts, group: Group, stage: Stage, place: int) -> dict[str, float]:
    chunks = np.array(stage.layers)
    own, frozen, states, step = (
        float(part.item()) for part in _held_bytes(costs, chunks[None, :, 0], chunks[None, :, 1], stage.tp)
    )
    samples = max(counts_of(stage, group.micro_batch))
    kept, temporary = zip(*(_saved_bytes(costs, stage, span, samples) for span in stage.layers), strict=True)
    shards = stage.inner_dp if stage.zero >= 1 else 1
    held, whole = own, 0.0
    if stage.zero >= 3 and shards > 1:
        table = costs.layers_on("", stage.tp)
        layers = [table[layer] for lo, hi in stage.layers for layer in range(lo, hi)]
        sizes = [costs.moved_share * layer.parameter_bytes for layer in layers]
        whole = max(sum(sizes[i : i + GATHERED_LAYERS]) for i in range(len(sizes)))
        held = own / shards
    parts = {
        "parameters": held + frozen + whole,
        "gradients": held + whole,
        "optimizer": states / shards,
        "activations": _most_kept(group, place, kept),
        "temporary": max(temporary),
    }
    if step / shards > parts["activations"] + parts["temporary"]:  # nothing is kept by then
        return parts | {"activations": 0.0, "temporary": step / shards}
    return parts


def _saved_bytes(
    costs: MeasuredCosts, stage: Stage, span: tuple[int, int], samples: int
) -> tuple[float, float]:
    """Return the bytes of a micro-batch kept until its backward, and those made in it, or again."""
    start, stop = span
    saved, beside = _kept_bytes(costs, np.array([start]), np.array([stop]), stage.tp, samples)
    again = recomputed_share(stage)
    if not again:
        return float(saved.item()), float(beside.item())
    ends = np.append(np.arange(start, stop, int(recompute_of(stage.recompute, stop - start).unit)), stop)
    handed, made = _run_again(costs, ends, stage.tp, samples)
    whole = np.array([0]), np.array([len(made)])
    later, most = _over_intervals(again * handed, made, *whole)
    return float(saved.item() * (1 - again) + later.item()), float(most.item())


def _most_kept(group: Group, place: int, bytes_of_chunk: Sequence[float]) -> float:
    """Return the largest sum of what a stage keeps of the micro-batches under way."""
    order = stage_order(
        group.schedule,
        num_stages=len(group.stages),
        num_micro_batches=group.num_micro_batches,
        num_chunks=group.num_chunks,
    )[place]
    op, chunk = order[:, 0], order[:, 1]
    change = np.where(op == Op.FORWARD, 1.0, np.where(op == Op.BACKWARD_INPUT, 0.0, -1.0))
    return float(np.cumsum(change * np.array(bytes_of_chunk)[chunk]).max())


def counts_of(stage: Stage, size: int) -> list[int]:
    """Return the samples of a micro-batch that each rank of a stage takes."""
    weights = stage.rank_shares or (1,) * stage.inner_dp
    bounds = [size * int(seen) // sum(weights) for seen in np.cumsum((0, *weights))]
    return [hi - lo for lo, hi in pairwise(bounds)]


def recomputed_share(stage: Stage) -> float:
    """Return the part of the forward that runs again in the backward; the runtime recomputes whole layers."""
    if stage.recompute.startswith("selective"):
        return 1.0
    return float(recompute_of(stage.recompute, max(hi - lo for lo, hi in stage.layers)).full)
