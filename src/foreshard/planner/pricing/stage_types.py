"""The distinct stages that a chain of layers can be cut into; options of stages as columns beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from foreshard.catalog.offers import offers_of
from foreshard.graph.shapes import RankShape
from foreshard.planner.pricing.stage_options import StageKind
from foreshard.planner.request import PlanRequest
from foreshard.predict.placement import domain_block
from foreshard.predict.run_setup import stacked

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTypes:
    """The distinct stages of a chain: places, layers of each kind of block, and which ends they hold."""

    table: np.ndarray
    places: np.ndarray
    counts: np.ndarray
    has_embedding: np.ndarray
    has_head: np.ndarray


def stage_types(request: PlanRequest) -> StageTypes:
    """Return every distinct stage; equal blocks make intervals of equal length alike."""
    model = request.model
    kinds = {block: i for i, (block, _) in enumerate(model.block_kinds())}
    places = model.num_layers + 2
    before = np.zeros((places + 1, len(kinds)))
    for layer, block in enumerate(model.blocks, start=1):
        before[layer + 1 :, kinds[block]] += 1.0
    start, stop = np.triu_indices(places + 1, k=1)
    counts = before[stop] - before[start]
    last = (stop == places).astype(float)
    counts[:, kinds[model.blocks[-1]]] += last * model.num_next_token
    key = np.column_stack([counts, start == 0, last])
    distinct, inverse = np.unique(key, axis=0, return_inverse=True)
    table = np.full((places + 1, places + 1), -1)
    table[start, stop] = np.ravel(inverse)
    held = np.zeros((len(distinct), 1))
    held[np.ravel(inverse), 0] = stop - start
    return StageTypes(
        table=table,
        places=held,
        counts=distinct[:, :-2],
        has_embedding=distinct[:, -2:-1],
        has_head=distinct[:, -1:],
    )


def row(items: Sequence[Any], cls: type[T]) -> T:
    """Return `cls` with fields of shape (1, options)."""
    return stacked([[item] for item in items], cls)


def rank_row(request: PlanRequest, kinds: Sequence[StageKind]) -> RankShape:
    """Return how a rank of each option runs layers, its stage as close together as can be."""
    setup, nodes = request.setup, request.cluster.nodes
    cuts = offers_of(request.framework).cuts_sequences
    return row(
        [
            setup.rank(
                tp=float(kind.tp),
                cp=float(kind.cp),
                ep=float(kind.ep),
                etp=1.0,
                dp=float(kind.inner_dp),
                shard=float(kind.inner_dp * kind.cp),
                zero=float(kind.zero),
                sp=float(kind.tp > 1 and cuts),
                micro_batch=float(kind.micro_batch),
                expert_stride=1.0,
                **_own_strides(kind, domain_block(nodes[kind.node_group]) * (1.0 - 1e-9)),
            )
            for kind in kinds
        ],
        RankShape,
    )


def _own_strides(kind: StageKind, block: float) -> dict[str, float]:
    """Return the strides of the ranks of a stage that hold the same weights, and the same experts."""
    own, own_experts = float(kind.tp), 1.0
    if kind.num_devices > kind.ep > 1:  # in a domain as many hold the same experts as begin there
        own_experts = block / min(kind.num_devices // kind.ep, math.ceil(block / kind.ep))
    return {"own_stride": own, "own_expert_stride": own_experts}
