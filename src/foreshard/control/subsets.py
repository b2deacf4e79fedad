"""Data-parallel batches on subsets of the devices: what they take and cost, one by one or all subsets by kind.

Every device in use holds the whole model and takes its share of the batch; gradients are summed in one ring per
layer (docs/simulate.md has the formulas). Devices that are equal in speed, price and place are one kind, so that
subsets are counts by kind: small enough to list, and the list is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foreshard.control.workload import Workload
from foreshard.errors import SpecError

COSTS = ("money", "rent", "egress", "energy")
_MAX_SUBSETS = 2_000_000


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The devices as they are in a slot, or as they are believed to be.

    Attributes
    ----------
    work : Workload
    speed, price : ndarray, shape (devices,)
        Factors of what `work` states.
    link : ndarray, shape (links,)
    available : ndarray of bool, shape (devices,)
    """

    work: Workload
    speed: np.ndarray
    price: np.ndarray
    link: np.ndarray
    available: np.ndarray

    @cached_property
    def sample_s(self) -> np.ndarray:
        """Return seconds per sample of every device, forward and backward through all layers."""
        return np.asarray(self.work.layer_s.sum(1) / self.speed)

    @cached_property
    def usd_per_s(self) -> np.ndarray:
        """Return rent of every device."""
        return np.asarray(self.work.usd_per_h * self.price / 3600.0)

    @cached_property
    def rate(self) -> np.ndarray:
        """Return bytes per second of every pair."""
        if not len(self.link):
            return self.work.bandwidth_bytes_per_s
        factor = np.append(self.link, 1.0)[self.work.link_of]
        return np.asarray(self.work.bandwidth_bytes_per_s * factor)

    @cached_property
    def kinds(self) -> Kinds:
        """Return the available devices by kind."""
        return Kinds.of(self)


def batch_of(moment: Moment, workers: Sequence[int], shares: Sequence[int]) -> tuple[float, np.ndarray]:
    """Return seconds and costs (in the order of `COSTS`) of a batch.

    Parameters
    ----------
    moment : Moment
    workers : sequence of int
    shares : sequence of int
        Samples of each worker, in the same order.
    """
    who = np.asarray(workers)
    busy = np.asarray(shares) * moment.sample_s[who]
    work, count = moment.work, len(who)
    sync_s = hops_usd = 0.0
    if count > 1:
        pairs = np.ix_(who, who)
        sync_s = ring_s(work, count, moment.rate[pairs].min(), work.latency_s[pairs].max())
        order = np.sort(who)
        hops = work.usd_per_byte[order, np.roll(order, -1)].sum()
        hops_usd = hops * 2.0 * (count - 1) / count * work.sync_bytes.sum()
    time_s = float(busy.max() + sync_s)
    rent = float(moment.usd_per_s[who].sum() * time_s)
    energy = float((busy * work.busy_w[who] + (time_s - busy) * work.idle_w[who]).sum())
    return time_s, np.array([rent + hops_usd, rent, hops_usd, energy])


def ring_s(
    work: Workload, count: int | np.ndarray, rate: float | np.ndarray, delay: float | np.ndarray
) -> float:
    """Return seconds of summing all gradients in rings over `count` devices, layer by layer.

    Source
    ------
    Patarasuk and Yuan 2009: 2 (m - 1) steps of 1/m of the bytes; the slowest hop sets the pace.
    """
    steps = 2.0 * (np.asarray(count) - 1.0)
    layers = np.count_nonzero(work.sync_bytes)
    return steps * (work.sync_bytes.sum() / np.maximum(count, 1) / rate + layers * delay)  # type: ignore[return-value]


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


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """Kinds of available devices, and every subset of them as counts.

    Attributes
    ----------
    members : tuple of tuple of int
        Devices of each kind.
    counts : ndarray of int, shape (subsets, kinds)
    time_s : ndarray, shape (subsets,)
        Least seconds of a batch, shares any real numbers.
    costs : ndarray, shape (subsets, 4)
        At these shares, in the order of `COSTS`.
    """

    members: tuple[tuple[int, ...], ...]
    counts: np.ndarray
    time_s: np.ndarray
    costs: np.ndarray

    @staticmethod
    def of(moment: Moment) -> Kinds:
        """Return the kinds of a moment with all their subsets."""
        members = _members(moment)
        shape = [len(one) + 1 for one in members]
        if np.prod(shape, dtype=float) > _MAX_SUBSETS:
            raise SpecError(
                f"{np.prod(shape, dtype=float):.0f} subsets of {len(members)} kinds of devices",
                key="process", rule=f"At most {_MAX_SUBSETS} subsets are listed",
                fix="Let devices change together, or at fewer levels",
            )  # fmt: skip
        counts = np.stack([one.ravel() for one in np.indices(shape)], axis=1)[1:]
        time_s, costs = _priced(moment, members, counts)
        return Kinds(members=members, counts=counts, time_s=time_s, costs=costs)

    def devices(self, subset: int, prefer: Sequence[int] = ()) -> tuple[int, ...]:
        """Return devices of a subset, those in `prefer` first within their kind."""
        liked, found = set(prefer), []
        for count, kind in zip(self.counts[subset], self.members, strict=True):
            found += sorted(kind, key=lambda rank: (rank not in liked, rank))[:count]
        return tuple(sorted(found))


