"""The slot loop: a policy decides, the cluster is as it is, time and costs are counted.

A decision knows which devices are there; of speeds, prices and link rates it knows those of the batch before,
unless the scenario lets it see the present. Changing groups or layers takes a pause and the bytes that move;
changing shares alone is free and is counted apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from foreshard.simulate.environment import Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a decision may use: the condition that was last seen and the pattern of devices that are there."""

    condition: int
    pattern: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOutcome:
    """What some batches in a row took and cost: the mean of them, with the change before the first."""

    condition: int
    pattern: int
    # batches, of: how many, and how many the slot has
    batches: int
    of: int
    time_s: float
    costs: Mapping[str, float]  # by kind


class Rule(Protocol):
    """A policy in the simulator."""

    def decide(self, seen: Observation) -> tuple[Any, tuple[int, ...]]:
        """Return a structure and its shares for the next batches."""
        ...

    def learn(self, happened: SlotOutcome) -> None:
        """Take in what the batches took and cost."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One policy on one path."""

    time_s: np.ndarray  # shape (slots,); of each batch with the change before it
    change_s: np.ndarray  # shape (slots,); of the changes alone
    costs: Mapping[str, np.ndarray]  # shape (slots,), by kind
    # reconfigurations, reshares: changes of structure; of shares alone. The first plan counts as neither
    reconfigurations: int
    reshares: int
    forced: int  # reconfigurations because a device in use was taken away
    used: np.ndarray  # int, shape (slots,); devices in use


def play(rule: Rule, environment: Environment, *, sees_now: bool, batches: int = 1) -> Run:
    """Return how a policy fares on the path of an environment.

    Parameters
    ----------
    rule : Rule
    environment : Environment
    sees_now : bool
        Whether decisions know the condition of their own slot. At the first slot they do.
    batches : int
        Of a slot. After each of the first two batches of the first slot, and of a slot that differs from the
        one before, the policy decides again.
    """
    path, game = environment.path, _Game(rule, environment)
    for t in range(path.num_slots):
        now = int(path.condition[t])
        known = now if sees_now else int(path.condition[max(t - 1, 0)])
        before = max(t - 1, 0)
        changed = t == 0 or now != path.condition[before] or path.pattern[t] != path.pattern[before]
        left = batches
        while left:
            fresh = changed and left > batches - 2
            game.act(t, known, 1 if fresh else left, batches)
            left -= 1 if fresh else left
            known = now
    return game.run()


class _Game:
    """The books of one policy on one path; times and costs of a slot are means over its batches."""

    def __init__(self, rule: Rule, environment: Environment):
        self.rule, self.environment, self.path = rule, environment, environment.path
        self.kinds, slots = environment.cost_kinds, environment.path.num_slots
        self.time_s, self.change_s = np.zeros(slots), np.zeros(slots)
        self.spent, self.used = np.zeros((slots, len(self.kinds))), np.zeros(slots, dtype=int)
        self.changes = self.reshares = self.forced = 0
        self.old: Any = None
        self.shares: tuple[int, ...] = ()

    def act(self, t: int, known: int, batches: int, of: int) -> None:
        """Let the policy decide, count some batches of a slot, and tell it what they took."""
        now, pattern = int(self.path.condition[t]), int(self.path.pattern[t])
        structure, shares = self.rule.decide(Observation(condition=known, pattern=pattern))
        took_s, batch_costs = self.environment.batch(structure, shares, now, pattern)
        spent = np.array([batch_costs[kind] for kind in self.kinds])
        if self.old is not None and structure != self.old:
            pause_s, more = self.environment.change(self.old, structure, now, pattern)
            self.change_s[t] += pause_s / of
            took_s += pause_s / batches
            spent += np.array([more.get(kind, 0.0) for kind in self.kinds]) / batches
            self.changes += 1
            self.forced += not self.path.available[pattern, list(self.old.workers)].all()
        elif self.old is not None and shares != self.shares:
            self.reshares += 1
        self.old, self.shares = structure, shares
        self.used[t] = len(structure.workers)
        self.time_s[t] += took_s * (batches / of)
        self.spent[t] += spent * (batches / of)
        self.rule.learn(
            SlotOutcome(
                condition=now,
                pattern=pattern,
                batches=batches,
                of=of,
                time_s=took_s,
                costs=dict(zip(self.kinds, spent.tolist(), strict=True)),
            )
        )

    def run(self) -> Run:
        """Return the books."""
        return Run(
            time_s=self.time_s,
            change_s=self.change_s,
            costs={kind: self.spent[:, i] for i, kind in enumerate(self.kinds)},
            reconfigurations=self.changes,
            reshares=self.reshares,
            forced=self.forced,
            used=self.used,
        )
