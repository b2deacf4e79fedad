"""What changing from one plan to another moves: bytes of weights and optimizer states each device lacks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.catalog.frameworks import load_framework
from foreshard.cost.memory import optimizer_state_bytes
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A change of plan.

    Attributes
    ----------
    bytes_moved : float
    seconds : float
        No less than the fullest network interface needs, and all that hold what is sent together.
    checkpoint : bool
        Some state is on no device that is left.
    """

    bytes_moved: float
    seconds: float
    checkpoint: bool


Span = tuple[float, float]
"""Part of a layer's parameters, from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    """What a rank holds of its layers: part of each weight, and the part whose optimizer states it keeps."""

    start: int
    stop: int
    weight: Span
    state: Span


_Held = tuple[_Holding, _Holding]
"""What a rank holds of the parameters that tensor ranks split, and of the experts."""


def migration(
    model: Model, cluster: Cluster, old: Plan, new: Plan, *, lost: Collection[int] = ()
) -> Migration:
    """Return what a change of plan moves.

    Parameters
    ----------
    model, cluster
    old, new : Plan
    lost : collection of int
        Ranks whose memory is gone.
    """
    have = {rank: held for rank, held in _holdings(old).items() if rank not in lost}
    want = _holdings(new)
    framework = load_framework(old.framework)
    wide = 4.0 if old.precision in ("fp32", "tf32") else 2.0
    state = framework.master_bytes + optimizer_state_bytes(old.optimizer, framework.moment_bytes)
    counts = _params_before(model)
    lacks: dict[int, float] = {}
    for rank, held in want.items():
        own = have.get(rank, (None, None))
        lacks[rank] = sum(_lacking(*one, wide, state) for one in zip(held, own, counts, strict=False))
    total = float(sum(lacks.values()))
    into: dict[int, float] = {}
    for rank, amount in lacks.items():
        node = cluster.node_of(rank)
        into[node] = into.get(node, 0.0) + amount
    rates = {cluster.node_of(rank): cluster.node_group_of(rank).nic_bytes_per_s for rank in (*want, *have)}
    sources = sum(rates[node] for node in {cluster.node_of(rank) for rank in have})
    slowest = max((amount / rates[node] for node, amount in into.items() if rates[node]), default=0.0)
    return Migration(
        bytes_moved=total,
        seconds=max(slowest, total / sources if sources else 0.0),
        checkpoint=not all(
            _complete([held[i] for held in have.values()], params) for i, params in enumerate(counts)
        ),
    )


def _params_before(model: Model) -> list[np.ndarray]:
    """Return the parameters of all layers before each, shape (layers + 1,), and those of experts if any."""
    ends = float(model.vocab * model.hidden)
    experts = [float(block.num_experts * block.expert_params) for block in model.blocks]
    dense = [float(block.num_params) - more for block, more in zip(model.blocks, experts, strict=True)]
    last = ends * (not model.tied_embeddings)
    rows = [[0.0, ends, *dense, last], [0.0, 0.0, *experts, 0.0]]
    return [np.cumsum(row) for row in (rows if any(experts) else rows[:1])]


def _holdings(plan: Plan) -> dict[int, _Held]:
    found = {}
    for group in plan.groups:
        for stage in group.stages:
            for i, rank in enumerate(stage.ranks):
                dense = _holding(stage, i, stage.tp, i % stage.tp)
                split = stage.ep * stage.etp
                found[rank] = dense, _holding(stage, i, split, i % split)
    return found


def _holding(stage: Stage, i: int, split: int, part: int) -> _Holding:
    """Return what the i-th rank of a stage holds of what consecutive `split` ranks hold once."""
    low, high = part / split, (part + 1) / split
    replicas = len(stage.ranks) // split
    weight = state = (low, high)
    if stage.zero >= 1 and replicas > 1:
        one, place = (high - low) / replicas, i // split
        state = (low + one * place, low + one * (place + 1))
        weight = state if stage.zero >= 3 else weight
    (start, stop), *_ = stage.layers
    return _Holding(start=start, stop=stop, weight=weight, state=state)


def _lacking(
    need: _Holding, have: _Holding | None, params: np.ndarray, weight_bytes: float, state_bytes: float
) -> float:
    whole = float(params[need.stop] - params[need.start])
    shared = 0.0
    if have is not None:
        shared = max(0.0, float(params[min(need.stop, have.stop)] - params[max(need.start, have.start)]))
    lacks = 0.0
    for name, one in (("weight", weight_bytes), ("state", state_bytes)):
        low, high = getattr(need, name)
        own_low, own_high = getattr(have, name) if have else (low, low)
        lacks += one * (whole * (high - low) - shared * max(0.0, min(high, own_high) - max(low, own_low)))
    return lacks


def _complete(have: Sequence[_Holding], params: np.ndarray) -> bool:
    """Return whether the devices that are left hold all optimizer states of every layer among them."""
    spans = {(held.start, held.stop, held.state) for held in have}
    for layer in np.flatnonzero(np.diff(params)).tolist():
        reached = 0.0
        for low, high in sorted(state for start, stop, state in spans if start <= layer < stop):
            if low > reached + 1e-9:
                break
            reached = max(reached, high)
        if reached < 1.0 - 1e-9:
            return False
    return True
