"""The slot loop: a policy decides, the cluster is as it is, time and costs are counted.

A decision knows which devices are there; of speeds, prices and link rates it knows those of the slot before,
unless the scenario lets it see the present. Changing groups or layers takes a pause and the bytes that move;
changing shares alone is free and is counted apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from foreshard.sim.dynamics import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a decision may use: the condition that was last seen and the pattern of devices that are there."""

    slot: int
    condition: int
    pattern: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """What a slot took: all in all, and the costs by kind."""

    slot: int
    condition: int
    pattern: int
    time_s: float
    costs: Mapping[str, float]


class Rule(Protocol):
    """A policy in the simulator."""

    def decide(self, seen: Seen) -> tuple[Any, tuple[int, ...]]:
        """Return a structure and its shares for this slot."""
        ...

    def learn(self, happened: Happened) -> None:
        """Take in what the slot took and cost."""
        ...


class Judge(Protocol):
    """What a decision takes and costs in truth."""

    def batch(
        self, structure: Any, shares: tuple[int, ...], condition: int, pattern: int
    ) -> tuple[float, Mapping[str, float]]:
        """Return seconds and costs of a batch."""
        ...

    def change(self, old: Any, new: Any, condition: int, pattern: int) -> tuple[float, Mapping[str, float]]:
        """Return seconds and costs of a change of structure."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One policy on one path.

    Attributes
    ----------
    time_s : ndarray, shape (slots,)
        Of each batch with the change before it.
    change_s : ndarray, shape (slots,)
        Of the changes alone.
    costs : mapping of kind to ndarray, shape (slots,)
    reconfigurations, reshares : int
        Changes of structure; of shares alone. The first plan counts as neither.
    changed : ndarray of bool, shape (slots,)
        Where the structure changed.
    forced : int
        Reconfigurations because a device in use was taken away.
    used : ndarray of int, shape (slots,)
        Devices in use.
    """

    time_s: np.ndarray
    change_s: np.ndarray
    costs: Mapping[str, np.ndarray]
    reconfigurations: int
    reshares: int
    forced: int
    changed: np.ndarray
    used: np.ndarray


def play(rule: Rule, judge: Judge, path: Path, *, kinds: tuple[str, ...], sees_now: bool) -> Run:
    """Return how a policy fares on a path.

    Parameters
    ----------
    rule : Rule
    judge : Judge
    path : Path
    kinds : tuple of str
        Kinds of cost to count.
    sees_now : bool
        Whether decisions know the condition of their own slot. At the first slot they do.
    """
    slots = path.num_slots
    time_s, change_s = np.zeros(slots), np.zeros(slots)
    spent, used = np.zeros((slots, len(kinds))), np.zeros(slots, dtype=int)
    changed = np.zeros(slots, dtype=bool)
    reshares = forced = 0
    old: Any = None
    before: tuple[int, ...] = ()
    for t in range(slots):
        now, pattern = int(path.condition[t]), int(path.pattern[t])
        known = now if sees_now else int(path.condition[max(t - 1, 0)])
        structure, shares = rule.decide(Seen(slot=t, condition=known, pattern=pattern))
        took_s, costs = judge.batch(structure, shares, now, pattern)
        total = dict(costs)
        if old is not None and structure != old:
            change_s[t], more = judge.change(old, structure, now, pattern)
            total = {kind: total[kind] + more[kind] for kind in kinds}
            changed[t] = True
            forced += not path.available[pattern, list(old.workers)].all()
        elif old is not None and shares != before:
            reshares += 1
        old, before = structure, shares
        time_s[t] = took_s + change_s[t]
        spent[t] = [total[kind] for kind in kinds]
        used[t] = len(structure.workers)
        rule.learn(
            Happened(slot=t, condition=now, pattern=pattern, time_s=float(time_s[t]), costs=total)
        )
    return Run(
        time_s=time_s, change_s=change_s, costs={kind: spent[:, i] for i, kind in enumerate(kinds)},
        reconfigurations=int(changed.sum()), reshares=reshares, forced=forced, changed=changed, used=used,
    )  # fmt: skip
