"""Where policies meet a path: states, subsets of devices, prices of batches and changes, each once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from foreshard.control.moves import move, move_costs
from foreshard.control.search.pricing import evaluate
from foreshard.control.search.subsets import (
    COSTS,
    SubsetClasses,
    data_parallel,
    holds_replica,
    replica_holders,
    sample_s,
)
from foreshard.control.slots import State, Structure
from foreshard.simulate.dynamics import Path
from foreshard.simulate.workload import Workload

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Environment:
    """A path with the prices of everything on it."""

    work: Workload
    path: Path
    pause_s: float  # of a change of structure, besides the bytes that move
    apart: frozenset[int] = frozenset()  # devices that budgets count one by one
    _memo: dict[tuple[object, ...], object] = field(default_factory=dict, repr=False)

    def _once(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """Return what is made for a key, which is made once."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]  # type: ignore[return-value]

    @property
    def cost_kinds(self) -> tuple[str, ...]:
        """Return the kinds of cost that are counted."""
        return (*COSTS, *(f"duty:{rank}" for rank in sorted(self.apart)))

    def state(self, condition: int, pattern: int) -> State:
        """Return the devices as they are in a condition and a pattern."""
        path = self.path
        return self._once(
            ("state", condition, pattern),
            lambda: self.work.at(
                speed=path.speed[condition],
                price=path.price[condition],
                link=path.link[condition],
                carbon=path.carbon[condition],
                available=path.available[pattern],
            ),
        )

    def replicas(self, pattern: int) -> np.ndarray:
        """Return which devices of a pattern hold the whole model, shape (devices,).

        Raises
        ------
        InfeasibleError
            When none does.
        """
        available = self.path.available[pattern]
        return replica_holders(self.work.chain, available, micro_batch=self.work.micro_batch)

    @property
    def holds(self) -> np.ndarray:
        """Return which devices hold the whole model, shape (devices,)."""
        return holds_replica(self.work.chain, micro_batch=self.work.micro_batch)

    def subsets(self, condition: int, pattern: int) -> SubsetClasses:
        """Return every subset of the devices of a state, with least time and costs."""
        work, state = self.work, self.state(condition, pattern)
        return self._once(
            ("subsets", condition, pattern),
            lambda: SubsetClasses.of(
                work.chain, state, work.batch, micro_batch=work.micro_batch, apart=self.apart
            ),
        )

    def sample_s(self, condition: int) -> np.ndarray:
        """Return seconds per sample of every device in a condition."""
        chain, speed = self.work.chain, self.path.speed
        return self._once(("sample_s", condition), lambda: chain.before_s[:, -1] / speed[condition])

    def structure(self, workers: tuple[int, ...]) -> Structure:
        """Return the structure in which these devices hold the whole model each."""
        return self._once(("structure", workers), lambda: data_parallel(workers, self.work.chain))

    def batch(
        self, structure: Structure, shares: tuple[int, ...], condition: int, pattern: int
    ) -> tuple[float, Mapping[str, float]]:
        """Return seconds and costs of a batch."""
        return self._once(
            ("batch", structure, shares, condition, pattern),
            lambda: self.price(self.state(condition, pattern), structure, shares),
        )

    def price(
        self, state: State, structure: Structure, shares: tuple[int, ...]
    ) -> tuple[float, Mapping[str, float]]:
        """Return seconds and costs of a batch in any state."""
        work = self.work
        found = evaluate(work.chain, state, structure, shares, micro_batch=work.micro_batch, batch=work.batch)
        return found.time_s, found.costs

    def change(
        self, old: Structure, new: Structure, condition: int, pattern: int
    ) -> tuple[float, Mapping[str, float]]:
        """Return seconds and costs of a change: a pause, and the layers that move (`moves.py`)."""

        def made() -> tuple[float, Mapping[str, float]]:
            state = self.state(condition, pattern)
            done = move(self.work.chain, state, old, new)
            return self.pause_s + done.time_s, move_costs(state, new, done, pause_s=self.pause_s)

        return self._once(("change", old, new, condition, pattern), made)

    def mean_state(self) -> State:
        """Return the devices at their mean speeds, prices and rates, all of them that are ever there."""
        path = self.path
        weight = np.bincount(path.condition, minlength=len(path.speed)) / path.num_slots
        return self.work.at(
            speed=1.0 / (weight @ (1.0 / path.speed)),
            price=weight @ path.price,
            link=weight @ path.link,
            carbon=weight @ path.carbon,
            available=np.asarray(path.available.any(0)),
        )

    def mean_sample_s(self) -> np.ndarray:
        """Return seconds per sample of every device in the mean of the path."""
        return sample_s(self.work.chain, self.mean_state())
