"""Prices of the abstract problem from measured costs: one device a stage or tp, any cut, some sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreshard.planner.measured.places import Places
from foreshard.planner.solver.problem import Problem
from foreshard.predict.measured.costs import LayerCost, MeasuredCosts
from foreshard.spec.cluster import Cluster

_MANY = 10**6
_COPIES = 16
"""Pipelines up to which each number has its own tail; the ring of more hardly takes longer."""


def priced(
    costs: MeasuredCosts,
    cluster: Cluster,
    kinds: Sequence[Sequence[int]],
    sizes: Sequence[int],
    global_batch: int,
    tp: int = 1,
) -> Problem:
    """Return the problem: an option is (kind of device, micro-batch, tp), every interval a type.

    Parameters
    ----------
    costs : MeasuredCosts
    cluster : Cluster
    kinds : sequence of ranks alike
    sizes : sequence of int
        Micro-batches to choose from.
    global_batch : int
    tp : int
        That stages may have besides 1, on kinds that can.
    """
    types, starts, stops = _intervals(len(costs.layers))
    places = Places(cluster, kinds)
    options = [
        (k, m, degree)
        for k in range(len(kinds))
        for degree in sorted({1, tp} & {1, *places.degrees(costs, k)})
        for m in sizes
    ]
    time_s, room = np.empty((2, len(options), len(starts)))
    tails = []
    for o, (k, m, degree) in enumerate(options):
        device = cluster.device_of(kinds[k][0])
        prices = _Prices(costs.layers_on(device.name, degree), costs.slow_of(device.name), starts, stops)
        room[o] = prices.room(device.capacity_bytes, m)
        work_s = prices.work_s(m) + prices.over(_sums_s(costs, cluster, next(places.blocks(k, degree)), m))
        time_s[o] = np.where(room[o] > 0, work_s, np.inf)
        tails.append(prices)
    copies = tuple(range(1, min(cluster.num_devices, _COPIES) + 1))
    tail_s = np.array(
        [
            [
                _tail(costs, cluster, prices, next(places.blocks(k, degree)), count)
                for prices, (k, _, degree) in zip(tails, options, strict=True)
            ]
            for count in copies
        ]
    )
    takes = np.eye(len(kinds), dtype=int)[[k for k, _, _ in options]]
    takes *= np.array([degree for _, _, degree in options])[:, None]
    return Problem(
        counts=tuple(len(ranks) for ranks in kinds),
        global_batch=global_batch,
        types=types,
        takes=takes,
        max_stages=min(len(costs.layers), cluster.num_devices),
        micro_batch=np.array([m for _, m, _ in options]),
        grain=np.ones(len(options), dtype=int),
        time_s=time_s,
        copies=copies,
        tail_s=tail_s,
        max_in_flight=np.minimum(room, _MANY).astype(int),
        hop_s=np.zeros((len(options),) * 2),
        names=tuple(options),
    )


class _Prices:
    """Sums over every interval of layers on one device."""

    def __init__(self, layers: Sequence[LayerCost], slow: float, starts: np.ndarray, stops: np.ndarray):
        self._layers, self.slow, self.starts, self._stops = layers, slow, starts, stops

    def total(self, name: str, column: int | None = None) -> np.ndarray:
        """Return a layer's number summed over the layers of each interval."""
        return self.over(
            [
                getattr(layer, name) if column is None else getattr(layer, name)[column]
                for layer in self._layers
            ]
        )

    def over(self, each: Sequence[float]) -> np.ndarray:
        """Return numbers of layers summed over each interval."""
        upto = np.concatenate(([0.0], np.cumsum(each)))
        return upto[self._stops] - upto[self.starts]

    def work_s(self, samples: int) -> np.ndarray:
        """Return the seconds of a forward and a backward."""
        fixed, each = (self.total("forward_s", c) + self.total("backward_s", c) for c in (0, 1))
        return self.slow * (fixed + each * samples)

    def room(self, capacity_bytes: float, samples: int) -> np.ndarray:
        """Return the micro-batches whose activations fit beside the states."""
        fixed = 2 * self.total("parameter_bytes") + self.total("frozen_bytes") + self.total("state_bytes")
        kept = np.maximum(self.total("saved_bytes_per_sample") * samples, 1.0)
        return np.floor(np.maximum(capacity_bytes - fixed, 0.0) / kept)


