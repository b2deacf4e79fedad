"""Data-parallel batches on subsets of the devices: what they take and cost, all subsets by kind.

Every device in use holds the whole model and takes its share of the batch; gradients are summed in one ring
per layer (docs/simulate.md has the formulas). Devices that are equal in speed, price and place are one kind,
so that subsets are counts by kind: small enough to list, and the list is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.control.search.costs import ring_s
from foreshard.control.search.device_classes import device_classes
from foreshard.control.slots import Budget, Chain, State, Structure, WorkerPipeline, link_kinds
from foreshard.errors import InfeasibleError, SpecError

COSTS = ("usd", "rent_usd", "egress_usd", "joule", "carbon_kg")
"""Columns of :attr:`SubsetClasses.costs`."""
_MAX_SUBSETS = 200_000
"""Subsets that are listed at most: tens of megabytes and a tenth of a second."""


class TooManyError(SpecError):
    """More subsets than can be listed."""


def data_parallel(workers: Sequence[int], chain: Chain) -> Structure:
    """Return the structure in which each of these devices holds the whole model."""
    cuts = (0, chain.num_layers)
    return Structure(groups=tuple(WorkerPipeline(workers=(worker,), cuts=cuts) for worker in workers))


def sample_s(chain: Chain, state: State) -> np.ndarray:
    """Return seconds per sample of every device, through all layers."""
    return np.asarray(chain.before_s[:, -1] / state.speed)


def even_shares(count: int, batch: int) -> np.ndarray:
    """Return equal shares, the first one sample larger where they do not divide."""
    return np.full(count, batch // count) + (np.arange(count) < batch % count)


def balanced_shares(sample_s: np.ndarray, batch: int) -> np.ndarray:
    """Return whole samples by device so that the last one ends first: the least possible makespan.

    The real-valued optimum, rounded down, then one sample at a time to whoever ends first with it; exact for
    equal jobs on uniform machines because rounding down never gives a machine more than the optimum does.
    """
    rate = 1.0 / sample_s
    shares = np.floor(batch * rate / rate.sum() * (1.0 - 1e-12)).astype(int)
    for _ in range(batch - int(shares.sum())):
        shares[np.argmin((shares + 1) * sample_s)] += 1
    return shares


def counts_of(members: Sequence[int], most: int = _MAX_SUBSETS) -> np.ndarray:
    """Return all subsets but the empty one as counts by kind, shape (subsets, kinds).

    Raises
    ------
    TooManyError
        For more than `most`.
    """
    shape = [count + 1 for count in members]
    number = float(np.prod(shape, dtype=float))
    if number > most:
        raise TooManyError(
            f"{number:.3g} subsets of {len(members)} kinds of devices",
            key="process",
            rule=f"At most {most} subsets are listed",
            fix="Let devices change together, or at fewer levels",
        )
    return np.stack([count.ravel() for count in np.indices(shape)], axis=1)[1:]


@dataclass(frozen=True, kw_only=True)
class SubsetClasses:
    """Kinds of available devices, and every subset of them as counts.

    Attributes
    ----------
    members : tuple of tuple of int
        Devices of each kind.
    counts : ndarray of int, shape (subsets, kinds)
    time_s : ndarray, shape (subsets,)
        Least seconds of a batch, shares any real numbers.
    busy_s : ndarray, shape (subsets,)
        Seconds that each device in use computes.
    costs : ndarray, shape (subsets, 5)
        At these shares, in the order of `COSTS`.
    floor : ndarray, shape (subsets, 5)
        No more than at any shares: energy falls further when efficient devices get more samples.
    """

    members: tuple[tuple[int, ...], ...]
    counts: np.ndarray
    time_s: np.ndarray
    busy_s: np.ndarray
    costs: np.ndarray
    floor: np.ndarray

    @staticmethod
    def of(
        chain: Chain,
        state: State,
        batch: int,
        *,
        micro_batch: int = 1,
        apart: frozenset[int] = frozenset(),
        most: int = _MAX_SUBSETS,
    ) -> SubsetClasses:
        """Return the kinds of a state with all their subsets that fit in memory; some devices apart.

        Raises
        ------
        InfeasibleError
            When no device that is there holds the model.
        TooManyError
            For more than `most` subsets.
        """
        members = _members(chain, state, micro_batch, apart)
        counts = counts_of([len(kind) for kind in members], most)
        return _priced(chain, state, batch, members, counts)

    def column(self, budgets: Sequence[Budget], *, floor: bool = False) -> np.ndarray:
        """Return what every subset costs of some budgets, shape (subsets, budgets); or the least of it."""
        found = np.zeros((len(self.time_s), len(budgets)))
        for i, budget in enumerate(budgets):
            if budget.worker is None:
                found[:, i] = (self.floor if floor else self.costs)[:, COSTS.index(budget.kind)]
            elif not floor:
                found[:, i] = self._of_worker(budget)
        return found

    def over(self, budgets: Sequence[Budget], saved: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return by what part of an allowance a batch is above it and the savings, shape (subsets,).

        The largest of the budgets, minus infinity where there are none; `saved` is of each, in its unit.
        """
        found, costs = np.full(len(self.time_s), -np.inf), self.column(budgets)
        for i, (budget, spare) in enumerate(zip(budgets, saved, strict=True)):
            allowed = budget.allowance(1.0) * (1.0 if budget.per == "step" else self.time_s)
            found = np.maximum(found, (costs[:, i] - spare) / allowed - 1.0)
        return found

    def _of_worker(self, budget: Budget) -> np.ndarray:
        """Return the busy seconds of one device, which is a kind of its own."""
        if budget.kind != "duty":
            raise SpecError(
                f"a budget of {budget.kind} of one device",
                key="kind",
                value=budget.kind,
                rule="Data-parallel plans count duty by device, all else of all",
                fix="Leave out the device",
            )
        for i, kind in enumerate(self.members):
            if budget.worker in kind:
                return np.where(self.counts[:, i] > 0, self.busy_s, 0.0)
        return np.zeros(len(self.time_s))

    def devices(self, subset: int, prefer: Sequence[int] = ()) -> tuple[int, ...]:
        """Return devices of a subset, those in `prefer` first within their kind."""
        liked, found = set(prefer), []
        for count, kind in zip(self.counts[subset], self.members, strict=True):
            found += sorted(kind, key=lambda rank: (rank not in liked, rank))[:count]
        return tuple(sorted(found))

    def subset(self, workers: Sequence[int]) -> int | None:
        """Return the subset that these devices are; None when one is not there, or there are none."""
        place = {rank: i for i, kind in enumerate(self.members) for rank in kind}
        counts = np.zeros(len(self.members), dtype=int)
        for rank in workers:
            if rank not in place:
                return None
            counts[place[rank]] += 1
        shape = [len(kind) + 1 for kind in self.members]
        return int(np.ravel_multi_index(tuple(counts), shape)) - 1 if len(workers) else None


