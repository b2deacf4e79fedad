"""Options of what varies in a run: ranks and steps that differ, failures, checkpoints, restarts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from typing import Any

import click

from foreshard.cli.options.values import Amount, Count, Word
from foreshard.errors import SpecError
from foreshard.spec.variation import AUTO_INTERVAL, TAILS, Noise, Reliability
from foreshard.units import parse

VARYING = tuple(one.name for kind in (Noise, Reliability) for one in fields(kind))
"""Names of the values of these options."""
NOISE = tuple(one.name for one in fields(Noise))
"""Those of ranks that differ."""


class Part(click.ParamType):  # type: ignore[type-arg]
    """A part of a whole from 0 to 1, as 3% or 0.03."""

    name = "PART"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the part, or fail."""
        text, number = str(value).strip(), -1.0
        with suppress(ValueError):
            number = float(text)
        with suppress(SpecError):
            number = parse(text, "part")
        if 0.0 <= number <= 1.0:
            return number
        self.fail(f"{text[:40]!r} is not a part from 0 to 1. Write it like 3% or 0.03", param, ctx)


class RankFactors(click.ParamType):  # type: ignore[type-arg]
    """Ranks and how many times as slow they are, as 12=1.5,40=2."""

    name = "RANK=FACTOR,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[int, float]:
        """Return the factor of each rank, or fail."""
        if isinstance(value, dict):
            return value
        found: dict[int, float] = {}
        for word in str(value).split(","):
            rank, equals, factor = word.partition("=")
            try:
                number, times = int(rank), float(factor.strip().removesuffix("x"))
            except ValueError:
                equals = ""
            if not equals or number < 0 or number in found:
                self.fail(f"{word[:40]!r} is not RANK=FACTOR. Write it like 12=1.5", param, ctx)
            found[number] = times
        return found


class Interval(Amount):
    """Seconds of steps between checkpoints, or `auto`."""

    name = "SECONDS|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the seconds, None for the best ones, or fail."""
        if str(value).strip().lower() == AUTO_INTERVAL:
            return None
        return super().convert(value, param, ctx)


VARYING_OPTIONS = (
    click.option(
        "--jitter",
        type=Part(),
        help="How much passes of a micro-batch vary: standard deviation over mean, as 3% (event engine).",
    ),
    click.option(
        "--jitter-tail", type=Word(*TAILS), help="Of these times: pareto has rare long ones (lognormal)."
    ),
    click.option(
        "--slow", type=RankFactors(), help="Ranks that compute so many times as long (event engine)."
    ),
    click.option(
        "--slow-link",
        type=RankFactors(),
        help="Ranks whose links and NIC carry so many times less (event engine).",
    ),
    click.option("--seeds", type=Count(), help="Steps to draw (default 32)."),
    click.option("--seed", type=Count(0), help="Of the draws (default 0)."),
    click.option(
        "--mtbf-h",
        type=Amount(dimension="s", unit="h"),
        help="Hours between failures of one device; goodput is predicted.",
    ),
    click.option(
        "--node-mtbf-h",
        type=Amount(dimension="s", unit="h"),
        help="Hours between failures of one node, apart from its devices.",
    ),
    click.option(
        "--restart-s",
        type=Amount(dimension="s", zero=True),
        help="Seconds from a failure to the first new step, without loading the checkpoint.",
    ),
    click.option(
        "--checkpoint-bandwidth",
        "checkpoint_bytes_per_s",
        type=Amount(dimension="bytes_per_s", unit="B/s"),
        help="Of all ranks together to storage, as '2 TB/s': saves and loads weights and states.",
    ),
    click.option(
        "--checkpoint-s",
        type=Amount(dimension="s", zero=True),
        help="Seconds training stands still to save (default: bytes over bandwidth).",
    ),
    click.option(
        "--checkpoint-every",
        "checkpoint_every_s",
        type=Interval(dimension="s"),
        help="Time of steps between checkpoints, as 30min, or auto: the best (default).",
    ),
    click.option(
        "--loader-tokens-per-s",
        type=Amount(dimension="tokens"),
        help="Tokens per second that data loading delivers.",
    ),
)
"""Options of noise, with the event engine, and of failures, with any."""
