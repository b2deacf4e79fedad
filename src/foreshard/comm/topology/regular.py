"""Regular networks of any number of dimensions: ring, line, full mesh, switch, torus, mesh, hypercube.

Each dimension joins the devices that differ in that coordinate alone. Ranks count the last dimension fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal, get_args

from foreshard.comm.topology.draft import Draft
from foreshard.comm.topology.graph import Topology
from foreshard.errors import SpecError, unknown

Shape = Literal["ring", "line", "full", "switch"]
# Some 500 MB of links; larger networks are no longer convenient to look at link by link.
_MAX_DEVICES, _MAX_LINKS = 2**17, 2**21


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """How devices along one coordinate are joined."""

    shape: Shape  # neighbours and around, neighbours, every pair, or over one switch
    size: int
    # bytes_per_s, latency_s: of each link, one direction
    bytes_per_s: float
    latency_s: float = 0.0


def ring(num_devices: int, bytes_per_s: float, latency_s: float = 0.0) -> Topology:
    """Return a ring, both directions.

    Examples
    --------
    >>> len(ring(8, 50e9).links)
    16
    """
    return torus((num_devices,), bytes_per_s, latency_s, name=f"ring of {num_devices}")


def torus(sizes: Sequence[int], bytes_per_s: float, latency_s: float = 0.0, *, name: str = "") -> Topology:
    """Return a torus: a ring in every dimension."""
    return _uniform("ring", sizes, bytes_per_s, latency_s, name or f"torus {_times(sizes)}")


def mesh(sizes: Sequence[int], bytes_per_s: float, latency_s: float = 0.0) -> Topology:
    """Return a mesh: a line in every dimension."""
    return _uniform("line", sizes, bytes_per_s, latency_s, f"mesh {_times(sizes)}")


def hypercube(num_dimensions: int, bytes_per_s: float, latency_s: float = 0.0) -> Topology:
    """Return a hypercube of 2 ** num_dimensions devices."""
    return _uniform("line", (2,) * num_dimensions, bytes_per_s, latency_s, f"hypercube {num_dimensions}")


def full_mesh(num_devices: int, bytes_per_s: float, latency_s: float = 0.0) -> Topology:
    """Return a full mesh: a link from every device to every other."""
    return _uniform("full", (num_devices,), bytes_per_s, latency_s, f"full mesh of {num_devices}")


def star(num_devices: int, bytes_per_s: float, latency_s: float = 0.0) -> Topology:
    """Return devices around one switch; the latency is that of each of the two hops."""
    return _uniform("switch", (num_devices,), bytes_per_s, latency_s, f"{num_devices} on a switch")


def grid(dimensions: Sequence[Dimension], *, name: str = "") -> Topology:
    """Return the product of dimensions, each of its own shape, bandwidth and latency.

    Raises
    ------
    SpecError
        For no dimension, a size below 1, an unknown shape, or too many devices.
    """
    _checked(dimensions)
    draft = Draft()
    sizes = [dimension.size for dimension in dimensions]
    at = {place: draft.vertex("device", _name(place)) for place in product(*map(range, sizes))}
    for axis, dimension in enumerate(dimensions):
        for start in product(*(range(1 if i == axis else size) for i, size in enumerate(sizes))):
            line = [at[(*start[:axis], i, *start[axis + 1 :])] for i in range(dimension.size)]
            _join_line(draft, line, dimension, f"switch{axis}.{_name(start)[3:]}")
    return draft.topology(name or " x ".join(f"{each.shape} {each.size}" for each in dimensions))


def _uniform(shape: Shape, sizes: Sequence[int], bytes_per_s: float, latency_s: float, name: str) -> Topology:
    dimensions = [
        Dimension(shape=shape, size=size, bytes_per_s=bytes_per_s, latency_s=latency_s) for size in sizes
    ]
    return grid(dimensions, name=name)


def _times(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _name(place: Sequence[int]) -> str:
    return "gpu" + ".".join(map(str, place))


def _join_line(draft: Draft, line: Sequence[int], dimension: Dimension, switch: str) -> None:
    """Join the devices that one dimension connects."""
    rate, latency = dimension.bytes_per_s, dimension.latency_s
    if dimension.shape == "switch" and len(line) > 1:
        center = draft.switch(switch)
        for device in line:
            draft.join(device, center, rate, latency)
        return
    for one, other in neighbours(dimension.shape, len(line)):
        draft.join(line[one], line[other], rate, latency)


def neighbours(shape: Shape, size: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs that a ring, line or full mesh joins, each once: a ring of two has one."""
    if shape == "full":
        yield from ((i, j) for i in range(size) for j in range(i + 1, size))
        return
    yield from ((i, i + 1) for i in range(size - 1))
    if shape == "ring" and size > 2:
        yield (size - 1, 0)


def _checked(dimensions: Sequence[Dimension]) -> None:
    if not dimensions:
        raise SpecError("no dimension", key="dimensions", rule="A network has at least one dimension")
    for dimension in dimensions:
        if dimension.shape not in get_args(Shape):
            raise unknown("shape", dimension.shape, get_args(Shape), key="shape")
        if dimension.size < 1:
            raise SpecError(
                f"size {dimension.size}",
                key="size",
                value=dimension.size,
                rule="A dimension has at least 1 device",
            )
    total = prod(dimension.size for dimension in dimensions)
    if total > _MAX_DEVICES:
        rule = f"A network has at most {_MAX_DEVICES:,} devices"
        raise SpecError(f"{total:,} devices", key="dimensions", value=total, rule=rule)
    links = total * sum(axis.size - 1 if axis.shape == "full" else 2 for axis in dimensions)
    if links > _MAX_LINKS:
        rule = f"A network has at most {_MAX_LINKS:,} links"
        raise SpecError(f"{links:,} links", key="dimensions", value=links, rule=rule)
