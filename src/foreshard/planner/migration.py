"""What changing from one plan to another moves: bytes of weights and optimizer states each device lacks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from foreshard.catalog.frameworks import load_framework
from foreshard.cost.memory import optimizer_state_bytes
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    """What a rank holds: layers, the part of each weight, and the part whose optimizer states it keeps."""

    start: int
    stop: int
    weight: tuple[float, float]
    state: tuple[float, float]


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
    params = _params_before(model)
    lacks: dict[int, float] = {}
    for rank, need in want.items():
        lacks[rank] = _lacking(need, have.get(rank), params, wide, state)
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
        checkpoint=not _complete(have, len(params) - 1),
    )


def _params_before(model: Model) -> np.ndarray:
    """Return the parameters of all layers before each, shape (layers + 1,)."""
    ends = float(model.vocab * model.hidden)
    blocks = [float(block.num_params) for block in model.blocks]
    return np.concatenate([[0.0], np.cumsum([ends, *blocks, ends * (not model.tied_embeddings)])])


def _holdings(plan: Plan) -> dict[int, _Holding]:
    found = {}
    for group in plan.groups:
        for stage in group.stages:
            (start, stop), *_ = stage.layers
            replicas = stage.inner_dp * stage.cp
            for i, rank in enumerate(stage.ranks):
                low, high = (i % stage.tp) / stage.tp, (i % stage.tp + 1) / stage.tp
                weight = part = (low, high)
                if stage.zero >= 1 and replicas > 1:
                    one, place = (high - low) / replicas, i // stage.tp
                    part = (low + one * place, low + one * (place + 1))
                    weight = part if stage.zero >= 3 else weight
                found[rank] = _Holding(start=start, stop=stop, weight=weight, state=part)
    return found


def _lacking(
    need: _Holding, have: _Holding | None, params: np.ndarray, weight_bytes: float, state_bytes: float
) -> float:
    whole = float(params[need.stop] - params[need.start])
    parts = ((need.weight, weight_bytes, "weight"), (need.state, state_bytes, "state"))
    lacks = whole * sum(one * (high - low) for (low, high), one, _ in parts)
    if have is None:
        return float(lacks)
    shared = max(0.0, float(params[min(need.stop, have.stop)] - params[max(need.start, have.start)]))
    for (low, high), one, name in parts:
        own_low, own_high = getattr(have, name)
        lacks -= shared * one * max(0.0, min(high, own_high) - max(low, own_low))
    return float(lacks)


def _complete(have: dict[int, _Holding], num_layers: int) -> bool:
    """Return whether the devices that are left hold all optimizer states of every layer among them."""
    spans = {(held.start, held.stop, held.state) for held in have.values()}
    for layer in range(num_layers):
        reached = 0.0
        for low, high in sorted(state for start, stop, state in spans if start <= layer < stop):
            if low > reached + 1e-9:
                break
            reached = max(reached, high)
        if reached < 1.0 - 1e-9:
            return False
    return True
