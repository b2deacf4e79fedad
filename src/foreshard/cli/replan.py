"""`foreshard replan RUN PLAN`: give a running job another plan."""

from __future__ import annotations

import time
from pathlib import Path

import click

from foreshard.cli.options.answer import give, say
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.values import Amount
from foreshard.errors import ForeshardError, SpecError
from foreshard.report.screen import Screen

_LOOK_S = 0.2  # between two looks at the events


@verb_command("replan")
@click.argument("run", metavar="RUN")
@click.argument("plan_file", metavar="PLAN")
@click.option(
    "--wait-s", type=Amount(dimension="s"), default=600.0, help="How long to wait until it is adopted."
)
def command(run: str, plan_file: str, wait_s: float) -> None:
    """Let the job that trains in the folder RUN adopt the plan file PLAN after its present step.

    Weights and optimizer states move to where the plan has them; no sample is lost or repeated.

    \b
    foreshard replan run plan.json
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard.report.run_progress import RunFollower
    from foreshard.runtime.membership.operator_requests import RunLiveness, request_plan

    events = Path(run) / "events.jsonl"
    follow, until = RunFollower(events), time.monotonic() + wait_s
    number = request_plan(Path(run), plan_file)
    liveness = RunLiveness(Path(run), number)
    while time.monotonic() < until:
        ended = liveness.end()  # before the events: what they say counts
        answer = next((line for line in follow.lines(events) if line.get("request") == number), None)
        if answer is not None and answer["kind"] == "request refused":
            rule, fix = "A plan is adopted only as a whole", "Correct it, or give another"
            raise SpecError(answer["text"], file=plan_file, key="PLAN", rule=rule, fix=fix)
        if answer is not None:
            say(f"adopted after step {answer['step'] - 1}")
            give({"schema_version": 1, "request": number, "step": answer["step"]}, Screen)
            return
        if ended is not None:
            rule = "A run under way adopts the plan that was asked for last"
            fix = "Continue a run that has ended with foreshard run --resume"
            raise ForeshardError(f"not adopted: {ended}", file=run, key="RUN", rule=rule, fix=fix)
        time.sleep(_LOOK_S)
    rule, fix = "A run adopts a plan between two steps", "See events.jsonl; --wait-s waits longer"
    raise ForeshardError(f"not adopted within {wait_s:g} s", file=run, rule=rule, fix=fix)
