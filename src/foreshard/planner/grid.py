"""Exhaustive search of the plans that degree flags span, on equal nodes.

The space is a product: degrees and micro-batch (a *cell*), then virtual stages, sequence parallelism and
recomputation (a *pass* through the pipeline), then sharding, schedule and offload (a *row*). What a pass
recurs with bounds every row of it from below, what a cell must compute bounds every pass, so that most rows
are excluded without being priced. The search goes on in order of the bounds until no bound is below the
best plans: then they are the best of all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from foreshard.catalog.offers import Offers, offers_of
from foreshard.catalog.training import TrainingConstants
from foreshard.cost.energy import BUSY_PARTS, WAITING_POWER
from foreshard.planner.stage_table import StageTable
from foreshard.predict.analytical import StepTimes, stage_times, step_times
from foreshard.predict.batch import Batch
from foreshard.predict.plan_table import COLUMNS, OFFLOADS, PlanTable
from foreshard.predict.space import RULES, divisors, valid_plans
from foreshard.predict.stage_rows import recompute_columns
from foreshard.predict.table import TableMemory, table_batch, table_memory
from foreshard.spec.checks import MODELLED_SCHEDULES
from foreshard.spec.cluster import Cluster
from foreshard.spec.framework import Framework
from foreshard.spec.model import Model

CHUNK = 4096
"""Rows priced at once: large enough that numpy's overhead is small, small enough for the cache."""

SPACE = (
    "all divisors for tp, pp, cp, dp, ep, etp and micro-batch, all virtual stages, zero levels, shard groups, "
    "recompute rules, schedules and offloads that the framework ships, on all devices, layers cut as evenly as "
    "they go"
)
_RECURRING = ("compute", "recompute", "tensor_comm", "context_comm", "expert_comm", "pipeline_comm")
_INTERLEAVED = MODELLED_SCHEDULES.index("interleaved")
_DEGREES = ("tp", "pp", "cp", "ep", "etp")


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRequest:
    """What to train on which equal nodes, and what the framework lets one choose.

    objective : {'time', 'cost', 'energy'}
    max_step_s : float, seconds
        Slower plans are not kept.
    """

    model: Model
    cluster: Cluster
    framework: Framework
    constants: TrainingConstants
    global_batch: int
    seq_len: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    objective: str = "time"
    max_step_s: float = np.inf
    stages: StageTable = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", StageTable(model=self.model))

    def batch(self, table: PlanTable) -> Batch:
        """Return the arrays that price the time of some plans."""
        rows = self.stages.rows(table)
        rule = recompute_columns(table.rules, table.recompute, rows, table.vpp)
        return table_batch(
            self.model, self.cluster, table, self.framework, self.constants, rows=rows, rule=rule,
            **self.pricing,
        )  # fmt: skip

    def memory(self, table: PlanTable) -> TableMemory:
        """Return the memory of some plans."""
        rows = self.stages.rows(table)
        rule = recompute_columns(table.rules, table.recompute, rows, table.vpp)
        return table_memory(
            self.model, self.cluster, table, self.framework, rows=rows, rule=rule, **self.pricing
        )

    @property
    def offers(self) -> Offers:
        """Return what the framework ships."""
        return offers_of(self.framework)

    @property
    def pricing(self) -> dict[str, Any]:
        """Return the arguments that every pricing call shares."""
        return {"seq_len": self.seq_len, "precision": self.precision, "optimizer": self.optimizer}


@dataclass(slots=True, kw_only=True)
class Found:
    """The best rows so far, one for each cell, and what the search has covered.

    beat : plans of this score or more are of no interest
    score : what is made small, of each kept plan
    bound : no row has a smaller score, by the analytical engine
    floor_s : no step takes less by any engine: computation alone, spread evenly over the stages
    interrupted : rows are left that might be better
    least_step_s : of the plans timed
    least_peak : the row that needs least memory, of those priced
    """

    keep: int
    beat: float = np.inf
    tables: list[PlanTable] = field(default_factory=list)
    score: np.ndarray = field(default_factory=lambda: np.empty(0))
    step_time_s: np.ndarray = field(default_factory=lambda: np.empty(0))
    bound: float = 0.0
    evaluated: int = 0
    pruned: int = 0
    interrupted: bool = False
    floor_s: float = 0.0
    least_step_s: float = np.inf
    least_peak_bytes: float = np.inf
    least_peak: PlanTable | None = None

    @property
    def worst(self) -> float:
        """Return the score a row must beat to be kept."""
        return min(self.beat, float(self.score[-1]) if len(self.score) == self.keep else np.inf)

    def add(
        self, table: PlanTable, score: np.ndarray, step_time_s: np.ndarray, *, most_s: float = np.inf
    ) -> None:
        """Keep the best plan of each choice of degrees among those kept and these."""
        better = np.flatnonzero((score < self.worst) & (step_time_s <= most_s))
        if not len(better):
            return
        order = better[np.argsort(score[better], kind="stable")]
        _, first = np.unique(_degrees(table, order), axis=1, return_index=True)
        order = order[np.sort(first)[: self.keep]]
        tables = [*self.tables, *(table.take(slice(i, i + 1)) for i in order)]
        scores = np.concatenate([self.score, score[order]])
        steps = np.concatenate([self.step_time_s, step_time_s[order]])
        seen: dict[tuple[int, ...], int] = {}
        for i in np.argsort(scores, kind="stable"):
            seen.setdefault(tuple(_degrees(tables[i], np.array([0])).ravel()), int(i))
        kept = list(seen.values())[: self.keep]
        self.tables = [tables[i] for i in kept]
        self.score, self.step_time_s = scores[kept], steps[kept]


