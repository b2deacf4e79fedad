"""`foreshard simulate SCENARIO.toml`: policies side by side against a changing cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from foreshard.cli.answer import answering, cannot_write, give, say
from foreshard.cli.options import Count
from foreshard.cli.settings import configurable

if TYPE_CHECKING:
    from foreshard.control.contest import Contest
    from foreshard.report.screen import Screen


class Policies(click.ParamType):  # type: ignore[type-arg]
    """Names joined by commas."""

    name = "A,B"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """Return the names in order; which are known is checked with the scenario."""
        if isinstance(value, tuple):
            return value
        return tuple(word.strip() for word in str(value).split(",") if word.strip())


@answering
@configurable
@click.command("simulate")
@click.argument("scenario", metavar="SCENARIO.toml")
@click.option("--policy", type=Policies(), help="Policies to run (default: all).")
@click.option("--seeds", type=Count(1, 10_000), help="Paths to run (default 1).")
@click.option("--slots", type=Count(1, 10_000_000), help="Slots of a path (default: the scenario's).")
@click.option("--report", metavar="OUT.html", help="Write a one-file HTML report with all figures.")
def command(
    scenario: str, policy: tuple[str, ...] | None, seeds: int | None, slots: int | None, report: str | None
) -> None:
    """Run policies against a changing cluster, beside the bound of one who knows what will happen.

    Policies see what was true in the batch before, and which devices are there. Those named @budget stay on
    the best fixed devices that keep the budget, chosen with hindsight; a policy that breaks a budget is
    marked.

    \b
    foreshard simulate examples/scenarios/stragglers.toml
    foreshard simulate examples/scenarios/spot.toml --policy lyapunov,lb-bsp --seeds 10 --report spot.html
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard import api

    found = api.simulate(scenario, policies=policy, seeds=seeds or 1, slots=slots)
    if report:
        _write(report, found)
    give(found.to_dict(), lambda: _screen(found))


def _write(path: str, found: Contest) -> None:
    from foreshard.control.sweeps import sweeps
    from foreshard.report.html import write_page
    from foreshard.report.online_page import online_page

    try:
        size = write_page(path, online_page(found, sweeps(found.scenario, found.slots)))
    except OSError as error:
        raise cannot_write(path, error) from None
    say(f"report: {path} ({size / 1e6:.2f} MB)")


def _screen(found: Contest) -> Screen:
    from foreshard.report.online_table import online_screen

    return online_screen(found)
