"""Where policies meet a path: states, subsets of devices, prices of batches and changes, each once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from foreshard.control.slots import State, Structure, evaluate
from foreshard.control.subsets import COSTS, Kinds, data_parallel, sample_s
from foreshard.control.workload import Workload
from foreshard.sim.dynamics import Path


@dataclass(frozen=True, kw_only=True, eq=False)
class Arena:
    """A path with the prices of everything on it.

    Attributes
    ----------
    work : Workload
    path : Path
    pause_s : float
        Of a change of structure, besides the bytes that move.
    """

    work: Workload
    path: Path
    pause_s: float
    _memo: dict[tuple[object, ...], object] = field(default_factory=dict, repr=False)

    def state(self, condition: int, pattern: int) -> State:
        """Return the devices as they are in a condition and a pattern."""
        key = ("state", condition, pattern)
        if key not in self._memo:
            path = self.path
            self._memo[key] = self.work.at(
                speed=path.speed[condition], price=path.price[condition], link=path.link[condition],
                available=path.available[pattern],
            )  # fmt: skip
        return self._memo[key]  # type: ignore[return-value]

    def kinds(self, condition: int, pattern: int) -> Kinds:
        """Return every subset of the devices of a state, with least time and costs."""
        key = ("kinds", condition, pattern)
        if key not in self._memo:
            self._memo[key] = Kinds.of(self.work.chain, self.state(condition, pattern), self.work.batch)
        return self._memo[key]  # type: ignore[return-value]

    def sample_s(self, condition: int) -> np.ndarray:
        """Return seconds per sample of every device in a condition."""
        key = ("sample_s", condition)
        if key not in self._memo:
            self._memo[key] = self.work.chain.before_s[:, -1] / self.path.speed[condition]
        return self._memo[key]  # type: ignore[return-value]

    def structure(self, workers: tuple[int, ...]) -> Structure:
        """Return the structure in which these devices hold the whole model each."""
        key = ("structure", workers)
        if key not in self._memo:
            self._memo[key] = data_parallel(workers, self.work.chain)
        return self._memo[key]  # type: ignore[return-value]

    def batch(
        self, structure: Structure, shares: tuple[int, ...], condition: int, pattern: int
    ) -> tuple[float, Mapping[str, float]]:
        """Return seconds and costs of a batch."""
        key = ("batch", structure, shares, condition, pattern)
        if key not in self._memo:
            self._memo[key] = self.price(self.state(condition, pattern), structure, shares)
        return self._memo[key]  # type: ignore[return-value]

    def price(
        self, state: State, structure: Structure, shares: tuple[int, ...]
    ) -> tuple[float, Mapping[str, float]]:
        """Return seconds and costs of a batch in any state."""
        found = evaluate(self.work.chain, state, structure, shares, micro_batch=self.work.micro_batch)
        return found.time_s, {name: found.costs[name] for name in COSTS}

    def change(
        self, old: Structure, new: Structure, condition: int, pattern: int
    ) -> tuple[float, Mapping[str, float]]:
        """Return seconds and costs of a change: a pause, then layers to whoever lacks them.

        Every newcomer is sent what it lacks by the nearest device that was in use, all at the same time; when
        none of those is left, over its fastest link. Devices in use wait, and are paid.
        """
        key = ("change", old, new, condition, pattern)
        if key not in self._memo:
            self._memo[key] = self._change(old, new, self.state(condition, pattern))
        return self._memo[key]  # type: ignore[return-value]

    def _change(self, old: Structure, new: Structure, state: State) -> tuple[float, Mapping[str, float]]:
        chain = self.work.chain
        held = {w: cuts for group in old.groups for w, cuts in _spans(group.workers, group.cuts)}
        left = [worker for worker in held if state.available[worker]]
        slowest_s = egress = 0.0
        for group in new.groups:
            for worker, (first, stop) in _spans(group.workers, group.cuts):
                have = held.get(worker, (0, 0)) if state.available[worker] else (0, 0)
                common = (max(first, have[0]), min(stop, have[1]))
                lacks = chain.before_state[stop] - chain.before_state[first]
                if common[1] > common[0]:
                    lacks -= chain.before_state[common[1]] - chain.before_state[common[0]]
                if lacks <= 0.0:
                    continue
                sources = [one for one in left if one != worker]
                sources = sources or [one for one in range(len(state.speed)) if one != worker]
                rates = state.bandwidth_bytes_per_s[sources, worker] if sources else np.array([np.inf])
                source = sources[int(np.argmax(rates))] if sources else worker
                slowest_s = max(slowest_s, lacks / float(rates.max()))
                egress += lacks * float(state.usd_per_byte[source, worker]) if left else 0.0
        time_s = self.pause_s + slowest_s
        who = list(new.workers)
        rent = float(state.usd_per_h[who].sum()) / 3600.0 * time_s
        joule = float(state.idle_w[who].sum()) * time_s
        return time_s, {"usd": rent + egress, "rent_usd": rent, "egress_usd": egress, "joule": joule}

    def mean_state(self) -> State:
        """Return the devices at their mean speeds, prices and rates, all of them that are ever there."""
        path = self.path
        weight = np.bincount(path.condition, minlength=len(path.speed)) / path.num_slots
        return self.work.at(
            speed=1.0 / (weight @ (1.0 / path.speed)), price=weight @ path.price, link=weight @ path.link,
            available=np.asarray(path.available.any(0)),
        )  # fmt: skip

    def mean_sample_s(self) -> np.ndarray:
        """Return seconds per sample of every device in the mean of the path."""
        return sample_s(self.work.chain, self.mean_state())


def _spans(workers: tuple[int, ...], cuts: tuple[int, ...]) -> list[tuple[int, tuple[int, int]]]:
    return [(worker, (cuts[k], cuts[k + 1])) for k, worker in enumerate(workers)]
