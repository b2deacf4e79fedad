"""Plans of one model on one cluster as columns of integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshard.spec.degrees import plan_from_degrees
from foreshard.spec.model import Model
from foreshard.spec.plan import TABLED, Plan

OFFLOADS = ("none", "optimizer", "activations", "all")

_STATED_ALIKE = ("dp", "tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch", "zero")
"""Columns that `plan_from_degrees` takes as they are."""

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable:
    """Degrees and options of plans, one integer column each, shape (plans,).

    micro_batch : samples per data-parallel rank and micro-batch
    num_micro_batches : of a step; the global batch is micro_batch * num_micro_batches * dp
    shard : ranks that share one copy of sharded states, 0 for all data-parallel ranks
    recompute, schedule, offload : index into `rules`, `spec.plan.TABLED`, `OFFLOADS`
    """

    dp: Column
    tp: Column
    pp: Column
    cp: Column
    ep: Column
    etp: Column
    vpp: Column
    micro_batch: Column
    num_micro_batches: Column
    zero: Column
    shard: Column
    sp: Column
    recompute: Column
    schedule: Column
    offload: Column
    rules: tuple[str, ...] = ("none",)

    @staticmethod
    def from_columns(columns: Mapping[str, Any], rules: tuple[str, ...] = ("none",)) -> PlanTable:
        """Return a table; degrees and sizes left out are 1, options left out are off, `schedule` 1f1b."""
        size = max(np.size(values) for values in columns.values())
        start = dict.fromkeys(COLUMNS, 1) | dict.fromkeys(("shard", "sp", "recompute", "offload"), 0)
        start["schedule"] = TABLED.index("1f1b")
        whole = {
            name: np.broadcast_to(np.asarray(value, dtype=np.int64), (size,))
            for name, value in (start | dict(columns)).items()
        }
        return PlanTable(**whole, rules=tuple(rules))

    def __len__(self) -> int:
        return len(self.dp)

    @property
    def global_batch(self) -> Column:
        """Samples of a step."""
        return self.micro_batch * self.num_micro_batches * self.dp

    def take(self, index: Any) -> PlanTable:
        """Return the plans at `index` (slice, mask or integers)."""
        return PlanTable(**{name: getattr(self, name)[index] for name in COLUMNS}, rules=self.rules)

    def plan(self, index: int, model: Model, *, seq_len: int, **options: Any) -> Plan:
        """Return one plan as an object; `options` are precision, optimizer and framework."""
        row: dict[str, Any] = {name: int(getattr(self, name)[index]) for name in COLUMNS}
        return plan_from_degrees(
            model.num_layers,
            row["dp"] * row["tp"] * row["pp"] * row["cp"],
            **{name: row[name] for name in _STATED_ALIKE},
            global_batch=int(self.global_batch[index]),
            seq_len=seq_len,
            sp=bool(row["sp"]),
            shard_size=row["shard"] or None,
            recompute=self.rules[row["recompute"]],
            schedule=TABLED[row["schedule"]],
            offload=OFFLOADS[row["offload"]],
            **options,
        )


COLUMNS = tuple(f.name for f in fields(PlanTable) if f.name != "rules")
