"""Seconds of every pass of a pipeline, from measured layers: their computation, and sums over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreshard.predict.measured.costs import MeasuredCosts
from foreshard.predict.measured.memory import counts_of, recomputed_share
from foreshard.predict.tasks.host import joined_s
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group, Stage

_BUSY = ("compute_s", "recompute_s", "host_s", "tensor_s")


class PassSeconds:
    """Seconds of every pass of a group, shape (stages, chunks, micro-batches), and of every rank by itself.

    A stage takes as long as its slowest rank.
    """

    def __init__(self, costs: MeasuredCosts, cluster: Cluster, group: Group):
        self._costs, self._cluster, self._group = costs, cluster, group
        self.sizes = [
            min(group.micro_batch, group.share - lo) for lo in range(0, group.share, group.micro_batch)
        ]
        self._distinct = np.unique(self.sizes, return_inverse=True, return_counts=True)
        shape = (len(group.stages), group.num_chunks, len(self.sizes))
        self.forward, self.backward, self.backward_input = np.zeros((3, *shape))
        self.of_rank: dict[int, dict[str, float]] = {}
        """Seconds of a rank in all passes of a step, as `_BUSY` names them."""
        for s in range(len(group.stages)):
            self._add_stage(s)
        self.backward_input[0, 0] = 0.0  # nobody is before the first stage: all of its backward can wait

    def _add_stage(self, s: int) -> None:
        stage = self._group.stages[s]
        distinct, which, times = self._distinct
        counts = np.array([counts_of(stage, int(size)) for size in distinct]).T  # (inner dp ranks, sizes)
        for lo in range(0, len(stage.ranks), stage.tp):
            block, samples = stage.ranks[lo : lo + stage.tp], counts[lo // stage.tp]
            sums = [self._sums(s, c, block, samples) for c in range(len(stage.layers))]
            for rank in block:
                total = np.zeros(len(_BUSY))
                for c, (sum_forward, sum_backward) in enumerate(sums):
                    forward, backward, inputs, again = self._passes(s, c, rank, samples)
                    longer = self._longer(s, c, rank, samples, forward + backward)
                    own = (
                        forward + backward - again,
                        again,
                        (longer - 1.0) * (forward + backward),
                        sum_forward + sum_backward,
                    )
                    forward, backward, inputs = longer * forward, longer * backward, longer * inputs
                    total += np.array([seconds @ times for seconds in own])
                    for table, seconds in (
                        (self.forward, forward + sum_forward),
                        (self.backward, backward + sum_backward),
                        (self.backward_input, inputs + sum_backward),
                    ):
                        table[s, c] = np.maximum(table[s, c], seconds[which])
                self.of_rank[rank] = dict(zip(_BUSY, total.tolist(), strict=True))

    def _passes(self, s: int, c: int, rank: int, samples: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the seconds of forward, backward, its part for the input, and what runs again in both."""
        stage, device = self._group.stages[s], self._cluster.device_of(rank).name
        forward, backward, inputs = (
            self._costs.work_s(device, stage.layers[c], name, samples, stage.tp) * (samples > 0)
            for name in ("forward_s", "backward_s", "backward_input_s")
        )
        faster = self._costs.speed
        again = recomputed_share(stage) * forward / faster("recompute")
        forward, backward, inputs = (seconds / faster("compute") for seconds in (forward, backward, inputs))
        return forward, backward + again, np.minimum(inputs, backward) + again, again

    def _longer(self, s: int, c: int, rank: int, samples: np.ndarray, device_s: np.ndarray) -> np.ndarray:
        """Return how many times as long a forward and its backward take with the host that launches them."""
        stage, costs = self._group.stages[s], self._costs
        lo, hi = stage.layers[c]
        device = self._cluster.device_of(rank).name
        upto = np.array([costs.launches_s(device, count) for count in samples])  # (sizes, layers + 1, 2)
        forward_s, backward_s = (upto[:, hi] - upto[:, lo]).T
        host_s = (forward_s * (1.0 + recomputed_share(stage)) + backward_s) / costs.speed("host")
        busy = device_s > 0
        joined = joined_s(device_s[busy], host_s[busy], costs.host_sharpness)
        found = np.ones(len(device_s))
        found[busy] = joined / device_s[busy]
        return found

    def _sums(
        self, s: int, c: int, block: Sequence[int], samples: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds that ranks need to sum what they compute together, in forward and backward."""
        if len(block) == 1:
            return np.zeros(len(samples)), np.zeros(len(samples))
        stage = self._group.stages[s]
        layers = self._costs.layers_on("", len(block))[slice(*stage.layers[c])]
        seconds = []
        for name in ("sums_forward", "sums_backward"):
            rings = np.array([ring for layer in layers for ring in getattr(layer, name)]).reshape(-1, 2)
            each = self._costs.ring_s(self._cluster, block, rings[:, :1] * samples)
            seconds.append((rings[:, 1:] * each).sum(0) * (samples > 0))
        forward, backward = seconds
        after, before = self._seams(s, c, block, samples)
        speed = self._costs.speed("tensor_comm")
        return (forward + after) / speed, (backward + recomputed_share(stage) * forward + before) / speed

    def _seams(
        self, s: int, c: int, block: Sequence[int], samples: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds in which parts are put together at the ends of a chunk.

        Parts are cut sequences, with sp, or what the ranks of a stage hand on without summing. They are put
        together where the stage beside it has another tp: outputs in the forward, gradients of inputs in the
        backward. Putting together is the second half of a ring that sums.
        """
        stages, virtual = self._group.stages, c * len(self._group.stages) + s
        lo, hi = stages[s].layers[c]

        def seam_s(beside: int, layer: int) -> np.ndarray:
            exists = 0 <= beside < len(stages) * self._group.num_chunks
            parts = self._group.sp or self._costs.layers_on("", len(block))[layer].splits_boundary
            if not (parts and exists and stages[beside % len(stages)].tp != len(block)):
                return np.zeros(len(samples))
            size = self._costs.layers[layer].boundary_bytes(samples)
            return 0.5 * self._costs.ring_s(self._cluster, block, size) * (samples > 0)

        return seam_s(virtual + 1, hi - 1), seam_s(virtual - 1, lo - 1)


def layer_shares(costs: MeasuredCosts, device: str, stage: Stage, name: str, samples: float) -> np.ndarray:
    """Return the share of each layer of a stage alone in its pass: of the longer of device and host."""
    lo, hi = stage.layers[0]
    device_s = np.array([costs.work_s(device, (i, i + 1), name, samples, stage.tp) for i in range(lo, hi)])
    host_s = np.diff(costs.launches_s(device, samples), axis=0)[lo:hi, int(name == "backward_s")]
    longer_s = joined_s(device_s, host_s, costs.host_sharpness)
    return np.asarray(longer_s / (longer_s.sum() or 1.0))
