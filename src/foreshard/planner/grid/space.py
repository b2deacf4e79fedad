"""The space of plans that degree flags span on equal nodes, as cells, passes and rows.

A *cell* is a choice of degrees and micro-batch; a *shape* adds virtual stages and sequence
parallelism, a *pass* recomputation; a *row* adds sharding, schedule and offload, and is a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from foreshard.catalog.kernels import Tables
from foreshard.catalog.offers import Offers, offers_of
from foreshard.catalog.training import TrainingConstants
from foreshard.planner.choices import Choices
from foreshard.predict.analytical.table import TableMemory, TableStages
from foreshard.predict.batch import Batch
from foreshard.predict.plan_table import COLUMNS, OFFLOADS, PlanTable
from foreshard.predict.run_setup import RunSetup
from foreshard.predict.space import RULES, divisors, valid_plans
from foreshard.predict.stage_rows import StageRows, stage_rows_of
from foreshard.spec.cluster import Cluster
from foreshard.spec.framework import Framework
from foreshard.spec.model import Model
from foreshard.spec.plan import TABLED

_COUNTED = 1 << 14
"""Codes that are counted in less time than a few hundred numbers are sorted."""
MOST_ETP = 64
"""Tensor-parallel ranks of an expert at most."""
CHUNK = 4096
"""Rows priced at once: large enough that numpy's overhead is small, small enough for the cache."""

