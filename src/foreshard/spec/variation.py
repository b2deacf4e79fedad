"""What varies in a run: ranks that differ from step to step, and failures; and what follows from both."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from foreshard.errors import SpecError
from foreshard.spec.codec import invalid, one_of, whole

AUTO_INTERVAL = "auto"
TAILS = ("lognormal", "pareto")
CONTENTIONS = ("none", "every step", "once")
"""How often a network that transfers share was solved for ranks that differ: never, as none is shared; in
each step drawn; once with all ranks alike, as so many ranks, passes and draws are too much."""
MAX_JITTER = 1.0
MAX_FACTOR = 1000.0
MAX_STEPS = 10_000
_MOST = 1e18  # seconds, hours or bytes per second: beyond all that is


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
        one_of(self.jitter_tail, TAILS, key="--jitter-tail", name="jitter-tail", exact=True)
        whole(self.seeds, 1, MAX_STEPS, key="--seeds", name="seeds")
        whole(self.seed, 0, 2**63 - 1, key="--seed", name="seed")
        for flag, factors in (("--slow", self.slow), ("--slow-link", self.slow_link)):
            if not isinstance(factors, Mapping):
                rule, fix = (
                    "Is a factor of each rank that it names",
                    "Write it like 12=1.5, in Python {12: 1.5}",
                )
                raise invalid(factors, rule, key=flag, name=flag.strip("-"), fix=fix)
            for rank, factor in factors.items():
                whole(rank, 0, key=flag, name="rank")
                if not _is_number(factor) or not 1.0 <= factor <= MAX_FACTOR:
                    rule = f"A factor is from 1 to {MAX_FACTOR:g}: how many times as slow"
                    raise invalid(factor, rule, key=flag, name=flag.strip("-"), fix="Write it like 12=1.5")

    @classmethod
    def stated(cls, values: Mapping[str, Any]) -> Noise | None:
        """Return the noise that is given among the values of options, None where none is.

        Raises
        ------
        SpecError
            Also for draws of which nothing is drawn.
        """
        given = {one.name: values[one.name] for one in fields(cls) if values.get(one.name) is not None}
        idle = [name for name in ("jitter_tail", "seeds", "seed") if name in given]
        if idle and not given.get("jitter"):
            flag = f"--{idle[0].replace('_', '-')}"
            raise SpecError(
                f"{flag} without jitter",
                key=flag,
                value=given[idle[0]],
                rule="Only jitter is drawn; slow ranks and links are as slow in every step",
                fix=f"Add --jitter, or leave out {flag}",
            )
        return cls(**given) if given else None

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
                    fix = f"Name one of them, or leave out {flag}"
                    raise SpecError(
                        f"rank {rank} is not in the plan", key=flag, value=rank, rule=rule, fix=fix
                    )

    def without_slow_ranks(self) -> Noise:
        """Return the jitter alone, of the same draws."""
        return Noise(jitter=self.jitter, jitter_tail=self.jitter_tail, seeds=self.seeds, seed=self.seed)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDistribution:
    """Seconds of a step of which the ranks differ, the slowest of them waited for."""

    # mean_s, p50_s, p90_s, p99_s: over the steps drawn; the mean is the expected maximum over the ranks
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    alike_s: float  # of the same step with all ranks and links alike
    # jitter_s, slow_ranks_s, slow_links_s: what each adds to the mean, the others present: they and `alike_s`
    # sum to it
    jitter_s: float
    slow_ranks_s: float
    slow_links_s: float
    steps: int  # how many were drawn
    seed: int
    contention: str = "none"  # one of `CONTENTIONS`

    @classmethod
    def of(
        cls,
        all_s: Sequence[float],
        *,
        alike_s: float,
        jitter_s: float,
        slow_links_s: float,
        seed: int,
        contention: str = "none",
    ) -> StepDistribution:
        """Return that of the steps drawn; what jitter and links do not add to their mean is slow ranks'."""
        ordered = sorted(all_s)
        mean_s = math.fsum(ordered) / len(ordered)
        p50_s, p90_s, p99_s = (_quantile(ordered, level) for level in (0.5, 0.9, 0.99))
        return cls(
            mean_s=mean_s,
            p50_s=p50_s,
            p90_s=p90_s,
            p99_s=p99_s,
            alike_s=alike_s,
            jitter_s=jitter_s,
            slow_ranks_s=mean_s - alike_s - slow_links_s - jitter_s,
            slow_links_s=slow_links_s,
            steps=len(ordered),
            seed=seed,
            contention=contention,
        )


