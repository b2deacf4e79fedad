"""Runs of equal stages of many pipelines of one model, each pair of pp and vpp worked out once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from foreshard.predict.plan_table import PlanTable
from foreshard.predict.stage_rows import StageRows, stage_rows_of
from foreshard.spec.model import Block, Model

_MOST_CHUNKS = 1 << 20
"""More virtual stages than any model has layers, to number pairs of pp and vpp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """Stages by the pipeline they belong to.

    A model of equal blocks has at most four runs of equal stages, found by arithmetic. Where blocks differ,
    every stage counts them; equal ones that follow each other are one row here.
    """

    model: Model
    _known: dict[int, np.ndarray] = field(default_factory=dict, compare=False)

    @property
    def _blocks(self) -> tuple[Block, ...]:
        return tuple(block for block, _ in self.model.block_kinds())

    def rows(self, table: PlanTable) -> StageRows:
        """Return the distinct stages of every plan, as `predict.stage_rows.stage_rows_of` does."""
        blocks = self._blocks
        if len(blocks) == 1:
            return stage_rows_of(self.model, table.pp, table.vpp)
        keys, inverse = np.unique(table.pp * _MOST_CHUNKS + table.vpp, return_inverse=True)
        found = [self._pipeline(int(key)) for key in keys]
        whole = np.zeros((found[0].shape[0], max(item.shape[1] for item in found), len(found)))
        for i, one in enumerate(found):
            whole[:, : one.shape[1], i] = one
        columns = whole[:, :, np.ravel(inverse)]
        return StageRows(
            blocks=blocks,
            counts=tuple(columns[:-4]),
            first_stage=columns[-4],
            multiplicity=columns[-3],
            has_embedding=columns[-2],
            has_head=columns[-1],
        )

    def _pipeline(self, key: int) -> np.ndarray:
        """Return the distinct stages of one pipeline, shape (numbers of a stage, stages)."""
        if key not in self._known:
            pp, vpp = (np.array([value]) for value in divmod(key, _MOST_CHUNKS))
            rows = stage_rows_of(self.model, pp, vpp)
            kinds = np.concatenate([*rows.counts, rows.has_embedding, rows.has_head], axis=1)
            first = np.flatnonzero(np.append(True, np.any(np.diff(kinds, axis=0) != 0, axis=1)))
            count = np.diff(np.append(first, len(kinds)))
            kept = kinds[first].T
            self._known[key] = np.concatenate([kept[:-2], [first, count], kept[-2:]])
        return self._known[key]
