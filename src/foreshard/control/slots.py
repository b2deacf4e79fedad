"""One slot: layers, the state of the workers, a structure with shares, and what a batch takes and costs.

Two readings of "groups": with `dp_over_mp` a group is a pipeline that holds a replica and gets a share of the
batch; with `mp_over_dp` a group is a stage of one pipeline whose workers split every micro-batch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np

from foreshard.errors import SpecError

DP_OVER_MP, MP_OVER_DP = "dp_over_mp", "mp_over_dp"
KINDS = ("usd", "rent_usd", "egress_usd", "joule", "carbon_kg", "duty")
SECONDS = {"second": 1.0, "hour": 3600.0}
J_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """Layers and workers as numbers that do not change.

    Attributes
    ----------
    layer_s : ndarray, shape (W, L), seconds per sample
        Forward and backward of a layer on a worker at nominal speed.
    boundary_bytes : ndarray, shape (L - 1,), bytes per sample
        That cross after a layer, forward and backward together.
    sync_bytes : ndarray, shape (L,), bytes
        Gradients of a layer.
    state_bytes : ndarray, shape (L,), bytes
        Parameters, gradients and optimizer states of a layer; also what moves when it changes its worker.
    saved_bytes : ndarray, shape (L,), bytes per sample
        Activations kept for backward.
    memory_bytes : ndarray, shape (W,), bytes
    before_s, before_state, before_saved : ndarray
        Sums over the layers before each.
    """

    layer_s: np.ndarray
    boundary_bytes: np.ndarray
    sync_bytes: np.ndarray
    state_bytes: np.ndarray
    saved_bytes: np.ndarray
    memory_bytes: np.ndarray
    before_s: np.ndarray = field(init=False)
    before_state: np.ndarray = field(init=False)
    before_saved: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        """Add up layers."""
        object.__setattr__(self, "before_s", _before(np.asarray(self.layer_s, float)))
        object.__setattr__(self, "before_state", _before(np.asarray(self.state_bytes, float)))
        object.__setattr__(self, "before_saved", _before(np.asarray(self.saved_bytes, float)))

    @property
    def num_workers(self) -> int:
        """Return W."""
        return len(self.layer_s)

    @property
    def num_layers(self) -> int:
        """Return L."""
        return self.layer_s.shape[1]


def _before(values: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """What changes between slots.

    Attributes
    ----------
    speed : ndarray, shape (W,)
        Factor on the nominal speed.
    available : ndarray of bool, shape (W,)
    bandwidth_bytes_per_s, latency_s : ndarray, shape (W, W)
    usd_per_h : ndarray, shape (W,)
    busy_w, idle_w : ndarray, shape (W,), watts
    usd_per_byte : ndarray, shape (W, W)
        Egress from row to column.
    kg_per_j : ndarray, shape (W,)
        Carbon of the power a worker draws.
    """

    speed: np.ndarray
    available: np.ndarray
    bandwidth_bytes_per_s: np.ndarray
    latency_s: np.ndarray
    usd_per_h: np.ndarray
    busy_w: np.ndarray
    idle_w: np.ndarray
    usd_per_byte: np.ndarray
    kg_per_j: np.ndarray
    _key: list[bytes] = field(init=False, default_factory=list, repr=False)

    def key(self) -> bytes:
        """Return what is equal for equal states, for solvers to remember them by."""
        if not self._key:
            digest = hashlib.blake2b(digest_size=16)
            for name in STATE_FIELDS:
                digest.update(np.ascontiguousarray(getattr(self, name)).tobytes())
            self._key.append(digest.digest())
        return self._key[0]


def link_kinds(state: State) -> list[int]:
    """Return numbers equal for workers whose links to all others, and between them, are the same."""
    tables = [state.bandwidth_bytes_per_s, state.latency_s, state.usd_per_byte]
    both = np.concatenate([*tables, *(table.T for table in tables)], axis=1)
    size = len(state.speed)
    columns = np.arange(both.shape[1]) % size
    first: list[int] = []
    kinds = []
    for worker in range(size):
        for kind, other in enumerate(first):
            others = (columns != worker) & (columns != other)
            back = all(table[worker, other] == table[other, worker] for table in tables)
            if back and np.array_equal(both[worker, others], both[other, others]):
                kinds.append(kind)
                break
        else:
            kinds.append(len(first))
            first.append(worker)
    return kinds


STATE_FIELDS = (
    "speed", "available", "bandwidth_bytes_per_s", "latency_s", "usd_per_h", "busy_w", "idle_w",
    "usd_per_byte", "kg_per_j",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Workers of a group, and its cuts.

    Attributes
    ----------
    workers : tuple of int
        First stage first.
    cuts : tuple of int
        `dp_over_mp`: where stages begin, and the end: (0, ..., L), one more than workers.
        `mp_over_dp`: (start, stop) of the layers that all its workers hold.
    """

    workers: tuple[int, ...]
    cuts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Groups of workers; those in no group are idle."""

    groups: tuple[Pipeline, ...]
    reading: str = DP_OVER_MP

    @property
    def workers(self) -> tuple[int, ...]:
        """Return those that are not idle, in order of groups."""
        return tuple(worker for group in self.groups for worker in group.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A structure with shares, what a batch takes and what it costs by kind.

    Attributes
    ----------
    structure : Structure
    shares : tuple of int
        `dp_over_mp`: samples of the batch by group. `mp_over_dp`: samples of each micro-batch by worker, in
        the order of `structure.workers`.
    time_s : float
        inf where it cannot run.
    costs : mapping of cost key to cost of one batch
        See :attr:`Budget.key`.
    """

    structure: Structure
    shares: tuple[int, ...]
    time_s: float
    costs: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A long-term mean that must be kept.

    Attributes
    ----------
    name : str
    kind : {'usd', 'rent_usd', 'egress_usd', 'joule', 'carbon_kg', 'duty'}
        'usd' is rent and egress together; 'duty' the seconds that a worker is busy.
    limit : float
        Mean per step, per second or per hour.
    per : {'step', 'second', 'hour'}
    worker : int or None
        Only what this worker causes; 'duty' needs it.
    """

    name: str
    kind: str
    limit: float
    per: str = "step"
    worker: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be kept."""
        if self.kind not in KINDS or (self.kind == "duty") > (self.worker is not None):
            raise SpecError(
                f"no budget of kind {self.kind!r}", key="kind", value=self.kind,
                rule=f"A budget counts one of {', '.join(KINDS)}; duty is of one worker",
            )  # fmt: skip
        if self.per not in ("step", *SECONDS):
            raise SpecError(
                f"a budget per {self.per!r}", key="per", value=self.per, rule="per is step, second or hour"
            )
        if not 0.0 < self.limit < math.inf:
            raise SpecError(
                f"a budget of {self.limit}", key="limit", value=self.limit, rule="A limit is above 0, finite"
            )

    @property
    def key(self) -> str:
        """Return where :class:`Choice` keeps the cost."""
        return self.kind if self.worker is None else f"{self.kind}:{self.worker}"

    def allowance(self, time_s: float) -> float:
        """Return what a step of so many seconds may cost in the mean."""
        return self.limit if self.per == "step" else self.limit * time_s / SECONDS[self.per]


