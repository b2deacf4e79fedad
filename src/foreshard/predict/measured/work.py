"""Seconds of every pass of a pipeline, from measured layers: of products, and of sums over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from foreshard.predict.measured.costs import MeasuredCosts
from foreshard.predict.measured.memory import counts_of, part_again
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group


class PassSeconds:
    """Seconds of every pass, shape (stages, chunks, micro-batches), and of every rank apart."""

    def __init__(
        self,
        costs: MeasuredCosts,
        cluster: Cluster,
        group: Group,
        sizes: Sequence[int],
        device: Mapping[int, str],
    ):
        shape = (len(group.stages), group.num_chunks, len(sizes))
        self.forward, self.backward, self.inputs = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.of_rank: dict[int, tuple[float, float, float]] = {}
        distinct, which, times = np.unique(sizes, return_inverse=True, return_counts=True)
        for s, stage in enumerate(group.stages):
            counts = np.array([counts_of(stage, int(size)) for size in distinct]).T
            for place, rank in enumerate(stage.ranks):
                samples, total = counts[place // stage.tp], np.zeros(3)
                together = stage.ranks[place - place % stage.tp :][: stage.tp]
                for c, span in enumerate(stage.layers):
                    passes = _passes(costs, device[rank], span, samples, part_again(stage), stage.tp)
                    sums = [
                        inside + at_ends
                        for inside, at_ends in zip(
                            _sums(costs, cluster, together, span, samples, part_again(stage)),
                            _seams(costs, cluster, group, (s, c), together, samples),
                            strict=True,
                        )
                    ]
                    own = (passes[0] + passes[1] - passes[3], passes[3], sums[0] + sums[1])
                    total += np.array([seconds @ times for seconds in own])
                    ends = (passes[0] + sums[0], passes[1] + sums[1], passes[2] + sums[1])
                    for table, one in zip((self.forward, self.backward, self.inputs), ends, strict=True):
                        table[s, c] = np.maximum(table[s, c], one[which])
                self.of_rank[rank] = (float(total[0]), float(total[1]), float(total[2]))
        self.inputs[0, 0] = 0.0  # nobody is before the first stage: all of its backward can wait


def _passes(
    costs: MeasuredCosts, device: str, span: tuple[int, int], samples: np.ndarray, again: float, tp: int
) -> tuple[np.ndarray, ...]:
    """Return the seconds of forward, backward, its part for the input, and what runs again in both."""
    names = ("forward_s", "backward_s", "backward_input_s")
    forward, backward, inputs = (
        np.array([costs.work_s(device, span, name, int(n), tp) if n else 0.0 for n in samples])
        for name in names
    )
    repeated = again * forward
    return forward, backward + repeated, np.minimum(inputs, backward) + repeated, repeated


def _sums(
    costs: MeasuredCosts,
    cluster: Cluster,
    ranks: Sequence[int],
    span: tuple[int, int],
    samples: np.ndarray,
    again: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds that ranks need to sum what they compute together, in forward and backward."""
    if len(ranks) == 1:
        return np.zeros(len(samples)), np.zeros(len(samples))
    layers = costs.layers_on("", len(ranks))[slice(*span)]

    def told(name: str, size: int) -> float:
        rings = [ring for layer in layers for ring in getattr(layer, name)]
        return sum(part * costs.ring_s(cluster, ranks, each * size) for each, part in rings) if size else 0.0

    forward = np.array([told("sums_forward", int(n)) for n in samples])
    return forward, np.array([told("sums_backward", int(n)) for n in samples]) + again * forward


def _seams(
    costs: MeasuredCosts,
    cluster: Cluster,
    group: Group,
    at: tuple[int, int],
    ranks: Sequence[int],
    samples: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds in which cut sequences are put together at the ends of a chunk, with sp.

    Where the stage beside it has another tp: outputs in the forward, gradients of inputs in the backward.
    Putting together is the second half of a ring that sums.
    """
    s, c = at
    stages, virtual = group.stages, c * len(group.stages) + s
    lo, hi = stages[s].layers[c]

    def halves(beside: int, layer: int) -> np.ndarray:
        there = 0 <= beside < len(stages) * group.num_chunks
        if not (group.sp and len(ranks) > 1 and there and stages[beside % len(stages)].tp != len(ranks)):
            return np.zeros(len(samples))
        each = costs.layers[layer].boundary_bytes_per_sample
        return np.array([0.5 * costs.ring_s(cluster, ranks, each * int(n)) if n else 0.0 for n in samples])

    return halves(virtual + 1, hi - 1), halves(virtual - 1, lo - 1)
