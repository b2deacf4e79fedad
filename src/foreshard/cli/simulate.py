"""`foreshard simulate FILE.toml`: policies side by side against a changing cluster, or in a lab."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from foreshard.cli.options.answer import give, must_be_writable, save_page
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.values import Count, Words
from foreshard.errors import SpecError

if TYPE_CHECKING:
    from foreshard.spec.scenario import Scenario


@verb_command("simulate")
@click.argument("file", metavar="SCENARIO.toml")
@click.option("--policy", type=Words(), help="Policies to run (default: all).")
@click.option("--seeds", type=Count(1, 10_000), help="Paths to run (default 1).")
@click.option("--slots", type=Count(1, 10_000_000), help="Slots of a path (default: the scenario's).")
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    metavar="NAME=VALUE",
    help="A budget more, or instead of the file's of this name: usd_per_h=3.5, duty:2=0.5.",
)
@click.option("--report", metavar="OUT.html", help="Write a one-file HTML report with all figures.")
@click.option("--costs", metavar="FILE", help="Of a lab: measured costs of the job.")
@click.option("--plan", metavar="FILE", help="Of a lab: the plan that the run starts with.")
@click.option("--steps", type=Count(1, 1_000_000), help="Of a lab: steps to play (default 120).")
def command(file: str, budgets: tuple[str, ...], **options: Any) -> None:
    """Run policies against a changing cluster, beside the bound of one who knows what will happen.

    Policies see what was true in the batch before, and which devices are there. Those named @budget stay on
    the best fixed devices that keep the budget, chosen with hindsight; a policy that breaks a budget is
    marked. With the TOML file of a lab, --costs and --plan the policies of 'foreshard run' play in the lab.

    \b
    foreshard simulate examples/scenarios/stragglers.toml
    foreshard simulate examples/scenarios/spot.toml --policy lyapunov,lb-bsp --seeds 10 --report spot.html
    foreshard simulate examples/labs/swinging4.toml --costs costs.json --plan plan.json
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard import api

    if api.is_lab(file):
        _reject_stated(options, ("seeds", "slots", "report"), file, "A lab has one path", "Leave it out")
        _simulate_lab(file, budgets, options)
    else:
        _reject_stated(
            options, ("costs", "plan", "steps"), file, "Only a lab takes it", "Name the TOML of a lab"
        )
        if options["report"]:
            must_be_writable(options["report"])
        _simulate_cluster(file, budgets, options)


def _reject_stated(options: dict[str, Any], names: tuple[str, ...], file: str, rule: str, fix: str) -> None:
    for name in names:
        if options[name] is not None:
            raise SpecError(
                f"--{name} does not go with {file}", key=f"--{name}", value=options[name], rule=rule, fix=fix
            )


def _simulate_cluster(file: str, budgets: tuple[str, ...], options: dict[str, Any]) -> None:
    from foreshard import api
    from foreshard.report.simulation_table import online_screen

    scenario, seeds = _budgeted(file, budgets), options["seeds"] or 1
    found = api.simulate(scenario, policies=options["policy"], seeds=seeds, slots=options["slots"])
    if options["report"]:
        from foreshard.report.pages.simulation_page import online_page
        from foreshard.simulate.sweeps import sweeps

        save_page(options["report"], online_page(found, sweeps(found.scenario, found.slots)))
    give(found.to_dict(), lambda: online_screen(found))


def _budgeted(file: str, budgets: tuple[str, ...]) -> Scenario:
    """Return the scenario with further budgets, which take the place of those of their names."""
    from dataclasses import replace

    from foreshard.spec.scenario import budget_table, load_scenario

    scenario = load_scenario(file)
    more = {budget.name: budget for budget in map(budget_table, budgets)}
    kept = tuple(budget for budget in scenario.budget if budget.name not in more)
    return replace(scenario, budget=(*kept, *more.values()))


def _simulate_lab(file: str, budgets: tuple[str, ...], options: dict[str, Any]) -> None:
    for name in ("costs", "plan"):
        if options[name] is None:
            what = f"a lab without --{name}"
            rule = "A lab is played with measured costs, from a plan"
            raise SpecError(what, file=file, key=f"--{name}", rule=rule, fix=f"Add --{name} FILE")
    from foreshard.lab.simulated_run import simulate_lab
    from foreshard.report.lab_screen import simulated_lab_screen
    from foreshard.spec.online import RUN_POLICIES

    found = simulate_lab(
        file,
        costs=options["costs"],
        plan=options["plan"],
        steps=options["steps"] or 120,
        policies=options["policy"] or RUN_POLICIES,
        budgets=budgets,
    )
    policies = {name: run.to_dict() for name, run in found.items()}
    give(
        {"schema_version": 1, "lab": file, "policies": policies}, lambda: simulated_lab_screen(file, policies)
    )
