"""The seams between a plan's collectives and the network: three protocols, swappable by name.

Strategy (Plan) -> **task scheduler** -> collective library -> **flow scheduler** -> network. Each layer has
one default; others register under a name and are asked for by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshard.comm import collectives
from foreshard.comm.fabric import Fabric
from foreshard.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class CommTask:
    """One collective that a plan asks for: what, how much, over whom, and when its data is ready."""

    kind: str
    num_bytes: float
    num_ranks: int
    stride: int = 1
    ready_s: float = 0.0


class TaskScheduler(Protocol):
    """Orders, splits or merges the collectives of one rank before the library sees them."""

    def order(self, tasks: Sequence[CommTask]) -> list[CommTask]:
        """Return the tasks as they will be issued."""
        ...


class CollectiveLibrary(Protocol):
    """Prices one kind of collective."""

    def time_s(
        self, kind: str, num_bytes: ArrayLike, num_ranks: ArrayLike, stride: ArrayLike, fabric: Fabric
    ) -> NDArray[np.float64]:
        """Return seconds; arguments broadcast."""
        ...


class FlowScheduler(Protocol):
    """Says which share of a link each of several concurrent flows gets."""

    def shares(self, num_flows: int) -> NDArray[np.float64]:
        """Return one fraction per flow; they sum to at most 1."""
        ...


class InOrder:
    """Issue collectives as their data becomes ready, none split or merged."""

    def order(self, tasks: Sequence[CommTask]) -> list[CommTask]:
        """Return the tasks by readiness; ties keep their order."""
        return sorted(tasks, key=lambda task: task.ready_s)


class ClosedForm:
    """The fitted closed forms of ``foreshard.comm.collectives``."""

    def time_s(
        self, kind: str, num_bytes: ArrayLike, num_ranks: ArrayLike, stride: ArrayLike, fabric: Fabric
    ) -> NDArray[np.float64]:
        """Return seconds; a send between ranks in different domains is a send that crosses nodes."""
        if kind == "send":
            return collectives.send_s(num_bytes, np.asarray(stride) >= fabric.domain, fabric)
        functions = {
            "all_reduce": collectives.all_reduce_s,
            "all_gather": collectives.all_gather_s,
            "reduce_scatter": collectives.reduce_scatter_s,
            "all_to_all": collectives.all_to_all_s,
            "broadcast": collectives.broadcast_s,
        }
        if kind not in functions:
            known = ", ".join([*functions, "send"])
            raise SpecError("no such collective", key="kind", value=kind, fix=f"Known: {known}")
        return functions[kind](num_bytes, num_ranks, stride, fabric)


class EqualShares:
    """Every concurrent flow gets the same share of a link."""

    def shares(self, num_flows: int) -> NDArray[np.float64]:
        """Return ``num_flows`` equal fractions."""
        return np.full(num_flows, 1.0 / max(num_flows, 1))


_LAYERS: dict[str, dict[str, Any]] = {
    "task-scheduler": {"in-order": InOrder()},
    "collective-library": {"closed-form": ClosedForm()},
    "flow-scheduler": {"equal-shares": EqualShares()},
}


def register(layer: str, name: str, implementation: Any) -> None:
    """Add an implementation of a layer under a name."""
    _named(_LAYERS, "layer", layer)[name] = implementation


def layer_of(layer: str, name: str | None = None) -> Any:
    """Return the implementation of a layer by name; the first registered without one."""
    known = _named(_LAYERS, "layer", layer)
    return _named(known, layer, name) if name is not None else next(iter(known.values()))


def _named(known: dict[str, Any], key: str, name: str) -> Any:
    if name not in known:
        raise SpecError(f"no such {key}", key=key, value=name, fix=f"Known: {', '.join(sorted(known))}")
    return known[name]