def _degrees(table: PlanTable, index: np.ndarray) -> np.ndarray:
    """Return the degrees of the plans at `index`, shape (degrees, plans)."""
    return np.array([getattr(table, name)[index] for name in _DEGREES])


def search_rows(
    request: GridRequest, *, keep: int = 5, deadline: float = np.inf, beat: float = np.inf
) -> Found:
    """Return the best rows of the whole space and how many were timed and excluded.

    Parameters
    ----------
    request : GridRequest
    keep : int
        Plans to return, of different degrees.
    deadline : float
        Of `time.perf_counter`; what is left then is bounded, not priced. The search goes on until it has a plan.
    beat : float
        Plans of this score or more are of no interest.
    """
    found = Found(keep=keep, beat=beat)
    cells = _cells(request)
    bound, found.floor_s = _cell_bounds(request, cells)
    order = np.argsort(bound, kind="stable")
    cells, bound = cells.take(order), bound[order]
    sizes = _cell_sizes(request, cells)
    start, batch = 0, 8
    try:
        while start < len(cells) and bound[start] < found.worst:
            if time.perf_counter() >= deadline and (len(found.score) or beat < np.inf):
                break
            stop = min(start + batch, len(cells))
            _search_cells(request, cells.take(slice(start, stop)), found)
            start, batch = stop, min(4 * batch, 512)
    except KeyboardInterrupt:
        found.interrupted = True
    best = min([*found.score[:1], beat])
    if start < len(cells) and bound[start] < found.worst:
        found.interrupted = True
        found.bound = min(float(bound[start]), best)
    else:
        found.bound = best
        found.pruned += int(sizes[start:].sum())
    return found


