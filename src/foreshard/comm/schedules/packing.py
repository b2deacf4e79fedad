"""Tree packing: a collective on given spanning trees, each with a part of the data.

Source: Edmonds 1973 (packing of arborescences); as all-gather, ForestColl (arXiv 2402.06787).
"""

from __future__ import annotations

from collections.abc import Sequence

from foreshard.comm.schedules.schedule import Chunk, Schedule
from foreshard.comm.schedules.sequential import SequentialBuilder
from foreshard.comm.schedules.trees import TreePipeline
from foreshard.errors import SpecError


def packed_trees(
    collective: str,
    num_ranks: int,
    trees: Sequence[tuple[Sequence[int], float]],
    *,
    parts: int = 1,
    weights: Sequence[float] | None = None,
) -> Schedule:
    """Return an all-gather, reduce-scatter, all-reduce or broadcast on weighted trees.

    Parameters
    ----------
    trees : sequence of (sequence of int, float)
        The parent of each rank, -1 for the root, and the weight; only ratios of weights matter. An all-gather
        or reduce-scatter needs trees of every root, a broadcast of one; an all-reduce takes any.
    parts : int
        Pieces of each tree, one after another on an edge.
    weights : sequence of float, optional
        Share of the size of each root (all-gather, reduce-scatter), equal unless given.

    Raises
    ------
    SpecError
        For parents that make no spanning tree, weights not above 0, or roots that the collective cannot use.

    Examples
    --------
    >>> packed_trees("all-gather", 2, [([-1, 0], 1.0), ([1, -1], 1.0)]).num_sends
    2
    """
    roots = [_root(parents, num_ranks) for parents, _ in trees]
    _check_roots(collective, num_ranks, roots, [weight for _, weight in trees])
    owned = collective in ("all-gather", "reduce-scatter")
    every = tuple(range(num_ranks))
    chunks = []
    for (_, weight), root in zip(trees, roots, strict=True):
        alike = [w for (_, w), other in zip(trees, roots, strict=True) if other == root or not owned]
        share = 1.0 if not owned else 1.0 / num_ranks if weights is None else weights[root]
        sources = (root,) if collective in ("all-gather", "broadcast") else every
        targets = (root,) if collective == "reduce-scatter" else every
        piece = Chunk(weight=share * weight / sum(alike) / parts, sources=sources, targets=targets)
        chunks += [piece] * parts
    build = SequentialBuilder(collective, "packing", num_ranks, chunks)
    pipeline = TreePipeline(build)
    for part in range(parts):
        for tree, (parents, _) in enumerate(trees):
            if collective in ("all-reduce", "reduce-scatter"):
                pipeline.up(parents, tree * parts + part, channel=tree)
            if collective != "reduce-scatter":
                pipeline.down(parents, tree * parts + part, channel=tree)
    return build.schedule()


def _root(parents: Sequence[int], num_ranks: int) -> int:
    """Return the root of a spanning tree."""
    roots = [rank for rank, parent in enumerate(parents) if parent == -1]
    legal = len(parents) == num_ranks and len(roots) == 1 and all(-1 <= one < num_ranks for one in parents)
    if legal:
        for rank in range(num_ranks):
            steps = 0
            while rank != roots[0] and steps < num_ranks:
                rank, steps = parents[rank], steps + 1
            legal &= rank == roots[0]
    if not legal:
        raise SpecError(
            f"parents {list(parents)[:16]} make no tree of {num_ranks} ranks",
            key="trees",
            value=str(list(parents)[:16]),
            rule="A tree has a parent for each rank and -1 for the one root",
        )
    return roots[0]


def _check_roots(collective: str, num_ranks: int, roots: Sequence[int], weights: Sequence[float]) -> None:
    """Refuse trees that a collective cannot be made of."""
    missing = sorted(set(range(num_ranks)) - set(roots))
    rules = {
        "all-gather": ("has a tree for the root of every rank", not missing),
        "reduce-scatter": ("has a tree for the root of every rank", not missing),
        "broadcast": ("has trees of one root", len(set(roots)) == 1),
        "all-reduce": ("has trees", bool(roots)),
    }
    if collective not in rules:
        raise SpecError(
            f"no {collective} on trees", key="collective", value=collective, rule=f"Known {', '.join(rules)}"
        )
    rule, kept = rules[collective]
    if not kept or not all(0.0 < weight < float("inf") for weight in weights):
        raise SpecError(
            f"trees of roots {sorted(set(roots))[:16]}",
            key="trees",
            value=str(list(weights)[:16]),
            rule=f"The {collective} {rule}, and weights above 0",
        )
