"""The facts that a controller receives and the commands that it returns; nothing else passes between them.

The same records pass between the controller and the simulator and between the controller and the runtime,
one JSON object a line in the event log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foreshard.spec.plan import Plan

RUN_POLICIES = ("static", "lyapunov", "lb-bsp", "greedy")
"""What `run --policy` and simulated labs take: no policy, the controller, and `control.policies`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasured:
    """A step ended, or several in a row that were alike."""

    step: int  # the last one
    time_s: float  # of the step, as the slowest rank saw it; of several the mean, as all else here
    # mapping of rank to float: nominal seconds over measured seconds of a rank's own forward and backward
    # passes; ranks that did nothing are absent
    relative_speed: Mapping[int, float] = field(default_factory=dict)
    # mapping of (source, target) to (bytes, seconds): the mean transfer seen between two ranks in the step
    link_s: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    # mapping of budget name to cost: what the step cost of every budget, measured: dollars, joules, bytes
    costs: Mapping[str, float] = field(default_factory=dict)
    steps: int = 1  # how many


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSeen:
    """A rank is there, for the first time or again; its relative speed if something is known of it."""

    step: int
    rank: int
    relative_speed: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLost:
    """A rank died or was taken away."""

    step: int
    rank: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceChanged:
    """A rank costs another price from this step on."""

    step: int
    rank: int
    usd_per_h: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CarbonChanged:
    """The electricity of a rank causes other carbon from this step on."""

    step: int
    rank: int
    kg_per_kwh: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSeen:
    """A probe found how fast a link is."""

    step: int
    source: int
    target: int
    bytes_per_s: float


Fact = StepMeasured | DeviceSeen | RankLost | PriceChanged | CarbonChanged | LinkSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Facts that came at the same time: one decision follows from all of them."""

    step: int
    events: tuple[Fact, ...]


Event = Fact | Together


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to do at the next step boundary."""

    # the largest change that the plan makes: size of buckets, algorithm of sums, shares, layers, groups or
    # order, ranks left out, ranks taken in (keep, re-bucket, re-route, re-share, re-cut, regroup, idle,
    # activate)
    kind: str
    plan: Plan | None = None  # the plan of the next step; None for 'keep'
    reason: str = ""  # one line for the operator's log


class Policy(Protocol):
    """Whatever decides on plans: a controller or a rule to compare it with."""

    def on(self, event: Event) -> Sequence[Command]:
        """Take a fact in; return what to do about it, oldest first."""
        ...
