"""The abstract problem from measured costs: stages of one device or of tp, any cut, some micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from foreshard.planner.measured.places import Places
from foreshard.planner.solver.problem import Problem
from foreshard.predict.measured.costs import MeasuredCosts
from foreshard.predict.measured.memory import rooms
from foreshard.predict.tasks.host import joined_s
from foreshard.spec.cluster import Cluster

_MOST_IN_FLIGHT = 10**6
"""Micro-batches: more than any step has, where activations take no memory to speak of."""
_COPIES = 16
"""Pipelines up to which each number has its own tail; the ring of more hardly takes longer."""


class StageOption(NamedTuple):
    """What may compute a stage, and how: kind of device, samples of a micro-batch, tp, recomputation."""

    kind: int
    micro_batch: int
    tp: int
    recompute: str


def priced(
    costs: MeasuredCosts,
    places: Places,
    sizes: Sequence[int],
    global_batch: int,
    tp: int = 1,
    rules: Sequence[str] = ("none",),
) -> Problem:
    """Return the problem: its options are `StageOption`, every interval is a type.

    Parameters
    ----------
    costs : MeasuredCosts
    places : Places
    sizes : sequence of int
        Micro-batches to choose from.
    global_batch : int
    tp : int
        That stages may have besides 1, on kinds that can.
    rules : sequence of {'none', 'full'}
        Of recomputation, that stages may have.
    """
    types, starts, stops = _intervals(len(costs.layers))
    cluster, kinds = places.cluster, places.kinds
    options = [
        StageOption(k, m, degree, rule)
        for k in range(len(kinds))
        for degree in sorted({1, tp} & {1, *places.degrees(costs, k)})
        for m in sizes
        for rule in rules
    ]
    copies = tuple(range(1, min(cluster.num_devices, _COPIES) + 1))
    time_s, room = np.empty((2, len(options), len(starts)))
    tail_s = np.empty((len(copies), len(options), len(starts)))
    for o, (k, m, degree, rule) in enumerate(options):
        device, block = cluster.device_of(kinds[k][0]), next(places.blocks(k, degree))
        stages = _Stages(costs, cluster, block, starts, stops)
        room[o] = rooms(
            costs, starts, stops, tp=degree, samples=m, capacity_bytes=device.capacity_bytes, recompute=rule
        )
        time_s[o] = np.where(room[o] > 0, stages.pass_s(m, forwards=1 + (rule == "full")), np.inf)
        for c, count in enumerate(copies):
            tail_s[c, o] = stages.tail_s(count)
    takes = np.eye(len(kinds), dtype=int)[[option.kind for option in options]]
    takes *= np.array([option.tp for option in options])[:, None]
    return Problem(
        counts=tuple(len(ranks) for ranks in kinds),
        global_batch=global_batch,
        types=types,
        takes=takes,
        max_stages=min(len(costs.layers), cluster.num_devices),
        micro_batch=np.array([option.micro_batch for option in options]),
        grain=np.ones(len(options), dtype=int),
        time_s=time_s,
        copies=copies,
        tail_s=tail_s,
        max_in_flight=np.minimum(room, _MOST_IN_FLIGHT).astype(int),
        hop_s=np.zeros((len(options),) * 2),
        names=tuple(options),
    )


class _Stages:
    """Every interval of layers as a stage on a block of ranks.

    Parameters
    ----------
    costs : MeasuredCosts
    cluster : Cluster
    block : sequence of ranks
        That compute the layers together; one rank computes them alone.
    starts, stops : ndarray of int, shape (intervals,)
    """

    def __init__(
        self,
        costs: MeasuredCosts,
        cluster: Cluster,
        block: Sequence[int],
        starts: np.ndarray,
        stops: np.ndarray,
    ):
        self._costs, self._cluster, self._block = costs, cluster, block
        self._starts, self._stops = starts, stops
        self._device = cluster.device_of(block[0]).name
        self._slow = costs.slow_of(self._device)
        self._sums = costs.sums(self._device, len(block))

    def _total(self, name: str) -> np.ndarray:
        """Return a number of layers summed over each interval, shape (intervals,) or (intervals, 2)."""
        return self._over(self._sums.upto(name))

    def _over(self, upto: np.ndarray) -> np.ndarray:
        return upto[self._stops] - upto[self._starts]

    def _ring_s(self, ranks: Sequence[int], num_bytes: np.ndarray) -> np.ndarray:
        return np.asarray(self._costs.ring_s(self._cluster, ranks, num_bytes))

    def pass_s(self, samples: int, forwards: int = 1) -> np.ndarray:
        """Return the seconds of so many forwards and a backward, sums over the block included."""
        runs = np.array([forwards, 1.0])
        forward_s, backward_s = (
            self._over(self._sums.upto_seconds(name, samples)) for name in ("forward_s", "backward_s")
        )
        launches_s = self._over(self._costs.launches_s(self._device, samples)) @ runs
        seconds = np.asarray(
            joined_s(self._slow * (forwards * forward_s + backward_s), launches_s, self._costs.host_sharpness)
        )
        if len(self._block) == 1:
            return seconds
        sums = [0.0]
        for layer in self._costs.layers_on("", len(self._block)):
            rings = np.array((*forwards * layer.sums_forward, *layer.sums_backward)).reshape(-1, 2)
            sums.append(float(rings[:, 1] @ self._ring_s(self._block, rings[:, 0] * samples)))
        return seconds + self._over(np.cumsum(sums))

    def tail_s(self, copies: int) -> np.ndarray:
        """Return the seconds after the last micro-batch; only the first stage is sure to end last."""
        first, trained = self._block[0], self._costs.moved_share * self._total("parameter_bytes")
        others = [rank for rank in range(self._cluster.num_devices) if rank != first][: copies - 1]
        seconds = self._slow * self._total("optimizer_s") + self._ring_s((first, *others), trained)
        tp = len(self._block)
        if tp > 1 and copies == 1 and self._costs.by_formula:  # of what they hold whole, only summands
            seconds = seconds + self._ring_s(self._block, self._total("summed_bytes"))
        elif tp > 1 and copies == 1:  # what is whole on each of them they sum too
            split = [self._costs.split_bytes(layer, tp) / tp for layer in range(len(self._costs.layers))]
            whole = trained - self._over(np.cumsum([0.0, *split]))
            seconds = seconds + self._ring_s(self._block, whole)
        return np.where(self._starts == 0, seconds, 0.0)


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
        name: np.min([_least_s(costs, name, tp, m) for tp in (1, *degrees) if _known(costs, name, tp)], 0)
        for name in dict.fromkeys(names)
    }
    if not any(name in costs.tables for name in sample_s):
        return float(global_batch / sum(1.0 / sample_s[name].sum() for name in names))
    return _unrelated_s([(sample_s[name], names.count(name)) for name in sample_s], global_batch)


def one_pass_s(costs: MeasuredCosts, cluster: Cluster, most: int, degrees: Sequence[int] = ()) -> float:
    """Return seconds that no step can beat: a micro-batch from the first layer to the last and back.

    Every layer takes the least that it does on any device, at any size up to `most` samples, computed by one
    rank or by as many as `degrees` say; its launches are those of the host that is quickest at them. Stages
    take turns, and each is as long as its device and its host together: no sum of such is shorter than the
    two of all layers put together.
    """
    names = dict.fromkeys(cluster.device_of(rank).name for rank in range(cluster.num_devices))
    device_s = [
        _least_pass_s(costs, name, tp, most)
        for name in names
        for tp in (1, *degrees)
        if _known(costs, name, tp)
    ]
    host_s = [np.diff(costs.launches_s(name, size), axis=0).sum(1) for name in names for size in (1, most)]
    least_s = float(np.min(device_s, axis=0).sum()), float(np.min(host_s, axis=0).sum())
    return float(joined_s(*least_s, costs.host_sharpness))


def _known(costs: MeasuredCosts, name: str, tp: int) -> bool:
    return tp == 1 or tp in costs.parts.get(name if name in costs.tables else "", {})


def _least_s(costs: MeasuredCosts, name: str, tp: int, most: int) -> np.ndarray:
    """Return the least seconds a sample of each layer, of all ranks that compute it together.

    On a line between two sizes they are least at one of its ends.
    """
    seconds, sizes = _seconds_by_size(costs, name, tp, most)
    return np.asarray(tp * (seconds / sizes).min(axis=1))


def _least_pass_s(costs: MeasuredCosts, name: str, tp: int, most: int) -> np.ndarray:
    """Return the least seconds of a forward and backward of each layer on a rank, at any size."""
    return np.asarray(_seconds_by_size(costs, name, tp, most)[0].min(axis=1))


def _seconds_by_size(costs: MeasuredCosts, name: str, tp: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of forward and backward of each layer on a rank, by size, and the ends of lines."""
    sums, layers = costs.sums(name, tp), costs.layers_on(name, tp)
    sizes = np.array(sorted({1, *(size for size in layers[0].timed_sizes if size < most), most}))
    upto = sums.upto_seconds("forward_s", sizes) + sums.upto_seconds("backward_s", sizes)
    return costs.slow_of(name) * np.diff(upto, axis=0), sizes


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
