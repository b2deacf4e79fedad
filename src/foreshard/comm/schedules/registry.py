"""Algorithms by name: for which collectives, with which options, on which numbers of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from foreshard.comm.schedules import bruck, chains, exchange, halving, in_network, ring, trees
from foreshard.comm.schedules.hierarchical import two_level
from foreshard.comm.schedules.schedule import COLLECTIVES, Schedule
from foreshard.errors import SpecError, unknown
from foreshard.words import spelled

_REDUCING = ("all-reduce", "all-gather", "reduce-scatter")
Weights = Sequence[float] | Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """How schedules of one name are made."""

    make: Callable[..., Schedule]  # ``make(collective, num_ranks, **options)``
    collectives: tuple[str, ...]
    # of 'per_node', 'weights' and 'root', those it takes; all take parts and channels
    options: frozenset[str] = field(default_factory=frozenset)
    # whether `per_node` must divide the ranks into at least two nodes of at least two
    needs_nodes: bool = False


def _of(
    make: Callable[..., Schedule], *collectives: str, options: str = "", nodes: bool = False
) -> Algorithm:
    """Return an algorithm of collectives, with its options separated by blanks."""
    takes = frozenset(options.split()) | ({"per_node"} if nodes else set())
    return Algorithm(make=make, collectives=collectives, options=takes, needs_nodes=nodes)


def _ring(collective: str, num_ranks: int, *, root: int = 0, **options: Any) -> Schedule:
    """Return a ring, or a broadcast along one."""
    if collective == "broadcast":
        options.pop("weights", None)
        return ring.chain_broadcast(num_ranks, root=root, **options)
    return ring.ring(collective, num_ranks, **options)


def _bruck(collective: str, num_ranks: int, *, weights: Any = None, **options: Any) -> Schedule:
    if collective == "all-to-all":
        return bruck.bruck_all_to_all(num_ranks, **options)
    return bruck.bruck_all_gather(num_ranks, weights=weights, **options)


def _direct(collective: str, num_ranks: int, **options: Any) -> Schedule:
    if collective == "send":
        options.pop("weights", None)
        return chains.piped_send("direct", num_ranks, **options)
    return exchange.direct(collective, num_ranks, **options)


def _hierarchical(
    collective: str,
    num_ranks: int,
    *,
    per_node: int,
    channels: int,
    parts: int | None = None,
    root: int = 0,
    **options: Any,
) -> Schedule:
    """Return rings inside nodes and across them."""
    outer = _ring(collective, num_ranks // per_node, root=root // per_node)
    names = ("reduce-scatter", "all-gather") if collective == "all-reduce" else (collective,)
    inner = [_ring(name, per_node, root=root % per_node) for name in names]
    return two_level(collective, inner, outer, channels=channels, parts=parts or channels, **options)


def _without_collective(make: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """Return a maker that takes a collective, of one that has only one."""
    return lambda collective, num_ranks, **options: make(num_ranks, **options)


ALGORITHMS: dict[str, Algorithm] = {
    "ring": _of(_ring, *_REDUCING, "broadcast", options="weights root"),
    "bidirectional-ring": _of(
        partial(_ring, bidirectional=True), *_REDUCING, "broadcast", options="weights root"
    ),
    "double-tree": _of(trees.double_tree, "all-reduce", "broadcast", options="root"),
    "binomial": _of(_without_collective(trees.binomial_broadcast), "broadcast", options="root"),
    "halving-doubling": _of(halving.halving_doubling, "all-reduce", options="weights"),
    "recursive-halving": _of(halving.halving_doubling, "reduce-scatter", options="weights"),
    "recursive-doubling": _of(halving.halving_doubling, "all-gather", options="weights"),
    "bruck": _of(_bruck, "all-gather", "all-to-all", options="weights"),
    "pat": _of(bruck.pat, "all-gather", "reduce-scatter", options="weights"),
    "direct": _of(_direct, *_REDUCING, "all-to-all", "send", options="weights"),
    "hierarchical": _of(_hierarchical, *_REDUCING, "broadcast", options="weights root", nodes=True),
    "nvls": _of(
        partial(in_network.through_switches, "nvls"), *_REDUCING, "broadcast", options="weights root"
    ),
    "nvls-tree": _of(_without_collective(in_network.nvls_tree), "all-reduce", nodes=True),
    "sharp": _of(
        partial(in_network.through_switches, "sharp"),
        *_REDUCING,
        "broadcast",
        options="weights root per_node",
    ),
    **{
        name: _of(
            _without_collective(partial(exchange.through_nodes, name)),
            "all-to-all",
            options="weights",
            nodes=True,
        )
        for name in exchange.WAYS
    },
    "chain": _of(_without_collective(partial(chains.piped_send, "chain")), "send"),
}
"""Algorithms that need no more than their name; ``synthesis/packing.py`` packs trees into a topology."""


def usual_algorithm(collective: str) -> str:
    """Return the algorithm where none is named: a ring, or direct sends where the collective has no ring.

    Examples
    --------
    >>> usual_algorithm("all-gather"), usual_algorithm("all-to-all")
    ('ring', 'direct')
    """
    return "ring" if "ring" in algorithms_of(collective) else "direct"


def algorithms_of(collective: str) -> tuple[str, ...]:
    """Return the names of the algorithms of a collective.

    Examples
    --------
    >>> algorithms_of("send")
    ('direct', 'chain')
    """
    if collective not in COLLECTIVES:
        raise unknown("collective", collective, COLLECTIVES, key="collective")
    return tuple(name for name, one in ALGORITHMS.items() if collective in one.collectives)


def schedule_of(
    collective: str,
    algorithm: str,
    num_ranks: int,
    *,
    per_node: int | None = None,
    parts: int | None = None,
    channels: int = 1,
    weights: Weights | None = None,
    root: int = 0,
) -> Schedule:
    """Return the schedule of a collective by the name of its algorithm.

    Parameters
    ----------
    per_node : int, optional
        Ranks of each node, for algorithms that know nodes; others ignore it.
    parts : int, optional
        Pieces that follow each other: of each rank's share, or of the whole (trees, chains). One for each
        channel unless given.
    channels : int
    weights : sequence of float, or a matrix for an all-to-all, optional
        Parts of the size that each rank owns, or that each source sends to each target.
    root : int
        Source of a broadcast.

    Raises
    ------
    SpecError
        For what no algorithm of this name does; it lists those that work.

    Examples
    --------
    >>> schedule_of("all-reduce", "ring", 3).num_sends
    12
    """
    names = algorithms_of(collective)
    algorithm = spelled(algorithm, tuple(ALGORITHMS))
    if algorithm not in ALGORITHMS:
        raise unknown("algorithm", algorithm, names, key="algorithm", rule=f"Of {collective} there are")
    made = ALGORITHMS[algorithm]
    if collective not in made.collectives:
        raise SpecError(
            f"{algorithm} is no algorithm of {collective}",
            key="algorithm",
            value=algorithm,
            rule=f"Of {collective} there are {', '.join(names)}",
            fix="Use one of them",
        )
    _check_numbers(num_ranks, parts, channels, root)
    options: dict[str, Any] = {"parts": parts, "channels": channels}
    if made.needs_nodes or "per_node" in made.options:
        _check_nodes(collective, algorithm, num_ranks, per_node)
        options["per_node"] = per_node
    if weights is not None:
        _check_weights(collective, algorithm, num_ranks, weights)
        options["weights"] = weights
    if collective == "broadcast":
        options["root"] = root
    return made.make(collective, num_ranks, **options)


def _check_numbers(num_ranks: int, parts: int | None, channels: int, root: int) -> None:
    """Refuse numbers that no algorithm works with."""
    rules = (
        ("num_ranks", num_ranks, num_ranks >= 2, "A collective has at least 2 ranks"),
        ("parts", parts, parts is None or parts >= 1, "There is at least 1 part"),
        ("channels", channels, channels >= 1, "There is at least 1 channel"),
        ("root", root, 0 <= root < num_ranks, f"The root is one of the {num_ranks} ranks"),
    )
    for key, value, kept, rule in rules:
        if not kept:
            raise SpecError(f"{key} is {value}", key=key, value=value, rule=rule)


def _check_nodes(collective: str, algorithm: str, num_ranks: int, per_node: int | None) -> None:
    """Refuse ranks that are not several equal nodes of several ranks, where an algorithm needs that."""
    needs = ALGORITHMS[algorithm].needs_nodes
    if per_node is None and not needs:
        return
    whole = per_node is not None and per_node >= 1 and num_ranks % per_node == 0
    if not whole or (needs and per_node in (1, num_ranks)):
        others = [name for name in algorithms_of(collective) if not ALGORITHMS[name].needs_nodes]
        raise SpecError(
            f"{algorithm} of {num_ranks} ranks in nodes of {per_node}",
            key="per_node",
            value=per_node,
            rule="It takes at least two equal nodes of at least two ranks" if needs else "Nodes are equal",
            fix=f"Give per_node, or use {', '.join(others)}",
        )


def _check_weights(collective: str, algorithm: str, num_ranks: int, weights: Weights) -> None:
    """Refuse weights that an algorithm does not take, or that are not one number for each rank."""
    takes = [
        name
        for name in algorithms_of(collective)
        if "weights" in ALGORITHMS[name].options and (collective, name) not in _EVEN_ONLY
    ]
    if algorithm not in takes or collective in ("broadcast", "send"):
        raise SpecError(
            f"{algorithm} of {collective} has equal chunks",
            key="weights",
            value=str(weights)[:80],
            rule=f"Weights are for {', '.join(takes)}" if takes else "It has no weights",
        )
    if collective == "all-to-all":
        return
    legal = len(weights) == num_ranks and all(
        isinstance(one, int | float) and math.isfinite(one) and one >= 0 for one in weights
    )
    if not legal or not math.isclose(sum(weights), 1.0, rel_tol=1e-9):  # type: ignore[arg-type]
        raise SpecError(
            f"weights {str(weights)[:80]}",
            key="weights",
            value=str(weights)[:80],
            rule=f"One part of at least 0 for each of the {num_ranks} ranks; together 1",
        )


_EVEN_ONLY = {("all-reduce", "hierarchical"), ("all-to-all", "bruck")}