def _members(moment: Moment) -> tuple[tuple[int, ...], ...]:
    """Group the available devices that no subset can tell apart."""
    work, found = moment.work, {}
    places: dict[tuple[bytes, ...], int] = {}
    for rank in np.flatnonzero(moment.available):
        # The place is what a device sees of all others; twins see each other as they see their likes.
        rate, delay, usd = (
            np.delete(matrix[rank], rank) for matrix in (moment.rate, work.latency_s, work.usd_per_byte)
        )
        seen = tuple(np.sort(one).tobytes() for one in (rate, delay, usd))
        place = places.setdefault((*seen, _node_mark(moment, int(rank))), len(places))
        key = (
            place, work.layer_s[rank].tobytes(), float(moment.speed[rank]), float(moment.usd_per_s[rank]),
            float(work.busy_w[rank]), float(work.idle_w[rank]),
        )  # fmt: skip
        found.setdefault(key, []).append(int(rank))
    return tuple(tuple(ranks) for ranks in found.values())


def _node_mark(moment: Moment, rank: int) -> bytes:
    """Return which devices are nearest, where a device has some that are nearer than others."""
    work = moment.work
    rate, delay = moment.rate[rank], work.latency_s[rank]
    others = np.arange(len(rate)) != rank
    if len(np.unique(rate[others])) <= 1 and len(np.unique(delay[others])) <= 1:
        return b""
    near = (rate >= rate[others].max()) | ~others
    return near.tobytes()


def _priced(
    moment: Moment, members: tuple[tuple[int, ...], ...], counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    work = moment.work
    first = np.array([kind[0] for kind in members])
    speed = 1.0 / moment.sample_s[first]
    total = counts.sum(1)
    compute_s = work.batch / (counts @ speed)
    rate, delay, hop_usd = _rings(moment, members, counts)
    sync_s = np.where(total > 1, ring_s(work, total, rate, delay), 0.0)
    time_s = compute_s + sync_s
    rent = counts @ moment.usd_per_s[first] * time_s
    egress = np.where(total > 1, hop_usd * 2.0 * (total - 1) / total * work.sync_bytes.sum(), 0.0)
    busy, idle = counts @ work.busy_w[first], counts @ work.idle_w[first]
    energy = busy * compute_s + idle * sync_s
    return time_s, np.stack([rent + egress, rent, egress, energy], axis=1)


def _rings(
    moment: Moment, members: tuple[tuple[int, ...], ...], counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the slowest rate, the largest latency and the price per byte of the ring of every subset."""
    work, size = moment.work, len(members)
    rate, delay = np.full(len(counts), np.inf), np.zeros(len(counts))
    for i in range(size):
        for j in range(i, size):
            if i == j and len(members[i]) < 2:
                continue
            u, v = members[i][0], members[j][1] if i == j else members[j][0]
            both = counts[:, i] > 1 if i == j else (counts[:, i] > 0) & (counts[:, j] > 0)
            rate[both] = np.minimum(rate[both], moment.rate[u, v])
            delay[both] = np.maximum(delay[both], work.latency_s[u, v])
    return rate, delay, _hop_usd(work, members, counts)


def _hop_usd(work: Workload, members: tuple[tuple[int, ...], ...], counts: np.ndarray) -> np.ndarray:
    """Return the sum of prices along the ring in rank order; free hops inside a site make it a ring of sites."""
    if not work.usd_per_byte.any():
        return np.zeros(len(counts))
    sites: dict[bytes, list[int]] = {}
    for i, kind in enumerate(members):
        free = work.usd_per_byte[kind[0]] == 0.0
        sites.setdefault(free.tobytes(), []).append(i)
    parts = sorted(sites.values(), key=lambda kinds: min(members[i][0] for i in kinds))
    present = np.stack([(counts[:, kinds] > 0).any(1) for kinds in parts], axis=1)
    head = [members[kinds[0]][0] for kinds in parts]
    out = np.zeros(len(counts))
    for row in np.unique(present, axis=0):
        here = [head[i] for i in np.flatnonzero(row)]
        usd = sum(work.usd_per_byte[u, v] for u, v in zip(here, [*here[1:], *here[:1]], strict=True))
        out[(present == row).all(1)] = usd
    return out
