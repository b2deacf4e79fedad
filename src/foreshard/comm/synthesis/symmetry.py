"""Shifts of the ranks that leave a topology as it is, so that one rank's part of a schedule tells all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from foreshard.comm.topology.graph import Topology


@dataclass(frozen=True, kw_only=True, eq=False)
class Translations:
    """A commuting group of automorphisms with exactly one member that takes rank 0 to each rank.

    Ranks are numbers in a mixed radix; the member of rank g adds g's digits, without carry.
    """

    radix: tuple[int, ...]  # digits' sizes, the fastest first; their product is the number of ranks
    link_orbit: np.ndarray  # int, shape (links,); links that shifts take to each other have the same number

    def added(self, ranks: np.ndarray, shift: np.ndarray) -> np.ndarray:
        """Return ranks shifted by others, with broadcasting."""
        return self._combined(ranks, shift, 1)

    def subtracted(self, ranks: np.ndarray, shift: np.ndarray) -> np.ndarray:
        """Return the ranks that shifts take to others, with broadcasting."""
        return self._combined(ranks, shift, -1)

    def _combined(self, ranks: np.ndarray, shift: np.ndarray, sign: int) -> np.ndarray:
        total = np.zeros(np.broadcast(ranks, shift).shape, dtype=np.int64)
        block = 1
        for size in self.radix:
            digit = (ranks // block) % size + sign * ((shift // block) % size)
            total += block * (digit % size)
            block *= size
        return total


def translations_of(topology: Topology) -> Translations | None:
    """Return the shifts of all ranks that leave a topology as it is, None where no such group is found.

    Tried are cyclic shifts of a digit of the rank, for every pair of a block length and a digit's size whose
    product divides the number of ranks. Ranks numbered in another way are not recognised.

    Parameters
    ----------
    topology : Topology
    """
    ranks = topology.num_ranks
    if topology.shared or ranks < 2:
        return None
    images: dict[tuple[int, int], np.ndarray] = {}
    radix = _radix_from(topology, 1, images, set())
    if radix is None:
        return None
    generators, block = [], 1
    for size in radix:
        generators.append(images[block, size])
        block *= size
    return Translations(radix=tuple(radix), link_orbit=_link_orbits(topology, generators))


def _radix_from(
    topology: Topology, block: int, images: dict[tuple[int, int], np.ndarray], failed: set[int]
) -> list[int] | None:
    """Return digit sizes from a block length up, all of which can be shifted, large digits first."""
    ranks = topology.num_ranks
    if block == ranks:
        return []
    if block in failed:
        return None
    for size in range(ranks // block, 1, -1):
        if ranks % (block * size):
            continue
        rank = np.arange(ranks)
        digit = (rank // block) % size
        image = automorphism(topology, rank + block * ((digit + 1) % size - digit))
        if image is None:
            continue
        images[block, size] = image
        rest = _radix_from(topology, block * size, images, failed)
        if rest is not None:
            return [size, *rest]
    failed.add(block)
    return None


def automorphism(topology: Topology, ranks: np.ndarray) -> np.ndarray | None:
    """Return the image of every vertex under an automorphism that permutes the ranks as given, or None.

    Parameters
    ----------
    topology : Topology
        Without shared resources.
    ranks : ndarray of int, shape (ranks,)
        Image of each rank.

    Returns
    -------
    ndarray of int, shape (vertices,), or None
        None also where the switches cannot be told apart well enough to follow them.
    """
    devices = topology.devices
    image = np.full(len(topology.vertices), -1, dtype=np.int64)
    image[devices] = devices[ranks]
    if len(devices) < len(topology.vertices):
        before = {int(v): r for r, v in enumerate(devices.tolist())}
        after = {int(devices[ranks[r]]): r for r in range(len(devices))}
        colours = _refined(topology, before), _refined(topology, after)
        groups: list[dict[int, list[int]]] = [{}, {}]
        for colour, group in zip(colours, groups, strict=True):
            for vertex in range(len(topology.vertices)):
                if image[vertex] < 0 or group is groups[1]:
                    group.setdefault(colour[vertex], []).append(vertex)
        for colour_id, members in groups[0].items():
            others = groups[1].get(colour_id, [])
            if len(others) != len(members):
                return None
            image[members] = others
    return image if _same_links(topology, image) else None


def _refined(topology: Topology, colour_of_device: dict[int, int]) -> list[int]:
    """Return a colour of every vertex: a device's own, a switch's from what it is linked to, repeatedly."""
    ends: list[list[tuple[int, int, float, float]]] = [[] for _ in topology.vertices]
    for link in topology.links:
        ends[link.source].append((link.target, 0, link.bytes_per_s, link.latency_s))
        ends[link.target].append((link.source, 1, link.bytes_per_s, link.latency_s))
    colour = [colour_of_device.get(v, -1) for v in range(len(topology.vertices))]
    switches = [v for v in range(len(colour)) if v not in colour_of_device]
    kinds = 0
    while True:
        for v in switches:
            near = tuple(sorted((*rest, colour[w]) for w, *rest in ends[v]))
            colour[v] = hash((topology.vertices[v].kind, near))
        found = len({colour[v] for v in switches})
        if found <= kinds:
            return colour
        kinds = found


def _same_links(topology: Topology, image: np.ndarray) -> bool:
    kinds = [vertex.kind for vertex in topology.vertices]
    if any(kinds[int(image[v])] != kinds[v] for v in range(len(kinds))):
        return False
    links = topology.links
    target = image.tolist()
    moved = Counter((target[one.source], target[one.target], one.bytes_per_s, one.latency_s) for one in links)
    return moved == Counter((one.source, one.target, one.bytes_per_s, one.latency_s) for one in links)


def _link_orbits(topology: Topology, generators: list[np.ndarray]) -> np.ndarray:
    """Return the number of the orbit of each link; parallel links between the same ends share one."""
    parent: dict[tuple[int, int, float, float], tuple[int, int, float, float]] = {}

    def root(key: tuple[int, int, float, float]) -> tuple[int, int, float, float]:
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    keys = [(one.source, one.target, one.bytes_per_s, one.latency_s) for one in topology.links]
    for key in keys:
        parent[key] = key
    for image in generators:
        for source, target, *rest in list(parent):
            other = (int(image[source]), int(image[target]), rest[0], rest[1])
            parent[root((source, target, rest[0], rest[1]))] = root(other)
    number: dict[tuple[int, int, float, float], int] = {}
    return np.array([number.setdefault(root(key), len(number)) for key in keys], dtype=np.int64)
