"""The distinct stages that a chain of layers can be cut into; options of stages as columns beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from foreshard.planner.request import PlanRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTypes:
    """The distinct stages of a chain: layers of each kind of block, and which ends they hold."""

    table: np.ndarray
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
    return StageTypes(
        table=table,
        counts=distinct[:, :-2],
        has_embedding=distinct[:, -2:-1],
        has_head=distinct[:, -1:],
    )


def row(items: Sequence[Any], cls: type[T]) -> T:
    """Return `cls` with fields of shape (1, options)."""
    return cls(
        **{f.name: np.array([[float(getattr(item, f.name)) for item in items]]) for f in fields(cls)}  # type: ignore[arg-type]
    )