def holds_replica(chain: Chain, *, micro_batch: int = 1) -> np.ndarray:
    """Return which devices have room for the whole model, shape (devices,)."""
    needed_bytes = chain.before_state[-1] + micro_batch * chain.before_saved[-1]
    return np.asarray(needed_bytes <= chain.memory_bytes)


def replica_holders(chain: Chain, available: np.ndarray, *, micro_batch: int = 1) -> np.ndarray:
    """Return which of the devices that are there hold the whole model, shape (devices,).

    Raises
    ------
    InfeasibleError
        When none does.
    """
    holders = available & holds_replica(chain, micro_batch=micro_batch)
    if not holders.any():
        raise InfeasibleError(
            "no device that is there holds the model",
            key="model",
            rule="Each device of a subset holds a whole replica",
            fix="Name a smaller model",
        )
    return holders


def _members(
    chain: Chain, state: State, micro_batch: int, apart: frozenset[int]
) -> tuple[tuple[int, ...], ...]:
    """Group the available devices that hold the model and that no subset can tell apart."""
    there = np.flatnonzero(replica_holders(chain, state.available, micro_batch=micro_batch))
    # Devices that could change places; bytes between those of a class are counted as free.
    places = link_kinds(state)
    paid = (state.usd_per_byte > 0.0) & (np.array(places)[:, None] == places)
    alone = apart.union(np.flatnonzero(paid.any(1)).tolist())
    classes = device_classes(chain, state, alone, places, by_memory=False)
    found: dict[int, list[int]] = {}
    for rank in there.tolist():
        found.setdefault(classes[rank], []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def _priced(
    chain: Chain, state: State, batch: int, members: tuple[tuple[int, ...], ...], counts: np.ndarray
) -> SubsetClasses:
    first = np.array([kind[0] for kind in members])
    total = counts.sum(1)
    each_s = sample_s(chain, state)[first]
    compute_s = batch / (counts @ (1.0 / each_s))
    rate, delay = _rings(state, members, counts)
    size = chain.sync_bytes.sum()
    sync_s = ring_s(total, chain.num_layers, size, rate, delay)
    time_s = compute_s + sync_s
    rent = counts @ (state.usd_per_h[first] / 3600.0) * time_s
    egress = _hop_usd(state, members, counts) * 2.0 * (total - 1.0) / total * size
    used = counts.T > 0
    costs, floor = [rent + egress, rent, egress], [rent + egress, rent, egress]
    for scale in (np.ones(len(first)), state.kg_per_j[first]):
        busy, idle = counts @ (scale * state.busy_w[first]), counts @ (scale * state.idle_w[first])
        more = scale * (state.busy_w - state.idle_w)[first] * each_s
        costs.append(busy * compute_s + idle * sync_s)
        floor.append(idle * time_s + np.where(used, more[:, None], np.inf).min(0) * batch)
    return SubsetClasses(
        members=members,
        counts=counts,
        time_s=time_s,
        busy_s=compute_s,
        costs=np.stack(costs, axis=1),
        floor=np.stack(floor, axis=1),
    )


def _rings(
    state: State, members: tuple[tuple[int, ...], ...], counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the slowest rate and the largest latency between two devices of every subset."""
    rate, delay = np.full(len(counts), np.inf), np.zeros(len(counts))
    some, several = np.ascontiguousarray(counts.T > 0), np.ascontiguousarray(counts.T > 1)
    for i, kind in enumerate(members):
        for j in range(i, len(members)):
            if i == j and len(kind) < 2:
                continue
            u, v = kind[0], kind[1] if i == j else members[j][0]
            both = several[i] if i == j else some[i] & some[j]
            np.minimum(rate, state.bandwidth_bytes_per_s[u, v], out=rate, where=both)
            np.maximum(delay, state.latency_s[u, v], out=delay, where=both)
    return rate, delay


def _hop_usd(state: State, members: tuple[tuple[int, ...], ...], counts: np.ndarray) -> np.ndarray:
    """Return the prices per byte along the ring in rank order: sites in turn, hops inside free."""
    out = np.zeros(len(counts))
    if not state.usd_per_byte.any():
        return out
    sites: dict[bytes, list[int]] = {}
    for i, kind in enumerate(members):
        sites.setdefault((state.usd_per_byte[kind[0]] == 0.0).tobytes(), []).append(i)
    parts = sorted(sites.values(), key=lambda kinds: min(members[i][0] for i in kinds))
    some = counts.T > 0
    present = [np.logical_or.reduce(some[kinds]) for kinds in parts]
    head = [members[kinds[0]][0] for kinds in parts]
    codes = sum(is_present.astype(np.int64) << i for i, is_present in enumerate(present))
    for code in np.unique(codes).tolist():
        here = [device for i, device in enumerate(head) if code >> i & 1]
        usd = sum(float(state.usd_per_byte[u, v]) for u, v in zip(here, [*here[1:], *here[:1]], strict=True))
        out[codes == code] = usd
    return out