def workers_apart(budgets: Iterable[Budget]) -> frozenset[int]:
    """Return the workers that budgets count by themselves: they are of no kind with others."""
    return frozenset(budget.worker for budget in budgets if budget.worker is not None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pace:
    """What a structure takes and costs as a function of shares: all of it is linear.

    Attributes
    ----------
    start_s, rate_s : ndarray, shape (groups,)
        A group ends after start_s + rate_s * share.
    """

    start_s: np.ndarray
    rate_s: np.ndarray


def stage_spans(structure: Structure) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return worker, group, first layer and end of every stage of `dp_over_mp` pipelines."""
    groups = structure.groups
    workers = np.array(structure.workers, dtype=int)
    group = np.repeat(np.arange(len(groups)), [len(one.workers) for one in groups])
    first = np.array([cut for one in groups for cut in one.cuts[:-1]], dtype=int)
    stop = np.array([cut for one in groups for cut in one.cuts[1:]], dtype=int)
    return workers, group, first, stop


def evaluate(
    chain: Chain,
    state: State,
    structure: Structure,
    shares: Sequence[float],
    *,
    micro_batch: int,
    schedule_memory: str = "1f1b",
    batch: int | None = None,
) -> Choice:
    """Return the choice with the seconds and the costs of a batch.

    Parameters
    ----------
    chain, state
    structure : Structure
    shares : sequence of int
        As :attr:`Choice.shares`; parts of samples are taken as they are.
    micro_batch : int, samples
    schedule_memory : {'1f1b', 'gpipe'}
        How many micro-batches a stage keeps activations of: as many as stages from it to the end, or all.
    batch : int, samples
        `mp_over_dp` only: the batch, which the shares do not say.

    Returns
    -------
    Choice
        With infinite time where a worker is missing or out of memory. Groups without a share take no part.

    Source
    ------
    Fill + (n - 1) bottleneck is the flush of one batch through a pipeline; after the last of them gradients
    are summed, in the time of the worker with most of them.
    """
    if structure.reading == MP_OVER_DP:
        if batch is None:
            raise SpecError("no batch", key="batch", rule="Shares of mp_over_dp are parts of a micro-batch")
        return _evaluate_stages(chain, state, structure, shares, micro_batch, schedule_memory, batch)
    used = [(group, share) for group, share in zip(structure.groups, shares, strict=True) if share > 0]
    active = Structure(groups=tuple(group for group, _ in used))
    if not used:
        return Choice(structure=structure, shares=tuple(shares), time_s=math.inf, costs={})  # type: ignore[arg-type]
    amounts = np.array([share for _, share in used], dtype=float)
    spans = stage_spans(active)
    pace = pace_of(chain, state, active, micro_batch=micro_batch)
    time_s = float((pace.start_s + pace.rate_s * amounts).max())
    if not runs(chain, state, active, amounts, micro_batch=micro_batch, schedule_memory=schedule_memory):
        time_s = math.inf
    worker, group, first, stop = spans
    busy = amounts[group] * stage_s(chain, state, worker, first, stop)
    sent = boundary_usd(chain, state, spans, amounts) + sync_usd(chain, state, active)
    costs = cost_table(state, worker, busy, sent, time_s)
    return Choice(structure=structure, shares=tuple(shares), time_s=time_s, costs=costs)  # type: ignore[arg-type]


def cost_table(
    state: State, worker: np.ndarray, busy_s: np.ndarray, egress_usd: np.ndarray, time_s: float
) -> dict[str, float]:
    """Return costs of a batch by kind, and by kind and worker.

    Parameters
    ----------
    state : State
    worker : ndarray of int, shape (active,)
    busy_s : ndarray, shape (active,)
    egress_usd : ndarray, shape (W,)
        What bytes sent by each worker cost.
    time_s : float
    """
    rent = state.usd_per_h[worker] * (time_s / 3600.0)
    egress = egress_usd[worker]
    if math.isfinite(time_s):
        energy = state.busy_w[worker] * busy_s + state.idle_w[worker] * np.maximum(time_s - busy_s, 0.0)
    else:
        energy = np.full(len(worker), math.inf)
    kg_per_j = state.kg_per_j[worker]
    by_kind = {
        "usd": rent + egress, "rent_usd": rent, "egress_usd": egress, "joule": energy,
        "carbon_kg": np.where(kg_per_j > 0.0, energy, 0.0) * kg_per_j, "duty": busy_s,
    }  # fmt: skip
    return Costs(worker, by_kind)


class Costs(dict[str, float]):
    """Costs by kind; those of single workers ('joule:3') are looked up when asked for."""

    __slots__ = ("_kinds", "_place")

    def __init__(self, worker: np.ndarray, by_kind: Mapping[str, np.ndarray]):
        super().__init__({kind: float(values.sum()) for kind, values in by_kind.items() if kind != "duty"})
        self._place = {int(one): at for at, one in enumerate(worker)}
        self._kinds = by_kind

    def by_worker(self, kind: str) -> np.ndarray:
        """Return the costs of a kind by worker, in the order of the structure's workers."""
        return self._kinds[kind]

    def __missing__(self, key: str) -> float:
        kind, _, worker = key.partition(":")
        if kind not in self._kinds or not worker.isdecimal():
            raise KeyError(key)
        at = self._place.get(int(worker))
        return 0.0 if at is None else float(self._kinds[kind][at])


def pace_of(chain: Chain, state: State, structure: Structure, *, micro_batch: int) -> Pace:
    """Return how `dp_over_mp` groups go when all of them take part."""
    worker, group, first, stop = stage_spans(structure)
    period = micro_batch * stage_s(chain, state, worker, first, stop)
    inner = np.flatnonzero(first > 0)
    before, after = worker[inner - 1], worker[inner]
    period[inner] += (
        2.0 * state.latency_s[before, after]
        + micro_batch * chain.boundary_bytes[first[inner] - 1] / state.bandwidth_bytes_per_s[before, after]
    )
    starts = np.searchsorted(group, np.arange(len(structure.groups)))
    slowest = np.maximum.reduceat(period, starts)
    fill = np.add.reduceat(period, starts)
    # A ring can begin when the last of its members has computed, whichever group that is in.
    sync = sync_s(chain, state, structure).max()
    return Pace(start_s=fill - slowest + sync, rate_s=slowest / micro_batch)


def stage_s(
    chain: Chain, state: State, worker: np.ndarray, first: np.ndarray, stop: np.ndarray
) -> np.ndarray:
    """Return the seconds per sample of layers [first, stop) on each worker."""
    return (chain.before_s[worker, stop] - chain.before_s[worker, first]) / state.speed[worker]


def sync_s(chain: Chain, state: State, structure: Structure) -> np.ndarray:
    """Return the seconds of gradient synchronisation of every stage, shape (stages,).

    A ring all-reduce per layer among the workers that hold it, at the rate of the slowest link between two.
    """
    groups = structure.groups
    num = len(groups)
    workers = structure.workers
    total = np.zeros(len(workers))
    if num == 1:
        return total
    ends = sorted({cut for one in groups for cut in one.cuts})
    offsets = np.cumsum([0] + [len(one.workers) for one in groups])
    for low, high in pairwise(ends):
        at = [
            offset + next(k for k, stop in enumerate(one.cuts[1:]) if stop > low)
            for one, offset in zip(groups, offsets, strict=False)
        ]
        owners = [workers[place] for place in at]
        rate, latency = slowest_link(state, owners)
        size = float(chain.sync_bytes[low:high].sum())
        total[at] += 2.0 * (num - 1) * ((high - low) * latency + size / (num * rate))
    return total


def slowest_link(state: State, workers: Sequence[int] | np.ndarray) -> tuple[float, float]:
    """Return the least bandwidth and the greatest latency between any two of them."""
    if len(workers) == 2:
        a, b = workers
        rates, waits = state.bandwidth_bytes_per_s, state.latency_s
        return min(float(rates[a, b]), float(rates[b, a])), max(float(waits[a, b]), float(waits[b, a]))
    at, apart = np.asarray(workers), _apart(len(workers))
    rates, waits = state.bandwidth_bytes_per_s[at][:, at], state.latency_s[at][:, at]
    return float(rates[apart].min()), float(waits[apart].max())


@cache
def _apart(count: int) -> np.ndarray:
    return ~np.eye(count, dtype=bool)


def runs(
    chain: Chain,
    state: State,
    structure: Structure,
    shares: Sequence[float] | np.ndarray,
    *,
    micro_batch: int,
    schedule_memory: str = "1f1b",
) -> bool:
    """Return whether all workers are there and hold their layers."""
    worker, group, first, stop = stage_spans(structure)
    if not state.available[worker].all():
        return False
    ends = np.searchsorted(group, group, side="right")
    rounds = np.ceil(np.asarray(shares, float) / micro_batch - 1e-9)[group]
    kept = np.minimum(ends - np.arange(len(worker)), rounds) if schedule_memory == "1f1b" else rounds
    need = chain.before_state[stop] - chain.before_state[first]
    need = need + kept * micro_batch * (chain.before_saved[stop] - chain.before_saved[first])
    return bool((need <= chain.memory_bytes[worker]).all())


def boundary_usd(
    chain: Chain,
    state: State,
    spans: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    shares: np.ndarray,
) -> np.ndarray:
    """Return what each worker's activations and their gradients cost to send, shape (W,)."""
    worker, group, first, _ = spans
    sent = np.zeros(chain.num_workers)
    inner = np.flatnonzero(first > 0)
    if len(inner) and state.usd_per_byte.any():
        before, after = worker[inner - 1], worker[inner]
        # Half of the bytes go forward, half come back.
        one_way = 0.5 * chain.boundary_bytes[first[inner] - 1] * shares[group[inner]]
        np.add.at(sent, before, one_way * state.usd_per_byte[before, after])
        np.add.at(sent, after, one_way * state.usd_per_byte[after, before])
    return sent


def sync_usd(chain: Chain, state: State, structure: Structure) -> np.ndarray:
    """Return what each worker's part of the rings costs to send, shape (W,); rings go in order of workers."""
    sent = np.zeros(chain.num_workers)
    groups = structure.groups
    if len(groups) == 1 or not state.usd_per_byte.any():
        return sent
    ends = sorted({cut for one in groups for cut in one.cuts})
    for low, high in pairwise(ends):
        owners = np.sort([
            one.workers[next(k for k, stop in enumerate(one.cuts[1:]) if stop > low)] for one in groups
        ])  # fmt: skip
        size = 2.0 * (len(groups) - 1) / len(groups) * float(chain.sync_bytes[low:high].sum())
        sent[owners] += size * state.usd_per_byte[owners, np.roll(owners, -1)]
    return sent


def _evaluate_stages(
    chain: Chain,
    state: State,
    structure: Structure,
    shares: Sequence[float],
    micro_batch: int,
    schedule_memory: str,
    batch: int,
) -> Choice:
    """Return the choice of `mp_over_dp`: stages of workers that split every micro-batch."""
    stages, at = structure.groups, 0
    rounds = batch / micro_batch
    worker = np.array(structure.workers, dtype=int)
    amounts = np.array(shares, dtype=float)
    periods, syncs, fits = [], [], bool(state.available[worker].all())
    busy, sent = np.zeros(len(worker)), np.zeros(chain.num_workers)
    for k, stage in enumerate(stages):
        here = slice(at, at + len(stage.workers))
        members, (low, high) = np.array(stage.workers), stage.cuts
        seconds = (chain.before_s[members, high] - chain.before_s[members, low]) / state.speed[members]
        passing = seconds * amounts[here]
        hop = stage_hop_s(chain, state, stages[k - 1].workers, stage, micro_batch) if k else 0.0
        periods.append(float(passing.max()) + hop)
        busy[here] = passing * rounds
        kept = rounds if schedule_memory != "1f1b" else min(len(stages) - k, math.ceil(rounds))
        need = chain.before_state[high] - chain.before_state[low]
        saved = kept * amounts[here] * (chain.before_saved[high] - chain.before_saved[low])
        fits &= bool((need + saved <= chain.memory_bytes[members]).all())
        syncs.append(stage_sync_s(chain, state, stage))
        sent += _stage_usd(chain, state, stage, stages[k - 1].workers if k else (), batch)
        at += len(stage.workers)
    slowest = max(periods)
    time_s = sum(periods) + (rounds - 1.0) * slowest + max(syncs) if fits else math.inf
    costs = cost_table(state, worker, busy, sent, time_s)
    return Choice(structure=structure, shares=tuple(shares), time_s=time_s, costs=costs)  # type: ignore[arg-type]


def stage_hop_s(
    chain: Chain, state: State, before: Sequence[int], stage: Pipeline, micro_batch: int
) -> float:
    """Return the seconds in which a micro-batch passes between two stages that split it differently.

    Every worker may have to send to every other, over the slowest link; the narrower side is what binds.
    """
    rate, latency = stage_link(state, before, stage.workers)
    wide = min(len(before), len(stage.workers))
    return 2.0 * latency + micro_batch * float(chain.boundary_bytes[stage.cuts[0] - 1]) / (wide * rate)


def stage_link(state: State, before: Sequence[int], after: Sequence[int]) -> tuple[float, float]:
    """Return the least bandwidth and the greatest latency from a worker of one stage to one of the next."""
    pairs = np.ix_(before, after)
    return float(state.bandwidth_bytes_per_s[pairs].min()), float(state.latency_s[pairs].max())


def stage_sync_s(chain: Chain, state: State, stage: Pipeline) -> float:
    """Return the seconds in which the workers of a stage sum their gradients, in one ring."""
    num, (low, high) = len(stage.workers), stage.cuts
    if num == 1:
        return 0.0
    rate, latency = slowest_link(state, stage.workers)
    size = float(chain.sync_bytes[low:high].sum())
    return 2.0 * (num - 1) * ((high - low) * latency + size / (num * rate))


def _stage_usd(chain: Chain, state: State, stage: Pipeline, before: Sequence[int], batch: int) -> np.ndarray:
    """Return what each worker of two stages sends: activations and gradients, and the ring of the second."""
    sent, low = np.zeros(chain.num_workers), stage.cuts[0]
    if not state.usd_per_byte.any():
        return sent
    if before:
        one_way = 0.5 * batch * float(chain.boundary_bytes[low - 1]) / (len(before) * len(stage.workers))
        sent[list(before)] += one_way * state.usd_per_byte[np.ix_(before, stage.workers)].sum(1)
        sent[list(stage.workers)] += one_way * state.usd_per_byte[np.ix_(stage.workers, before)].sum(1)
    num = len(stage.workers)
    if num > 1:
        ring = np.sort(stage.workers)
        size = 2.0 * (num - 1) / num * float(chain.sync_bytes[low : stage.cuts[1]].sum())
        sent[ring] += size * state.usd_per_byte[ring, np.roll(ring, -1)]
    return sent