def _search_cells(request: GridRequest, cells: PlanTable, found: Found) -> None:
    """Price what can beat the kept plans in some cells."""
    passes = _passes(request, cells)
    bounds, rows = [], []
    for some in _chunks(passes):
        bounds.append(_pass_bounds(request, some))
        rows.append(_num_rows(request, some))
    bound, count = np.concatenate(bounds), np.concatenate(rows)
    order = np.argsort(bound, kind="stable")
    start = 0
    while start < len(order):
        if bound[order[start]] >= found.worst:
            found.pruned += int(count[order[start:]].sum())
            return
        per = max(1, int(np.ceil(count[order[start : start + 64]].mean())))
        stop = start + max(1, CHUNK // per)
        chosen = order[start:stop]
        _price_rows(request, _rows(request, passes.take(chosen)), found)
        start = stop


def _price_rows(request: GridRequest, rows: PlanTable, found: Found) -> None:
    """Time the rows that fit, and keep the best."""
    for some in _chunks(rows):
        memory = request.memory(some)
        least = int(memory.peak_bytes.argmin())
        if memory.peak_bytes[least] < found.least_peak_bytes:
            found.least_peak_bytes = float(memory.peak_bytes[least])
            found.least_peak = some.take(slice(least, least + 1))
        fits = np.flatnonzero(memory.fits)
        found.pruned += len(some) - len(fits)
        if len(fits):
            fitting = some.take(fits)
            step = step_times(request.batch(fitting))
            found.evaluated += len(fitting)
            found.least_step_s = min(found.least_step_s, float(step.total.min()))
            found.add(fitting, score_of(request, step), step.total, most_s=request.max_step_s)


def score_of(request: GridRequest, step: StepTimes) -> np.ndarray:
    """Return what is made small: seconds of a step, or joules of a step; dollars go with seconds."""
    if request.objective != "energy":
        return step.total
    busy = sum(step.parts[name] for name in BUSY_PARTS)
    return _watts(request) * (busy + WAITING_POWER * (step.total - busy))


def _watts(request: GridRequest) -> float:
    return sum(nodes.device.tdp_w * nodes.num_devices for nodes in request.cluster.nodes)


def _score_bound(request: GridRequest, step_s: np.ndarray, busy_s: np.ndarray) -> np.ndarray:
    if request.objective != "energy":
        return step_s
    return _watts(request) * (busy_s + WAITING_POWER * (step_s - busy_s))


def _chunks(table: PlanTable) -> Iterator[PlanTable]:
    for start in range(0, len(table), CHUNK):
        yield table.take(slice(start, start + CHUNK))


def _product(
    table: PlanTable, index: np.ndarray, columns: dict[str, np.ndarray], **options: Any
) -> PlanTable:
    """Return rows `index` of a table with other columns in place of its own."""
    return replace(table.take(index), **columns, **options)


def _cells(request: GridRequest) -> PlanTable:
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
    etp = may("etp", parts[parts <= 64]) if experts else one
    grid = [axis.ravel() for axis in np.meshgrid(tp, pp, cp, ep, etp, indexing="ij")]
    width = grid[0] * grid[1] * grid[2]
    dp = devices // np.maximum(width, 1)
    ok = (dp * width == devices) & (dp <= request.global_batch)
    ok &= request.global_batch % np.maximum(dp, 1) == 0
    kept = [axis[ok] for axis in (*grid, dp)]
    sizes = divisors(request.global_batch)
    index, which = np.nonzero(request.global_batch // kept[5][:, None] % sizes[None] == 0)
    tp, pp, cp, ep, etp, dp = (axis[index] for axis in kept)
    micro_batch = sizes[which]
    table = PlanTable.from_columns(
        {
            "tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp, "dp": dp, "micro_batch": micro_batch,
            "num_micro_batches": request.global_batch // (dp * micro_batch), "zero": 0,
        },
        _rules(request),
    ) if len(tp) else PlanTable.from_columns({name: np.empty(0, dtype=np.int64) for name in COLUMNS})  # fmt: skip
    return table.take(valid_plans(model, request.cluster, table, seq_len=request.seq_len))


def _rules(request: GridRequest) -> tuple[str, ...]:
    words = {"every": "every-"} | {word: word for word in request.offers.recompute}
    allowed = tuple(words[word] for word in request.offers.recompute)
    return tuple(rule for rule in RULES if rule.startswith(allowed))


def _passes(request: GridRequest, cells: PlanTable) -> PlanTable:
    """Return the cells with every number of virtual stages, sequence parallelism and recompute rule."""
    most = np.maximum(request.model.num_layers // cells.pp, 1)
    chunks = "interleaved" in request.offers.schedules and "vpp" in request.offers.degrees
    deep = np.where((cells.pp > 1) & chunks, most, 1)
    vpp = np.arange(1, int(deep.max()) + 1)
    rules = np.arange(len(cells.rules))
    index, v, sp, rule = (
        axis.ravel() for axis in np.meshgrid(np.arange(len(cells)), vpp, np.arange(2), rules, indexing="ij")
    )
    keep = (v <= deep[index]) & ((sp == 0) | (cells.tp[index] > 1))
    keep &= (v == 1) | (cells.num_micro_batches[index] % cells.pp[index] == 0)
    index, v, sp, rule = index[keep], v[keep], sp[keep], rule[keep]
    default = MODELLED_SCHEDULES.index("1f1b")
    columns = {"vpp": v, "sp": sp, "recompute": rule, "schedule": np.where(v > 1, _INTERLEAVED, default)}
    table = _product(cells, index, columns)
    return table.take(valid_plans(request.model, request.cluster, table, seq_len=request.seq_len))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choices:
    """The rows of one pass: equally long lists of zero, shard group, schedule and offload."""

    zero: np.ndarray
    shard: np.ndarray
    schedule: np.ndarray
    offload: np.ndarray


def _choices(request: GridRequest, replicas: int, pipeline: bool, chunks: bool) -> _Choices:
    offers = request.offers
    schedules = [MODELLED_SCHEDULES.index(name) for name in offers.schedules if name != "interleaved"]
    if chunks:
        schedules = [_INTERLEAVED]
    if not pipeline:
        schedules = [MODELLED_SCHEDULES.index("1f1b")]
    offloads = [OFFLOADS.index(name) for name in offers.offload]
    found = []
    for zero in offers.levels(2 if pipeline else 1):
        parts = [int(d) for d in divisors(replicas)[1:-1]] if zero in (1, 3) else []
        for shard in (0, *parts):
            found += [(zero, shard, s, o) for s in schedules for o in offloads]
    columns = np.array(found, dtype=np.int64).reshape(-1, 4).T
    return _Choices(zero=columns[0], shard=columns[1], schedule=columns[2], offload=columns[3])


def _kinds(passes: PlanTable) -> np.ndarray:
    """Return what decides the rows of a pass, shape (3, passes): replicas, pipeline or not, chunks or not."""
    return np.array([passes.dp * passes.cp, passes.pp > 1, passes.vpp > 1])


def _num_rows(request: GridRequest, passes: PlanTable) -> np.ndarray:
    kinds, inverse = np.unique(_kinds(passes), axis=1, return_inverse=True)
    sizes = [len(_choices(request, int(r), bool(p), bool(c)).zero) for r, p, c in kinds.T]
    return np.array(sizes, dtype=np.int64)[np.ravel(inverse)]


def _rows(request: GridRequest, passes: PlanTable) -> PlanTable:
    """Return every row of some passes."""
    kinds, inverse = np.unique(_kinds(passes), axis=1, return_inverse=True)
    inverse = np.ravel(inverse)
    parts = []
    for k, (replicas, pipeline, chunks) in enumerate(kinds.T):
        choice = _choices(request, int(replicas), bool(pipeline), bool(chunks))
        here = np.flatnonzero(inverse == k)
        size = len(choice.zero)
        columns = {
            name: np.tile(getattr(choice, name), len(here))
            for name in ("zero", "shard", "schedule", "offload")
        }
        parts.append(_product(passes, np.repeat(here, size), columns))
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
    return PlanTable(**joined, rules=passes.rules)


def _cell_sizes(request: GridRequest, cells: PlanTable) -> np.ndarray:
    """Return the rows of each cell."""
    sizes = np.zeros(len(cells), dtype=np.int64)
    key = np.array(
        [cells.dp * cells.cp, cells.pp, cells.tp, cells.cp, cells.num_micro_batches % cells.pp == 0]
    )
    kinds, first, inverse = np.unique(key, axis=1, return_index=True, return_inverse=True)
    for k in range(kinds.shape[1]):
        passes = _passes(request, cells.take(first[k : k + 1]))
        sizes[np.ravel(inverse) == k] = int(_num_rows(request, passes).sum()) if len(passes) else 0
    return sizes


def _factor(request: GridRequest) -> float:
    """Return how waiting for the slowest of all devices lengthens a step."""
    doublings = max(0.0, float(np.log2(request.cluster.num_devices / 8.0)))
    return 1.0 + request.constants.jitter * doublings


def _cell_bounds(request: GridRequest, cells: PlanTable) -> tuple[np.ndarray, float]:
    """Return a score no row of each cell falls below, and seconds that no step falls below.

    The work of all stages is spread evenly over them; of that computation alone is what every engine counts.

    Recomputation and virtual stages add to it or cut it otherwise; of sequence parallelism the better counts.
    """
    bounds, floor = [], np.inf
    for some in _chunks(cells):
        both = []
        for sp in (0, 1):
            table = replace(some, sp=np.full(len(some), sp) * (some.tp > 1))
            batch = request.batch(table)
            stage = stage_times(batch)
            count = batch.multiplicity
            work = sum(stage.parts[name] for name in _RECURRING[:5])
            even = (work * count).sum(0) * some.num_micro_batches / some.pp
            both.append(_score_bound(request, even * _factor(request), np.zeros(len(some))))
            alone = (stage.parts["compute"] * count).sum(0) * some.num_micro_batches / some.pp
            floor = min(floor, float(alone.min()))
        bounds.append(np.minimum(*both))
    return (np.concatenate(bounds) if bounds else np.empty(0)), floor


def _pass_bounds(request: GridRequest, passes: PlanTable) -> np.ndarray:
    """Return a score no row of each pass falls below: what recurs on the busiest stage."""
    batch = request.batch(passes)
    stage = stage_times(batch)
    present = batch.multiplicity > 0
    work = np.where(present, sum(stage.parts[name] for name in _RECURRING), 0.0).max(0)
    # Which stage sets the pace may depend on the row; its work is at least that of the least busy one.
    busy = np.where(present, stage.parts["compute"] + stage.parts["recompute"], np.inf).min(0)
    rounds = passes.num_micro_batches
    return _score_bound(request, work * rounds * _factor(request), busy * rounds)


__all__ = ["CHUNK", "SPACE", "Found", "GridRequest", "score_of", "search_rows"]