def _quantile(ordered: Sequence[float], level: float) -> float:
    """Return the quantile between the two nearest of ordered values."""
    place = level * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """What interrupts a run and what that costs.

    Attributes
    ----------
    mtbf_h, node_mtbf_h : float, optional
        Mean hours between failures of one device, and of one node apart from its devices. One at least.
    restart_s : float
        From a failure to the first new step, without loading the checkpoint.
    checkpoint_s : float, optional
        Seconds for which training stands still to save. By default the bytes over the bandwidth.
    checkpoint_bytes_per_s : float, optional
        Of all ranks together, to and from storage: what loading takes, and saving unless stated.
    checkpoint_every_s : float, optional
        Seconds of steps between checkpoints; the interval with the best goodput unless given.
    loader_tokens_per_s : float, optional
        What data loading delivers; steps wait for it where they are faster.
    """

    mtbf_h: float | None = None
    node_mtbf_h: float | None = None
    restart_s: float | None = None
    checkpoint_s: float | None = None
    checkpoint_bytes_per_s: float | None = None
    checkpoint_every_s: float | None = None
    loader_tokens_per_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is no such number, and failures of which something is not known."""
        flags = {
            "mtbf_h": "--mtbf-h",
            "node_mtbf_h": "--node-mtbf-h",
            "restart_s": "--restart-s",
            "checkpoint_s": "--checkpoint-s",
            "checkpoint_bytes_per_s": "--checkpoint-bandwidth",
            "checkpoint_every_s": "--checkpoint-every",
            "loader_tokens_per_s": "--loader-tokens-per-s",
        }
        for name, flag in flags.items():
            value = getattr(self, name)
            zero = name in _MAY_BE_ZERO
            if value is not None and not (_is_positive(value) or (zero and value == 0.0)):
                rule = f"Must be a finite number {'of at least' if zero else 'above'} 0"
                raise invalid(value, rule, key=flag, name=flag.strip("-"), fix="Leave it out, or give one")
        fails = self.mtbf_h is not None or self.node_mtbf_h is not None
        saves = self.checkpoint_s is not None or self.checkpoint_bytes_per_s is not None
        _needs(
            fails or not (saves or self.restart_s is not None or self.checkpoint_every_s),
            "--mtbf-h",
            "checkpoints and restarts without failures",
            "Hours between failures of a device (--mtbf-h) or a node (--node-mtbf-h) say how often",
        )
        _needs(not fails or self.restart_s is not None, "--restart-s", *_UNKNOWN_RESTART)
        _needs(not fails or saves, "--checkpoint-bandwidth", *_UNKNOWN_SAVING)


_MAY_BE_ZERO = ("restart_s", "checkpoint_s")
"""What takes no time where a spare stands by, and where training goes on while a copy is saved."""
_UNKNOWN_RESTART = ("failures without the time of a restart", "A failure costs a restart and lost steps")
_UNKNOWN_SAVING = (
    "failures without the time of a checkpoint",
    "It follows from --checkpoint-bandwidth and the bytes of weights and states, or is --checkpoint-s",
)


def _needs(known: bool, flag: str, what: str, rule: str) -> None:
    if not known:
        raise SpecError(what, key=flag, rule=rule, fix=f"Give {flag}")


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0.0 < value < _MOST and math.isfinite(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEfficiency:
    """What becomes of the time of a run."""

    goodput: float  # seconds of the predicted steps over seconds of the run
    # failures_per_day and mtbf_s: of the whole run
    failures_per_day: float
    mtbf_s: float | None
    # checkpoint_every_s and checkpoint_every_steps: seconds of steps, and steps, between checkpoints
    checkpoint_every_s: float | None
    checkpoint_every_steps: int | None
    young_daly_every_s: float | None  # the same by Daly's estimate
    # checkpoint_s, load_s, restart_s: saving once; loading after a failure; the whole restart, loading
    # counted
    checkpoint_s: float | None
    load_s: float | None
    restart_s: float | None
    checkpoint_bytes: float
    # parts of the run's time: `loading_data`, `checkpoints`, `lost_steps` (done again), `restarts`. With
    # goodput they sum to 1.
    lost: dict[str, float]