def _sums_s(costs: MeasuredCosts, cluster: Cluster, ranks: Sequence[int], samples: int) -> list[float]:
    """Return the seconds that ranks need for the sums of each layer that they compute together."""
    return [
        sum(
            part * costs.ring_s(cluster, ranks, each * samples)
            for each, part in (*layer.sums_forward, *layer.sums_backward)
        )
        for layer in costs.layers_on("", len(ranks))
    ]


def _tail(
    costs: MeasuredCosts, cluster: Cluster, prices: _Prices, block: Sequence[int], copies: int
) -> np.ndarray:
    """Return the seconds after the last micro-batch: only the first stage is sure to be the last to end."""
    rank = block[0]
    others = [other for other in range(cluster.num_devices) if other != rank][: copies - 1]
    ring_s = [costs.ring_s(cluster, (rank, *others), size) for size in prices.total("parameter_bytes")]
    tail_s = prices.slow * prices.total("optimizer_s") + np.array(ring_s)
    if len(block) > 1 and copies == 1:  # what is whole on each of them they sum too
        cut = [costs.split_bytes(layer, len(block)) / len(block) for layer in range(len(costs.layers))]
        whole = prices.total("parameter_bytes") - prices.over(cut)
        tail_s += np.array([costs.ring_s(cluster, block, size) for size in whole])
    return np.where(prices.starts == 0, tail_s, 0.0)


def _intervals(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the type of every interval, and where types start and stop."""
    starts, stops = np.triu_indices(count)
    types = np.full((count + 1, count + 1), -1)
    types[starts, stops + 1] = np.arange(len(starts))
    return types, starts, stops + 1


def work_bound_s(
    costs: MeasuredCosts,
    cluster: Cluster,
    sizes: Sequence[int],
    global_batch: int,
    degrees: Sequence[int] = (),
) -> float:
    """Return seconds that no step can beat: all work at the least cost a sample, on all devices, no pause.

    Of a layer that ranks may compute together (`degrees`) it is the least of all ranks' parts, without sums.

    Devices that are one table slowed by factors need no program; otherwise every device may take the layers
    it is best at, in any part.

    Source
    ------
    Unrelated machines with preemption and no precedence: a linear program (Lawler and Labetoulle 1978).
    """
    names = [cluster.device_of(rank).name for rank in range(cluster.num_devices)]
    m = max(sizes)
    sample_s = {
        name: np.min([_layers_s(costs, name, tp, m) for tp in (1, *degrees) if _known(costs, name, tp)], 0)
        for name in dict.fromkeys(names)
    }
    if not any(name in costs.tables for name in sample_s):
        return float(global_batch / sum(1.0 / sample_s[name].sum() for name in names))
    return _unrelated_s([(sample_s[name], names.count(name)) for name in sample_s], global_batch)


def _known(costs: MeasuredCosts, name: str, tp: int) -> bool:
    return tp == 1 or tp in costs.parts.get(name if name in costs.tables else "", {})


def _layers_s(costs: MeasuredCosts, name: str, tp: int, samples: int) -> np.ndarray:
    """Return the seconds a sample of each layer, of all ranks that compute it together."""
    return np.array(
        [
            tp
            * costs.slow_of(name)
            * sum((line[0] / samples + line[1]) for line in (layer.forward_s, layer.backward_s))
            for layer in costs.layers_on(name, tp)
        ]
    )


def _unrelated_s(devices: Sequence[tuple[np.ndarray, int]], global_batch: int) -> float:
    """Return the least time by the program over (kind, layer): samples of the layer that the kind does."""
    from foreshard.planner.solver.pipeline_mix import _scipy

    kinds, layers = len(devices), len(devices[0][0])
    done = np.zeros((layers, kinds * layers + 1))
    busy = np.zeros((kinds, kinds * layers + 1))
    for k, (sample_s, count) in enumerate(devices):
        done[np.arange(layers), k * layers + np.arange(layers)] = 1.0
        busy[k, k * layers : (k + 1) * layers] = sample_s / count
        busy[k, -1] = -1.0
    aim = np.zeros(kinds * layers + 1)
    aim[-1] = 1.0
    made = _scipy().linprog(
        aim, A_ub=busy, b_ub=np.zeros(kinds), A_eq=done, b_eq=np.full(layers, float(global_batch))
    )
    assert made.success, made.message
    return float(made.fun) * (1 - 1e-9)