SPACE = (
    "all divisors for tp, pp, cp, dp, ep, etp and micro-batch, all virtual stages, zero levels, shard "
    "groups, recompute rules, schedules and offloads that the framework ships, layers cut as evenly as "
    "they go"
)
_INTERLEAVED, _1F1B = (TABLED.index(name) for name in ("interleaved", "1f1b"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRequest:
    """What to train on which equal nodes, and what the framework lets one choose.

    comm : mapping of str to bool
        What is hidden otherwise than the framework does by default; `framework` has it too.
    choices : Choices
        Which values degrees and options may have.
    objective : {'time', 'cost', 'energy'}
    max_step_s : float, seconds
        Slower plans are not kept.
    costs : {'auto', 'formula', 'learned'}
    """

    model: Model
    cluster: Cluster
    framework: Framework
    constants: TrainingConstants
    global_batch: int
    seq_len: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    comm: Mapping[str, bool] = field(default_factory=dict)
    choices: Choices = field(default_factory=Choices)
    objective: str = "time"
    max_step_s: float = np.inf
    costs: str | Tables = "auto"
    _rows: dict[tuple[int, bool, bool], _Choices] = field(init=False, default_factory=dict, compare=False)

    def priced(self, table: PlanTable) -> TableStages:
        """Return the stages of some plans, to price their time and memory."""
        return TableStages(self.setup, self.cluster, table, stages_of_plans(self.model, table))

    def batch(self, table: PlanTable) -> Batch:
        """Return the arrays that price the time of some plans."""
        return self.priced(table).batch(self.constants)

    def memory(self, table: PlanTable) -> TableMemory:
        """Return the memory of some plans."""
        return self.priced(table).memory()

    @property
    def offers(self) -> Offers:
        """Return what the framework ships."""
        return offers_of(self.framework)

    @property
    def setup(self) -> RunSetup:
        """Return what all plans of the space share."""
        return RunSetup(
            model=self.model,
            framework=self.framework,
            precision=self.precision,
            seq_len=self.seq_len,
            optimizer=self.optimizer,
            costs=self.costs,
        )


def stages_of_plans(model: Model, table: PlanTable) -> StageRows:
    """Return the distinct stages of every plan, as `predict.stage_rows.stage_rows_of` does.

    Where blocks differ, that counts every stage; here equal ones that follow each other are one row, and each
    pair of pp and vpp is worked out once.
    """
    blocks = tuple(block for block, _ in model.block_kinds())
    if len(blocks) == 1:
        return stage_rows_of(model, table.pp, table.vpp)
    first, inverse = distinct((table.pp, table.vpp))
    pairs = list(zip(table.pp[first].tolist(), table.vpp[first].tolist(), strict=True))
    known = _runs_by_pipeline(model)
    for pair in pairs:
        if pair not in known:
            known[pair] = _runs_of_stages(model, *pair)
    found = [known[pair] for pair in pairs]
    whole = np.zeros((found[0].shape[0], max(item.shape[1] for item in found), len(found)))
    for i, runs in enumerate(found):
        whole[:, : runs.shape[1], i] = runs
    *counts, first_stage, multiplicity, has_embedding, has_head = whole[:, :, np.ravel(inverse)]
    return StageRows(
        blocks=blocks,
        counts=tuple(counts),
        first_stage=first_stage,
        multiplicity=multiplicity,
        has_embedding=has_embedding,
        has_head=has_head,
    )


@lru_cache(maxsize=8)
def _runs_by_pipeline(model: Model) -> dict[tuple[int, int], np.ndarray]:
    """Return where the runs of equal stages of a model's pipelines are kept, by pp and vpp."""
    return {}


def _runs_of_stages(model: Model, pp: int, vpp: int) -> np.ndarray:
    """Return the runs of equal stages of one pipeline, shape (numbers of a stage, runs)."""
    rows = stage_rows_of(model, np.array([pp]), np.array([vpp]))
    kinds = np.concatenate([*rows.counts, rows.has_embedding, rows.has_head], axis=1)
    first = np.flatnonzero(np.append(True, np.any(np.diff(kinds, axis=0) != 0, axis=1)))
    count = np.diff(np.append(first, len(kinds)))
    kept = kinds[first].T
    return np.concatenate([kept[:-2], [first, count], kept[-2:]])


def chunks_of(table: PlanTable) -> Iterator[PlanTable]:
    """Yield a table in parts of CHUNK rows."""
    for start in range(0, len(table), CHUNK):
        yield table.take(slice(start, start + CHUNK))


def _product(
    table: PlanTable, index: np.ndarray, columns: dict[str, np.ndarray], **options: Any
) -> PlanTable:
    """Return rows `index` of a table with other columns in place of its own."""
    return replace(table.take(index), **columns, **options)  # type: ignore[arg-type]


def cells_of(request: GridRequest) -> PlanTable:
    """Return every valid choice of degrees and micro-batch; options as they are by default."""
    model, offers = request.model, request.offers
    devices = request.cluster.num_devices
    blocks = [block for block, _ in model.block_kinds()]
    experts = max(block.num_experts for block in blocks)
    parts = divisors(devices)
    one = np.array([1])

    def may(name: str, values: np.ndarray) -> np.ndarray:
        return values if name in offers.degrees else one

    heads = int(np.gcd.reduce([block.num_heads for block in blocks]))
    tp = may("tp", divisors(int(np.gcd(heads, devices))))
    pp = may("pp", parts[parts <= model.num_layers]) if offers.schedules else one
    cp = may("cp", parts[request.seq_len % parts == 0])
    ep = may("ep", divisors(experts)) if experts else one
    etp = may("etp", parts[parts <= MOST_ETP]) if experts else one
    grid = [axis.ravel() for axis in np.meshgrid(tp, pp, cp, ep, etp, indexing="ij")]
    width = grid[0] * grid[1] * grid[2]
    dp = devices // np.maximum(width, 1)
    ok = (dp * width == devices) & (dp <= request.global_batch)
    ok &= request.global_batch % np.maximum(dp, 1) == 0
    for name, values in zip(("tp", "pp", "cp", "ep", "etp", "dp"), (*grid, dp), strict=True):
        ok &= request.choices.mask(name, values)
    kept = [axis[ok] for axis in (*grid, dp)]
    sizes = divisors(request.global_batch)
    sizes = sizes[request.choices.mask("micro_batch", sizes)]
    index, which = np.nonzero(request.global_batch // kept[5][:, None] % sizes[None] == 0)
    tp, pp, cp, ep, etp, dp = (axis[index] for axis in kept)
    micro_batch = sizes[which]
    if not len(tp):
        return PlanTable.from_columns({name: np.empty(0, dtype=np.int64) for name in COLUMNS})
    table = PlanTable.from_columns(
        {
            "tp": tp,
            "pp": pp,
            "cp": cp,
            "ep": ep,
            "etp": etp,
            "dp": dp,
            "micro_batch": micro_batch,
            "num_micro_batches": request.global_batch // (dp * micro_batch),
            "zero": 0,
        }
    )
    return table.take(valid_plans(model, request.cluster, table, seq_len=request.seq_len))


def _rules(request: GridRequest) -> tuple[str, ...]:
    words = request.offers.recompute
    parts = "selective" in words  # of a stage, and modules by name: as Megatron has them
    offered = (
        rule
        for rule in RULES
        if rule in words
        or (parts and rule.partition(":")[0] in words)
        or (rule.startswith("every-") and "every" in words)
    )
    return request.choices.rules(tuple(offered))


def shapes_of(request: GridRequest, cells: PlanTable) -> PlanTable:
    """Return the cells with every number of virtual stages and sequence parallelism, nothing recomputed."""
    most = np.maximum(request.model.num_layers // cells.pp, 1)
    chunks = "interleaved" in request.offers.schedules and "vpp" in request.offers.degrees
    deep = np.where((cells.pp > 1) & chunks, most, 1)
    vpp = np.arange(1, int(deep.max()) + 1)
    index, v, sp = (
        axis.ravel() for axis in np.meshgrid(np.arange(len(cells)), vpp, np.arange(2), indexing="ij")
    )
    keep = (v <= deep[index]) & ((sp == 0) | ((cells.tp[index] > 1) & request.offers.cuts_sequences))
    keep &= (v == 1) | (cells.num_micro_batches[index] % cells.pp[index] == 0)
    keep &= request.choices.mask("vpp", v) & (request.choices.mask("sp", sp) | (cells.tp[index] == 1))
    index, v, sp = index[keep], v[keep], sp[keep]
    columns = {"vpp": v, "sp": sp, "schedule": np.where(v > 1, _INTERLEAVED, _1F1B)}
    table = _product(cells, index, columns, rules=("none",))
    return table.take(valid_plans(request.model, request.cluster, table, seq_len=request.seq_len))


def passes_of(request: GridRequest, cells: PlanTable) -> PlanTable:
    """Return the cells with every number of virtual stages, sequence parallelism and recompute rule."""
    return with_rules(request, shapes_of(request, cells))[0]


def with_rules(request: GridRequest, shapes: PlanTable) -> tuple[PlanTable, np.ndarray]:
    """Return shapes with every recompute rule they may have, and the shape of each."""
    rules = _rules(request)
    shape = np.repeat(np.arange(len(shapes)), len(rules))
    table = _product(shapes, shape, {"recompute": np.tile(np.arange(len(rules)), len(shapes))}, rules=rules)
    if not request.comm.get("expert_overlap"):
        return table, shape
    kept = np.flatnonzero(experts_overlap(table))
    return table.take(kept), shape[kept]


def experts_overlap(table: PlanTable) -> np.ndarray:
    """Return which plans can run the messages of experts beside the computation of another micro-batch.

    Source
    ------
    Megatron-LM core_v0.19.0 transformer_config.py: no pipeline without virtual stages, nothing recomputed
    that sends tokens again.
    """
    again = np.array(
        [
            one.startswith(("full", "every")) or "moe" in one.split(":", 1)[-1].split("+")
            for one in table.rules
        ]
    )
    return (table.ep == 1) | (((table.pp == 1) | (table.vpp > 1)) & ~again[table.recompute])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choices:
    """The rows of one pass: equally long lists of zero, shard group, schedule and offload."""

    zero: np.ndarray
    shard: np.ndarray
    schedule: np.ndarray
    offload: np.ndarray


def _choices(request: GridRequest, kind: tuple[int, bool, bool]) -> _Choices:
    """Return the rows of passes of one kind, listed once: hundreds of thousands of passes share a few."""
    if kind not in request._rows:
        request._rows[kind] = _listed(request, *kind)
    return request._rows[kind]


def _listed(request: GridRequest, replicas: int, pipeline: bool, chunks: bool) -> _Choices:
    offers = request.offers
    schedules = [TABLED.index(name) for name in offers.schedules if name != "interleaved"]
    if chunks:
        schedules = [_INTERLEAVED]
    choices = request.choices
    schedules = [s for s in schedules if choices.may_be("schedule", TABLED[s])]
    if not pipeline:
        schedules = [TABLED.index("1f1b")]
    offloads = [OFFLOADS.index(name) for name in choices.of("offload", offers.offload)]
    found = []
    levels = offers.levels(2 if pipeline else 1)
    for zero in choices.of("zero", _with_whole(levels) if replicas == 1 else levels):
        parts = [int(d) for d in divisors(replicas)[1:-1]] if zero in offers.in_groups else []
        for shard in choices.of("shard_size", (0, *parts)):
            if zero or not shard:  # at zero 0 nothing is sharded
                found += [(zero, shard, s, o) for s in schedules for o in offloads]
    columns = np.array(found, dtype=np.int64).reshape(-1, 4).T
    return _Choices(zero=columns[0], shard=columns[1], schedule=columns[2], offload=columns[3])


def _with_whole(levels: tuple[int, ...]) -> tuple[int, ...]:
    """Return levels of sharding for one replica, which may stay whole where a framework always shards."""
    return levels if min(levels, default=0) <= 1 else (1, *levels)


def _kinds(passes: PlanTable) -> tuple[list[tuple[int, bool, bool]], np.ndarray]:
    """Return what decides the rows of a pass, and which applies to each: replicas, pipeline, chunks."""
    codes, inverse = np.unique(
        passes.dp * passes.cp * 4 + (passes.pp > 1) * 2 + (passes.vpp > 1), return_inverse=True
    )
    return [(code // 4, code % 4 >= 2, code % 2 == 1) for code in codes.tolist()], inverse


def num_rows(request: GridRequest, passes: PlanTable) -> np.ndarray:
    """Return the rows of each pass."""
    kinds, inverse = _kinds(passes)
    return np.array([len(_choices(request, kind).zero) for kind in kinds], dtype=np.int64)[inverse]


def rows_of(request: GridRequest, passes: PlanTable) -> PlanTable:
    """Return every row of some passes."""
    kinds, inverse = _kinds(passes)
    parts = []
    for k, kind in enumerate(kinds):
        choice = _choices(request, kind)
        here = np.flatnonzero(inverse == k)
        size = len(choice.zero)
        columns = {
            name: np.tile(getattr(choice, name), len(here))
            for name in ("zero", "shard", "schedule", "offload")
        }
        parts.append(_product(passes, np.repeat(here, size), columns))
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
    return PlanTable(**joined, rules=passes.rules)


def least_memory_rows(request: GridRequest, passes: PlanTable) -> tuple[PlanTable, np.ndarray]:
    """Return rows of which one needs the least memory of each pass, and the pass of each row.

    States spread over all replicas and everything offloaded that can be: neither adds to what a device holds.
    Levels of sharding and schedules are all there, since either may.
    """
    schedules = [TABLED.index(name) for name in request.offers.schedules if name != "interleaved"]
    offload = max(OFFLOADS.index(name) for name in request.offers.offload)
    options = np.array(
        [(zero, s) for zero in _with_whole(request.offers.levels(1)) for s in schedules or [_1F1B]],
        dtype=np.int64,
    )
    index = np.repeat(np.arange(len(passes)), len(options))
    zero, schedule = np.tile(options, (len(passes), 1)).T
    free = (passes.pp[index] > 1) & (passes.vpp[index] == 1)
    kept = np.flatnonzero(free | (schedule == options[0, 1]))  # all others have one schedule
    index, zero, schedule = index[kept], zero[kept], schedule[kept]
    schedule = np.where(passes.vpp[index] > 1, _INTERLEAVED, np.where(passes.pp[index] > 1, schedule, _1F1B))
    columns = {"zero": zero, "schedule": schedule, "offload": np.full(len(index), offload)}
    return _product(passes, index, columns), index


def cell_sizes(request: GridRequest, cells: PlanTable) -> np.ndarray:
    """Return the rows of each cell."""
    spread = (cells.ep > 1) & bool(request.comm.get("expert_overlap"))
    alike = cells.dp * cells.cp, cells.pp, cells.tp, cells.cp, cells.num_micro_batches % cells.pp == 0, spread
    first, of = distinct(alike)
    sizes = np.zeros(len(first), dtype=np.int64)
    for k, cell in enumerate(first.tolist()):
        sizes[k] = int(num_rows(request, passes_of(request, cells.take(slice(cell, cell + 1)))).sum())
    return sizes[of]


def distinct(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return where each combination of values of some columns stands first, and which each row has.

    Columns are whole numbers of at least 0.
    """
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        code = code * (int(column.max(initial=0)) + 1) + column
    # Few values in a narrow range are counted, not sorted.
    size = int(code.max(initial=0)) + 1
    if size > 4 * len(code) + _COUNTED:
        _, first, of = np.unique(code, return_index=True, return_inverse=True)
        return first, of
    first_of = np.full(size, -1, dtype=np.int64)
    first_of[code[::-1]] = np.arange(len(code) - 1, -1, -1)
    present = np.flatnonzero(first_of >= 0)
    place = np.empty(size, dtype=np.int64)
    place[present] = np.arange(len(present))
    return first_of[present], place[code]
