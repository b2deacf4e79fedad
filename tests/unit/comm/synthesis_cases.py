"""Tori as TACOS runs all-gathers on (50 GiB/s and 0.5 us a link), random networks, schedules on integers."""

from __future__ import annotations

import itertools

import numpy as np

from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.synthesis.budget import SynthesisBudget
from foreshard.comm.topology.graph import Edge, Topology, Vertex


class Wiring:
    """Collects named vertices and links between them."""

    def __init__(self):
        self.index, self.vertices, self.links = {}, [], []

    def vertex(self, name, kind="device", node=-1, **more):
        self.index[name] = len(self.vertices)
        self.vertices.append(Vertex(name=name, kind=kind, node=node, **more))

    def link(self, source, target, rate, latency_s=0.0, both=False):
        ends = (self.index[source], self.index[target])
        for one, other in (ends, ends[::-1]) if both else (ends,):
            self.links.append(Edge(source=one, target=other, bytes_per_s=rate, latency_s=latency_s))

    def topology(self):
        return Topology(vertices=tuple(self.vertices), links=tuple(self.links))


def torus(*shape, rate=50 * 2**30, latency_s=0.5e-6, wrap=True):
    w = Wiring()
    places = list(itertools.product(*(range(n) for n in shape)))
    for place in places:
        w.vertex(str(place))
    for place in places:
        for axis, n in enumerate(shape):
            for step in (1, -1):
                to = list(place)
                to[axis] += step
                if wrap or 0 <= to[axis] < n:
                    to[axis] %= n
                    w.link(str(place), str(tuple(to)), rate, latency_s)
    return w.topology()


def random_network(rng, num_devices, num_switches, density=0.5):
    """Return a strongly connected network of a few vertices."""
    w = Wiring()
    for i in range(num_devices):
        w.vertex(f"d{i}")
    for i in range(num_switches):
        w.vertex(f"s{i}", "switch")
    names = list(w.index)
    order = rng.permutation(len(names))
    for a, b in zip(order, np.roll(order, 1), strict=True):
        w.link(names[a], names[b], float(rng.integers(1, 9)))
    for a, b in itertools.permutations(range(len(names)), 2):
        if rng.random() < density:
            w.link(names[a], names[b], float(rng.integers(1, 9)))
    return w.topology()


def wrong_places(schedule: Schedule) -> list[str]:
    """Execute a schedule on integers, and return what is not as its chunks promise.

    Every source holds its own power of two of each chunk, so that a sum says what is in it. Sends are
    executed in the order of their rounds, all of one round at once, and in the reverse order within a round:
    only what the dependencies guarantee is used.
    """
    rounds = schedule.rounds()
    held: dict[tuple[int, int], int] = {}
    for c, chunk in enumerate(schedule.chunks):
        for rank in chunk.sources:
            held[rank, c] = 1 << rank
    wrong = []
    order = np.lexsort((-np.arange(schedule.num_sends), rounds))
    for _, group in itertools.groupby(order.tolist(), key=lambda i: rounds[i]):
        arriving = []
        for i in group:
            key = int(schedule.source[i]), int(schedule.chunk[i])
            if key not in held:
                wrong.append(f"send {i}: place {key[0]} does not hold chunk {key[1]}")
            arriving.append((i, held.get(key, 0)))
        for i, value in arriving:
            key = int(schedule.target[i]), int(schedule.chunk[i])
            held[key] = held.get(key, 0) + value if schedule.is_reduced[i] else value
    for c, chunk in enumerate(schedule.chunks):
        total = sum(1 << rank for rank in chunk.sources)
        wrong += [
            f"rank {r} lacks chunk {c}: {held.get((r, c), 0):b}"
            for r in chunk.targets
            if held.get((r, c)) != total
        ]
    return wrong


LOOK_S = 5e-5
"""What a look at the clock counts for, whatever the machine: searches look once for each small step."""


def counted(seconds: float) -> SynthesisBudget:
    """A budget that ends after a number of looks at the clock."""
    looks = itertools.count()
    return SynthesisBudget(seconds, lambda: next(looks) * LOOK_S, lambda: 0.0)
