"""What varies from rank to rank and from step to step: jitter, slow ranks, slow links; and what it does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from foreshard.errors import SpecError
from foreshard.spec.codec import invalid, one_of, whole

TAILS = ("lognormal", "pareto")
MAX_JITTER = 1.0
MAX_FACTOR = 1000.0
MAX_STEPS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How the ranks of a run differ.

    Attributes
    ----------
    jitter : float
        Standard deviation of the seconds that a pass of a micro-batch computes on a rank, over their mean:
        every pass on every rank is drawn by itself.
    jitter_tail : {'lognormal', 'pareto'}
        Of these seconds: 'pareto' has rare passes that take many times as long.
    slow : mapping of rank to factor
        Ranks that compute that many times as long.
    slow_link : mapping of rank to factor
        Ranks whose links and NIC carry that many times less.
    seeds : int
        Steps that are drawn.
    seed : int
        Of the first; the same seed gives the same numbers.
    """

    jitter: float = 0.0
    jitter_tail: str = "lognormal"
    slow: Mapping[int, float] = field(default_factory=dict)
    slow_link: Mapping[int, float] = field(default_factory=dict)
    seeds: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        if not _is_number(self.jitter) or not 0.0 <= self.jitter <= MAX_JITTER:
            rule = f"Is a part of the mean, from 0 to {MAX_JITTER:g}"
            raise invalid(self.jitter, rule, key="--jitter", name="jitter", fix="Write it like 3%")
        one_of(self.jitter_tail, TAILS, key="--jitter-tail", name="jitter-tail")
        whole(self.seeds, 1, MAX_STEPS, key="--seeds", name="seeds")
        whole(self.seed, 0, 2**63 - 1, key="--seed", name="seed")
        for flag, factors in (("--slow", self.slow), ("--slow-link", self.slow_link)):
            for rank, factor in factors.items():
                whole(rank, 0, key=flag, name="rank")
                if not _is_number(factor) or not 1.0 <= factor <= MAX_FACTOR:
                    rule = f"A factor is from 1 to {MAX_FACTOR:g}: how many times as slow"
                    raise invalid(factor, rule, key=flag, name=flag.strip("-"), fix="Write it like 12=1.5")

    def check_ranks(self, ranks: Collection[int]) -> None:
        """Refuse ranks that are not among those of the plan.

        Raises
        ------
        SpecError
        """
        for flag, factors in (("--slow", self.slow), ("--slow-link", self.slow_link)):
            for rank in factors:
                if rank not in ranks:
                    rule = f"The plan has ranks {min(ranks)} to {max(ranks)}"
                    raise SpecError(f"rank {rank} is not in the plan", key=flag, value=rank, rule=rule)

    def without_slow_ranks(self) -> Noise:
        """Return the jitter alone, of the same draws."""
        return Noise(jitter=self.jitter, jitter_tail=self.jitter_tail, seeds=self.seeds, seed=self.seed)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDistribution:
    """Seconds of a step of which the ranks differ, the slowest of them waited for.

    Attributes
    ----------
    mean_s, p50_s, p90_s, p99_s : float
        Over the steps drawn; the mean is the expected maximum over the ranks.
    alike_s : float
        Of the same step with all ranks and links alike.
    jitter_s, slow_ranks_s, slow_links_s : float
        What each adds to the mean, the others present: they and `alike_s` sum to it.
    steps : int
        How many were drawn.
    seed : int
    """

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    alike_s: float
    jitter_s: float
    slow_ranks_s: float
    slow_links_s: float
    steps: int
    seed: int
